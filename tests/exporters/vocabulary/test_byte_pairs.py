"""Vocabularies of the tokenizers library as GGUF keys: the same ids, or a refusal with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import LLAMA3, TEXTS, byte_level, sentence_piece

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Config, Folder
from edgeinfer.exporters.gguf.writer import write_gguf
from edgeinfer.exporters.vocabulary import read_vocabulary as read_vocabulary_of
from edgeinfer.models.gguf import MetadataValue, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

CONFIG = {"bos_token_id": 0, "eos_token_id": [1, 2]}


def read_vocabulary(folder: Path, config: dict[str, Any], n_rows: int) -> dict[str, MetadataValue]:
    return read_vocabulary_of(Folder(folder), Config(config, folder / "config.json"), n_rows)


def converted(folder: Path, config: dict[str, Any], n_rows: int) -> Tokenizer:
    write_gguf(folder / "vocabulary.gguf", read_vocabulary(folder, config, n_rows), [])
    with ModelFile.open(folder / "vocabulary.gguf") as file:
        return Tokenizer.from_file(file)


@pytest.mark.parametrize("pattern, ignore_merges", [(LLAMA3, True), (None, False)])
def test_a_byte_level_vocabulary_gives_the_same_ids(pattern: str | None, ignore_merges: bool, tmp_path: Path) -> None:
    theirs = byte_level(tmp_path, pattern, ignore_merges)
    ours = converted(tmp_path, CONFIG, 640)
    assert ours.n_vocab == 640 and ours.bos_id == 0 and ours.eos_id == 1 and {1, 2} <= ours.stop_ids
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(theirs.encode(text, add_special_tokens=False).ids) == text
    assert ours.encode("<|eot_id|>", parse_special=True) == [0, 2]


def test_a_vocabulary_of_sentence_piece_gives_the_same_ids(tmp_path: Path) -> None:
    theirs = sentence_piece(tmp_path)
    ours = converted(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, theirs.get_vocab_size())
    for text in TEXTS[:3]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text), skip_special=True) == text


def test_added_tokens_have_the_types_that_llama_cpp_gives_them(tmp_path: Path) -> None:
    """Control tokens by their look, and unused ones for ids without a token."""
    byte_level(tmp_path)
    more = {"<|a|>": 3, "<unused7>": 3, "<pad>": 3, "\u2581\u2581": 4, "<think>": 4}
    added(tmp_path, 600, *more)
    keys = read_vocabulary(tmp_path, CONFIG, 607)
    assert keys["tokenizer.ggml.tokens"][600:] == [*more, "[PAD605]", "[PAD606]"]  # type: ignore[index]
    assert keys["tokenizer.ggml.token_type"][600:] == [*more.values(), 5, 5]  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match="'<unused7>' and 3 more tokens have no row of embeddings"):
        assert len(read_vocabulary(tmp_path, CONFIG, 601)["tokenizer.ggml.tokens"]) == 601  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens",
    [
        [(601, "[x]"), (600, "[y]")],
        [(603, "[x]"), (607, "[y]")],
        [(600, "[x]"), (600, "[y]")],
        [(600, "[x]"), (601, "[x]"), (602, "[y]")],
        [(601, "er"), (600, "[y]")],  # in the vocabulary
        [(300, "[x]"), (600, "[y]")],  # whose id is another token's
        [(2000, "[x]"), (600, "")],
    ],
    ids=["swapped", "holes", "one id", "twice", "in the vocabulary", "an id of another", "outside and empty"],
)
def test_added_tokens_have_the_ids_of_the_library(tokens: list[tuple[int, str]], tmp_path: Path) -> None:
    byte_level(tmp_path)
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    more = [{"id": id, "content": text, **flags} for id, text in tokens]
    changed(tmp_path, lambda source: source["added_tokens"].extend(more))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.warns(RuntimeWarning, match="numbers added tokens by their order"):
        ours = converted(tmp_path, CONFIG, 610)
    assert ours.n_vocab == 610
    for text in {text for _, text in tokens} - {""}:
        id = theirs.token_to_id(text)
        assert ours.encode(f"a{text} b", parse_special=True) == theirs.encode(f"a{text} b").ids
        assert ours.name(id) == theirs.id_to_token(id) == text


def test_an_added_token_with_the_id_of_another_token_is_refused(tmp_path: Path) -> None:
    """The library counts tokens, and so gives the number of one behind a hole a second time."""
    byte_level(tmp_path)
    changed(tmp_path, lambda source: source["model"]["vocab"].update({"er": 600}))
    added(tmp_path, 601, "[x]")
    with pytest.raises(UnsupportedModel, match=r"gives 600 to 'er' and to the added '\[x\]'"):
        read_vocabulary(tmp_path, CONFIG, 610)


def test_added_tokens_of_sentence_piece_have_spaces(tmp_path: Path) -> None:
    n = sentence_piece(tmp_path).get_vocab_size()
    added(tmp_path, n, "[a\u2581b]", "<|\u2581|>")
    with pytest.warns(RuntimeWarning, match="are cut out of texts otherwise than"):  # it is "[a b]" here
        keys = read_vocabulary(tmp_path, CONFIG, n + 2)
    assert keys["tokenizer.ggml.tokens"][n:] == ["[a b]", "<|\u2581|>"]  # type: ignore[index]
    assert keys["tokenizer.ggml.token_type"][n:] == [4, 3]  # type: ignore[index]


def test_a_file_is_read_as_it_cuts_texts(tmp_path: Path) -> None:
    """transformers 5 writes merges as pairs, and may leave out a step, here the one that cuts digits."""
    byte_level(tmp_path, None, False)
    assert read_vocabulary(tmp_path, CONFIG, 600)["tokenizer.ggml.pre"] == "gpt-2"
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, {"type": "Sequence", "pretokenizers": [bytes_]}]}
    changed(tmp_path, lambda source: source.update(pre_tokenizer=steps))
    keys = read_vocabulary(tmp_path, CONFIG, 600)
    assert keys["tokenizer.ggml.pre"] == "starcoder"
    as_text = [" ".join(merge) for merge in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]]
    changed(tmp_path, lambda source: source["model"].update(merges=as_text))
    assert read_vocabulary(tmp_path, CONFIG, 600) == keys


def test_ends_of_generation_config_stop_an_answer(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 300, 2, 301]}))
    keys = read_vocabulary(tmp_path, {"eos_token_id": 1, "pad_token_id": 0}, 600)
    assert keys["tokenizer.ggml.eos_token_id"] == 1 and keys["tokenizer.ggml.padding_token_id"] == 0
    assert keys["tokenizer.ggml.eot_token_id"] == 300 and keys["tokenizer.ggml.eom_token_id"] == 301
    assert converted(tmp_path, {"eos_token_id": 1}, 600).stop_ids >= {1, 2, 300, 301}  # 2 by its text, <|eot_id|>
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 300, 301, 302]}))
    with pytest.warns(RuntimeWarning, match="answers may end with 3 more tokens, of which GGUF can name 2"):
        read_vocabulary(tmp_path, {"eos_token_id": [1]}, 600)
    (tmp_path / "generation_config.json").unlink()
    with pytest.warns(RuntimeWarning, match="pad_token_id is 900, and there are 600 tokens: it is left out"):
        read_vocabulary(tmp_path, {"pad_token_id": 900, "eos_token_id": 1}, 600)


def test_ends_that_are_no_tokens_are_named(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 700, 800]}))
    with pytest.warns(RuntimeWarning, match="generation_config.json: eos_token_id 700 and 1 more of 600 tokens"):
        assert read_vocabulary(tmp_path, {"eos_token_id": 1}, 600)["tokenizer.ggml.eos_token_id"] == 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(600))}))
    with pytest.warns(RuntimeWarning, match="of which GGUF can name 2") as told:
        read_vocabulary(tmp_path, {"eos_token_id": 1}, 600)
    assert all(len(str(warning.message)) < 400 for warning in told)
    (tmp_path / "generation_config.json").unlink()
    with pytest.warns(RuntimeWarning, match="bos_token_id must be a token id, or a list of some: found 'x'"):
        assert "tokenizer.ggml.bos_token_id" not in read_vocabulary(tmp_path, {"bos_token_id": "x"}, 600)


def test_begin_and_end_may_be_named_by_their_text_alone(tmp_path: Path) -> None:
    byte_level(tmp_path)
    settings = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for config in ({}, {"bos_token_id": 9, "eos_token_id": 2}):  # tokenizer_config.json counts first
        ours = converted(tmp_path, config, 600)
        assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.add_eos) == (0, 1, True, False)


def added(folder: Path, first: int, *texts: str) -> None:
    """Add tokens that are not marked as special."""
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": first + n, "content": text, **flags} for n, text in enumerate(texts)]
    changed(folder, lambda source: source["added_tokens"].extend(tokens))


def changed(folder: Path, change: Any) -> None:
    """Change what tokenizer.json says."""
    path = folder / "tokenizer.json"
    source = json.loads(path.read_text())
    change(source)
    path.write_text(json.dumps(source))


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer.json: is missing"):
        read_vocabulary(tmp_path, CONFIG, 600)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="no JSON"):
        read_vocabulary(tmp_path, CONFIG, 600)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(UnsupportedModel, match="must have a model of type BPE: found 'Unigram'"):
        read_vocabulary(tmp_path, CONFIG, 600)
    byte_level(tmp_path)
    with pytest.raises(UnsupportedModel, match="has 600 tokens, and the model 599 embeddings"):
        read_vocabulary(tmp_path, CONFIG, 599)
    byte_level(tmp_path, r"[a-m]+|[^a-m]+")
    with pytest.raises(UnsupportedModel, match=r"none cuts like this one: .*\[a-m\]"):
        read_vocabulary(tmp_path, CONFIG, 600)
    byte_level(tmp_path)
    changed(tmp_path, lambda source: source.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(UnsupportedModel, match="cannot be converted: .* would become other tokens"):
        read_vocabulary(tmp_path, CONFIG, 600)
    byte_level(tmp_path)
    changed(tmp_path, lambda source: source.update(pre_tokenizer=None))
    with pytest.raises(UnsupportedModel, match="must be byte-level BPE, or BPE with byte_fallback"):
        read_vocabulary(tmp_path, CONFIG, 600)
