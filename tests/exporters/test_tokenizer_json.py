"""tokenizer.json from a GGUF's vocabulary, read by the library `tokenizers`: the same ids as the file's tokenizer."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from byte_vocabulary import byte_file
from tokenizer_strings import sample_texts, texts

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.tokenizer_json import tokenizer_config, tokenizer_json, write_tokenizer
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenization.pre_tokenizers import PRE_TOKENIZERS, SPACE_MARKED, UNICODE_16
from edgeinfer.models.tokenizer import Tokenizer

FAMILIES = sorted({PRE_TOKENIZERS[pre]: pre for pre in PRE_TOKENIZERS if pre not in SPACE_MARKED}.values())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "a a", "aa a", "1 2", "12 3", "Ã ©", "Ġ Ġ", "ĠĠ ĠĠ"]
PIECES = {"▁": -1, "a": -2, "b": -3, "c": -4, "e": -5, "▁a": -6, "ab": -7, "bc": -8, "▁▁": -9, "abc": -10, "é": -11}
# The library knows letters of Unicode 16, llama.cpp does not; see published_pre_tokenizers.
NEW = re.compile(f"[{re.sub('[0-9A-F]+', lambda code: chr(int(code[0], 16)), UNICODE_16).replace(' ', '')}]")


def compared(file: ModelFile, strings: list[str]) -> list[str]:
    """Strings with other ids in tokenizer.json than in the file's own tokenizer."""
    ours, theirs = Tokenizer.from_file(file), tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    found = theirs.encode_batch(strings)
    expected = (ours.encode(text, parse_special=True) for text in strings)
    return [text for text, ids, each in zip(strings, expected, found, strict=True) if ids != each.ids]


def spm_file(**changes: Any) -> ModelFile:
    values = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<user>"],
        "scores": [0.0] * 259 + [float(score) for score in PIECES.values()] + [0.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return cast(ModelFile, SimpleNamespace(path=Path("tiny.gguf"), metadata=metadata))


def bpe_file(pre: str) -> ModelFile:
    tokens = [merge.replace(" ", "") for merge in MERGES]
    file = byte_file(["<|endoftext|>", "<|im_end|>"], tokens, tokenizer__ggml__pre=pre, tokenizer__ggml__merges=MERGES)
    cast(dict[str, Any], file.metadata)["tokenizer.ggml.token_type"] = [1] * 256 + [3, 3] + [1] * len(tokens)
    return file


def line_file() -> ModelFile:
    """A vocabulary of Gemma 4's kind: "▁" for a space, merges, and runs of line ends that no merges make."""
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "\n", "\n\n", "\n\n\n"]
    merges = ["a b", "b c", "ab c", "▁ a", "▁ ▁"]
    return spm_file(
        model="gemma4", tokens=tokens, merges=merges, token_type=[2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    )


@cache
def ten_thousand() -> list[str]:
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<user>", "<unk>"]
    plain = (text.encode(errors="replace").decode() for text in texts(1, specials, sample_texts()))
    return list(itertools.islice(plain, 10_000))


def strings_of(n: int) -> list[str]:
    return ten_thousand()[:n]


def test_ids_of_the_default_model_are_equal_on_ten_thousand_strings(default_model: Path) -> None:
    with ModelFile.open(default_model) as file:
        tokenizer = Tokenizer.from_file(file)
        pieces = {tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)}
        different = compared(file, strings_of(10_000))
    # The library drops a byte that has no token before it merges; here it keeps its neighbours apart.
    lost = [byte for byte in range(256) if bytes([byte]) not in pieces]
    known = [text for text in different if not NEW.search(text) and not any(byte in text.encode() for byte in lost)]
    assert known == [] and len(different) < 20


@pytest.mark.parametrize("pre", FAMILIES)
def test_each_pre_tokeniser_cuts_alike(pre: str) -> None:
    strings = [text for text in strings_of(150) if not NEW.search(text)]
    if pre in ("gpt-4o", "tekken"):  # as published they know the case of all letters
        strings = [text for text in strings if text.isascii()]
    assert compared(bpe_file(pre), strings) == []


@pytest.mark.parametrize(
    "file", [spm_file(), spm_file(add_space_prefix=False), line_file()], ids=["spm", "unprefixed", "lines"]
)
def test_vocabularies_with_a_mark_for_spaces_are_merged_alike(file: ModelFile) -> None:
    strings = ["abc ab  a", "abcabc\n\n\nab", "é日本", " <user> a", *strings_of(500)]
    assert compared(file, strings) == []


def test_what_no_tokenizer_json_can_say_is_refused() -> None:
    merges = bpe_file("qwen2")
    cast(dict[str, Any], merges.metadata)["tokenizer.ggml.merges"] = [*MERGES, "a x"]
    with pytest.raises(UnsupportedModel, match="merge 'a x' makes no token"):
        tokenizer_json(merges)
    odd = bpe_file("qwen2")
    cast(dict[str, Any], odd.metadata)["tokenizer.ggml.tokens"][260] = "\udcff"
    with pytest.raises(UnsupportedModel, match="token 260 is no UTF-8"):
        tokenizer_json(odd)
    lossy = byte_file(["<s>", "</s>"], tokenizer__ggml__merges=["a v"], tokenizer__ggml__pre="qwen2")
    tokens = cast(dict[str, Any], lossy.metadata)["tokenizer.ggml.tokens"]
    tokens[tokens.index("Ã")], tokens[tokens.index("¯")] = "av", "unused"  # the bytes of ï
    with pytest.raises(UnsupportedModel, match="'naïve Straße café' they are"):
        tokenizer_json(lossy)


def test_files_have_the_template_the_special_tokens_and_what_is_added(tmp_path: Path) -> None:
    file = spm_file(add_eos_token=True)
    cast(dict[str, Any], file.metadata)["tokenizer.chat_template"] = "{{ messages }}"
    assert [path.name for path in write_tokenizer(file, tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}" and config["add_bos_token"] and config["add_eos_token"]
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read.encode("abc").tokens == ["<s>", "▁a", "bc", "</s>"]
    assert read.decode(read.encode("abc é 日").ids) == "abc é 日"
    assert tokenizer_config(file, "other")["chat_template"] == "other"
