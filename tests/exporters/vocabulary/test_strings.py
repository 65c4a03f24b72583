"""Vocabularies on the strings of tests/benchmarks/compare_tokenizers.py, against the library `tokenizers`."""

import itertools
import re
from pathlib import Path

import pytest
import tokenizers
from checkpoints import LLAMA3, byte_level, gemma4_vocabulary, sentence_piece
from tokenizer_strings import sample_texts, texts

from edgeinfer.exporters.checkpoint import Config, Folder
from edgeinfer.exporters.tokenizer_json import write_tokenizer
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.exporters.vocabulary.comparison import tokenizer_of
from edgeinfer.models.gguf import MetadataValue, ModelFile
from edgeinfer.models.tokenization.pre_tokenizers import PRE_TOKENIZERS, UNICODE_16

# The library knows letters of Unicode 16, llama.cpp does not.
NEW = re.compile(f"[{re.sub('[0-9A-F]+', lambda code: chr(int(code[0], 16)), UNICODE_16).replace(' ', '')}]")


def keys_of(folder: Path, n_rows: int, pre: str | None = None) -> dict[str, MetadataValue]:
    return read_vocabulary(Folder(folder), Config({}, folder / "config.json"), n_rows, pre)


def strings(n: int, *specials: str) -> list[str]:
    return list(
        itertools.islice((text for text in texts(5, list(specials), sample_texts()) if not NEW.search(text)), n)
    )


def test_a_published_vocabulary_comes_back(default_model: Path, tmp_path: Path) -> None:
    """SmolLM2's, from its GGUF file to tokenizer.json and back: the same tokens, types, merges and template."""
    with ModelFile.open(default_model) as file:
        expected = dict(file.metadata)
        write_tokenizer(file, tmp_path)
    found = keys_of(tmp_path, len(expected["tokenizer.ggml.tokens"]))  # type: ignore[arg-type]
    pre, other = found.pop("tokenizer.ggml.pre"), expected.pop("tokenizer.ggml.pre")
    assert PRE_TOKENIZERS[str(pre)] == PRE_TOKENIZERS[str(other)]
    names = set(expected) & set(found)
    assert names >= {f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges", "eos_token_id")}
    assert "tokenizer.chat_template" in names and [name for name in names if found[name] != expected[name]] == []


@pytest.mark.parametrize("pattern", [LLAMA3, None])
def test_byte_level_vocabularies_give_the_same_ids(pattern: str | None, tmp_path: Path) -> None:
    theirs = byte_level(tmp_path, pattern, ignore_merges=pattern is not None)
    ours = tokenizer_of(keys_of(tmp_path, 600), tmp_path)
    for text in strings(1000, "<|begin|>", "<|end|>", "<|eot_id|>"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected


def test_vocabularies_with_byte_fallback_give_the_same_ids(tmp_path: Path) -> None:
    theirs: tokenizers.Tokenizer = sentence_piece(tmp_path)
    ours = tokenizer_of(keys_of(tmp_path, theirs.get_vocab_size()), tmp_path)
    for text in strings(1000, "the", "▁"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected


def test_a_vocabulary_of_gemma_4_keeps_its_merges_and_gives_the_same_ids(tmp_path: Path) -> None:
    theirs = gemma4_vocabulary(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    keys = keys_of(tmp_path, theirs.get_vocab_size(), "gemma4")
    ours = tokenizer_of(keys, tmp_path)
    assert keys["tokenizer.ggml.model"] == "gemma4" and keys["tokenizer.ggml.add_bos_token"] is True
    for text in [*strings(1000, "the", "<|turn>", "<|channel>"), "a\n\n\nb \n c"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected
    shown = {
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    }
    types, tokens = keys["tokenizer.ggml.token_type"], keys["tokenizer.ggml.tokens"]
    assert {text for text, kind in zip(tokens, types, strict=True) if kind == 4} == shown  # type: ignore[arg-type]
