"""tokenizer.model: the ids of SentencePiece itself, and what GGUF has no words for.

sentence_piece.json has a model that SentencePiece trained and what it makes of some texts; it says how.
"""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from checkpoints import sentence_piece

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Config, Folder
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.exporters.vocabulary.comparison import tokenizer_of
from edgeinfer.exporters.vocabulary.protobuf import BadMessage, fields, signed
from edgeinfer.models.gguf import MetadataValue

GOLDEN = json.loads((Path(__file__).parent / "sentence_piece.json").read_text())
MODEL = zlib.decompress(base64.b64decode(GOLDEN["model"]))
N_PIECES = 460


def field(number: int, value: bytes | int | float) -> bytes:
    """A field on the wire."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % (1 << 64))
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    low = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(part | 0x80 for part in low[:-1]), low[-1]])


def keys_of(folder: Path, model: bytes = MODEL, n_rows: int = N_PIECES, **files: Any) -> dict[str, MetadataValue]:
    """The keys of a folder with this model and with JSON files."""
    (folder / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_vocabulary(Folder(folder), Config(files.get("config", {}), folder / "config.json"), n_rows)


def test_ids_are_those_of_sentence_piece(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, n_rows=464)
    ours = tokenizer_of(keys, tmp_path)
    for text, ids in GOLDEN["ids"].items():
        if "<tool>" not in text:  # behind it llama.cpp adds a space
            assert ours.encode(text, add_special=False) == ids
            assert ours.decode([1, *ids], skip_special=True) == text
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.add_eos) == (1, 2, True, False)
    texts, types, scores = (keys[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    assert texts[:8] == ["<unk>", "<s>", "</s>", "<pad>", "<|turn|>", "▁▁", "\n\n", "<tool>"]
    assert types[:8] == [2, 3, 3, 3, 4, 1, 1, 4] and types[8:264] == [6] * 256 and types[460:] == [5] * 4
    assert texts[460] == "[PAD460]" and scores[460] == -10000 and scores[264:268] == [0, -1, -2, -3]
    assert keys["tokenizer.ggml.padding_token_id"] == 3 and keys["tokenizer.ggml.add_space_prefix"] is True


def test_tokens_are_added_by_two_files(tmp_path: Path) -> None:
    """U+2581 becomes a space, and some are control tokens by their look."""
    decoder = {
        "461": {"content": "<|new|>", "special": False},
        "462": {"content": "▁▁▁▁", "special": False},
        "463": {"content": "[END]", "special": True},
        "4": {"content": "<|turn|>"},
        "470": {"content": "<image>"},
    }
    with pytest.warns(RuntimeWarning, match="'<image>' have no row of embeddings: left out"):
        keys = keys_of(
            tmp_path,
            n_rows=464,
            added_tokens={"<more>": 460},
            tokenizer_config={"added_tokens_decoder": decoder, "eos_token": "[END]", "add_bos_token": False},
            config={"bos_token_id": 1, "eos_token_id": 2},
        )
    assert keys["tokenizer.ggml.tokens"][460:] == ["<more>", "<|new|>", "    ", "[END]"]  # type: ignore[index]
    assert keys["tokenizer.ggml.token_type"][460:] == [4, 3, 4, 3]  # type: ignore[index]
    assert keys["tokenizer.ggml.token_type"][4] == 3 and keys["tokenizer.ggml.scores"][460] == -1000  # type: ignore[index]
    assert keys["tokenizer.ggml.eos_token_id"] == 463 and keys["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("added", [{"<a>": 460, "<b>": 460}, {"<a>": 461, "<new>": 460, "<c>": 461}])
def test_two_added_tokens_with_one_id_are_refused(added: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="added tokens must have ids of their own: .* are both 46"):
        keys_of(tmp_path, n_rows=464, added_tokens=added)


def test_the_settings_of_the_model_count(tmp_path: Path) -> None:
    without_prefix = MODEL + field(3, field(3, 0))
    assert keys_of(tmp_path, without_prefix)["tokenizer.ggml.add_space_prefix"] is False
    assert keys_of(tmp_path, without_prefix)["tokenizer.ggml.tokens"][5] == "  "  # type: ignore[index]
    config = {"add_prefix_space": False}
    assert keys_of(tmp_path, tokenizer_config=config)["tokenizer.ggml.add_space_prefix"] is False
    no_ends = MODEL + field(2, field(41, -1) + field(42, 9999))
    keys = keys_of(tmp_path, no_ends)
    assert "tokenizer.ggml.bos_token_id" not in keys and "tokenizer.ggml.eos_token_id" not in keys


@pytest.mark.parametrize(
    "more, words",
    [
        (field(2, field(3, 1)), "must be of type bpe: found unigram"),
        (field(2, field(35, 0)), "must fall back to bytes for characters without a token"),
        (field(2, field(24, 1)), "must have spaces before words"),
        (field(3, field(2, b"table")), r"must take texts as they are \(identity\)"),
        (field(3, field(4, 1)), "must keep all spaces: found remove_extra_whitespaces"),
        (field(3, field(5, 0)), "must write spaces as U[+]2581"),
    ],
)
def test_a_model_that_gguf_has_no_words_for_is_refused(more: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"the model of SentencePiece {words}"):
        keys_of(tmp_path, MODEL + more)
    with pytest.raises(UnsupportedModel, match="has 460 tokens, and the model 459 embeddings"):
        keys_of(tmp_path, n_rows=459)


@pytest.mark.parametrize(
    "model",
    [
        *(b"\xff", b"\x0a\x05ab", b"\x0b", MODEL[:1000], MODEL + b"\x80" * 11, MODEL + b"\x0d\0\0"),
        *(MODEL + field(1, 3), MODEL + field(1, field(1, b"\xff")), MODEL + field(1, field(3, 9))),
        *(MODEL + field(1, field(2, 7)), MODEL + field(1, field(2, float("nan"))), MODEL + field(2, 1.5)),
    ],
)
def test_a_damaged_model_is_an_error(model: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is no model of SentencePiece"):
        keys_of(tmp_path, model)


def test_a_vocabulary_that_is_not_read_says_what_to_do(tmp_path: Path) -> None:
    for name, words in [
        ("config", "there is no other"),
        ("vocab", "merges.txt do not say"),
        ("tekken", "tekken.json is"),
    ]:
        (tmp_path / f"{name}.json").write_text("{}")
        with pytest.raises(
            UnsupportedModel, match=rf"is missing, and so is tokenizer.model; .*{words}.*save_pretrained"
        ):
            read_vocabulary(Folder(tmp_path), Config({}, tmp_path / "config.json"), 9)
        if name != "config":
            (tmp_path / f"{name}.json").unlink()


def test_a_model_that_differs_from_tokenizer_json_is_left_aside(tmp_path: Path) -> None:
    """As one of another version, or a pointer of Git LFS, does."""
    n_rows = max(N_PIECES, sentence_piece(tmp_path).get_vocab_size())
    config = Config({}, tmp_path / "config.json")
    alone = read_vocabulary(Folder(tmp_path), config, n_rows)
    for model in (MODEL, b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "tokenizer.model").write_bytes(model)
        assert read_vocabulary(Folder(tmp_path), config, n_rows) == alone


def test_fields_of_a_message() -> None:
    message = field(1, b"ab") + field(2, 1.5) + field(300, -2) + varint(4 << 3 | 1) + struct.pack("<Q", 7)
    found = [
        (number, bytes(value) if isinstance(value, memoryview) else value)
        for number, value in fields(memoryview(message))
    ]
    assert found[:2] == [(1, b"ab"), (2, 1.5)] and found[3] == (4, 7)
    assert found[2][0] == 300 and signed(found[2][1]) == -2  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="a field of 5 bytes, of which there are 2"):
        list(fields(memoryview(b"\x0a\x05ab")))
