"""tokenizer.json and tokenizer_config.json of Hugging Face, made from a GGUF file's vocabulary.

Byte-level vocabularies become BPE behind the published pre-tokeniser; those of SentencePiece become BPE with byte
fallback, whose merges follow from the scores. What is made is loaded by the library `tokenizers` and compared with the
file's own tokenizer before it is given away.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.published_pre_tokenizers import LOOSE, pre_tokenizer_of, split
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenization.metadata import TokenizerMetadata, kind_of
from edgeinfer.models.tokenization.pre_tokenizers import GEMMA4, LINES, PRE_TOKENIZERS, SPACE_MARKED, keeps_tokens
from edgeinfer.models.tokenization.vocabulary import Vocabulary
from edgeinfer.models.tokenizer import Tokenizer

# What both tokenizers must cut alike: words, case, numbers, white space, line ends, code, scripts, emoji with joiners.
PROBES = (
    *("Hello world", "hello", " hello", "", " ", "a  b   c", "The quick brown fox, isn't it? I'LL go; we've DONE."),
    *(
        "0 12 345 6789 1234567890",
        "3.14159e-10 x2 4x",
        "tab\tand\nnew\n\nlines\r\nhere\r\n  \n",
        "   before, behind  ",
    ),
    *("def f(x):\n    return x**2  # ok\n", "a->b::c<T>&&d||!e?f:g", "https://example.com/a?b=c&d=%20#e", "C:\\x.txt"),
    *("naïve Straße café", "Привет, мир", "こんにちは世界", "你好，世界。", "안녕하세요", "नमस्ते दुनिया", "שלום עולם"),
    *("👩‍💻 👍🏽 🇩🇪 ❤️‍🔥", "สวัสดี", "e\u0301 n\u0303", "—“quoted”… «x»", "x" * 40, "\n" * 5, " " * 33, "\u00a0\u3000x"),
)
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SPACE_MARK = "\u2581"


def tokenizer_json(file: ModelFile) -> dict[str, Any]:
    """The content of tokenizer.json for a model file, checked on PROBES and on the names of special tokens.

    Raises UnsupportedModel where it would not give the same ids, TokenizerError for a damaged vocabulary.
    """
    tokenizer = Tokenizer.from_file(file)
    vocabulary = Vocabulary(TokenizerMetadata(file))
    vocabulary.find_stop_ids(tokenizer.eos_id)
    model, pre = kind_of(vocabulary.metadata)
    if model == "llama":
        parts = _by_score(vocabulary)
    else:
        parts = _space_marked(vocabulary, pre) if pre in SPACE_MARKED else _byte_level(vocabulary, pre)
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokenizer),
        **parts,
        "post_processor": _post_processor(tokenizer),
    }
    _check(file, tokenizer, made)
    return made


def tokenizer_config(file: ModelFile, template: str | None = None) -> dict[str, Any]:
    """The content of tokenizer_config.json. template: in place of the file's own chat template."""
    tokenizer = Tokenizer.from_file(file)
    metadata = TokenizerMetadata(file)
    model, pre = kind_of(metadata)
    plain_space = model == "llama" or pre in SPACE_MARKED
    made: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer" if plain_space else "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    if model == "llama":
        made["legacy"] = True
        made["add_prefix_space"] = metadata.flag("add_space_prefix", True)
    for key, role in _ROLES.items():
        id = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}.get(key, metadata.token_id(key, tokenizer.n_vocab))
        if id is not None:
            made[role] = tokenizer.name(id)
    template = template or tokenizer.chat_template
    if template is not None:
        made["chat_template"] = template
    return made


def write_tokenizer(file: ModelFile, folder: Path, template: str | None = None) -> list[Path]:
    """Write both files into a folder; see tokenizer_json and tokenizer_config. Raises OSError too."""
    contents = {"tokenizer.json": tokenizer_json(file), "tokenizer_config.json": tokenizer_config(file, template)}
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")
    return [folder / name for name in contents]


# --- the kinds of vocabularies ----------------------------------------------------------------------------------------


def _byte_level(vocabulary: Vocabulary, pre: str) -> dict[str, Any]:
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer_of(pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, _listed_merges(vocabulary), ignore_merges=keeps_tokens(pre)),
    }


def _space_marked(vocabulary: Vocabulary, pre: str) -> dict[str, Any]:
    keeps_runs = pre in GEMMA4  # of line ends; any other line that is a token is made by merges too
    return {
        "normalizer": _replacing(" ", _SPACE_MARK),
        "pre_tokenizer": split(LINES),
        "decoder": {"type": "Sequence", "decoders": [_replacing(_SPACE_MARK, " "), *_FUSING]},
        "model": _bpe(vocabulary, _listed_merges(vocabulary), byte_fallback=True, ignore_merges=keeps_runs),
    }


def _by_score(vocabulary: Vocabulary) -> dict[str, Any]:
    prefixed = vocabulary.metadata.flag("add_space_prefix", True)
    marking, decoders = [_replacing(" ", _SPACE_MARK)], [_replacing(_SPACE_MARK, " "), *_FUSING]
    if prefixed:
        marking.insert(0, {"type": "Prepend", "prepend": _SPACE_MARK})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": marking},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, _merges_by_score(vocabulary), byte_fallback=True),
    }


_FUSING = [{"type": "ByteFallback"}, {"type": "Fuse"}]


def _replacing(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _bpe(vocabulary: Vocabulary, merges: list[str], **changes: bool) -> dict[str, Any]:
    ids = _ids(vocabulary)
    unknown = vocabulary.metadata.token_id("unknown", len(ids)) if changes.get("byte_fallback") else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bool(changes.get("byte_fallback")),
        "byte_fallback": False,
        "ignore_merges": False,
        **changes,
        "vocab": ids,
        "merges": merges,
    }


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """All tokens. Raises UnsupportedModel for a text that JSON cannot hold."""
    ids = {text: id for id, text in enumerate(vocabulary.tokens.tolist())}
    odd = next((id for text, id in ids.items() if re.search("[\ud800-\udfff]", text)), None)
    if odd is not None:
        raise UnsupportedModel(
            f"{vocabulary.metadata.path}: token {odd} is no UTF-8, which tokenizer.json cannot hold: convert the model "
            "again from its own tokenizer"
        )
    return ids


def _listed_merges(vocabulary: Vocabulary) -> list[str]:
    """The merges of the file, without those that have no effect. Raises UnsupportedModel."""
    ids = _ids(vocabulary)
    controls = {vocabulary.tokens[id] for id in vocabulary.controls()}
    merges: dict[str, None] = {}
    for merge in vocabulary.metadata.strings("merges").tolist():
        left, space, right = merge.partition(" ")
        if not space or " " in right or left not in ids or right not in ids or left + right in controls:
            continue
        if left + right not in ids:
            raise UnsupportedModel(
                f"{vocabulary.metadata.path}: the merge {merge!r} makes no token, which tokenizer.json cannot hold: "
                "convert the model again from its own tokenizer"
            )
        merges.setdefault(merge)
    return list(merges)


def _merges_by_score(vocabulary: Vocabulary) -> list[str]:
    """All pairs of tokens that make a token: the best-scored token first, of its pairs the longer left part."""
    scores = vocabulary.metadata.numbers("scores", "fiu", len(vocabulary.tokens))
    values = np.zeros(len(vocabulary.tokens)) if scores is None else scores.astype(np.float32)
    ids = _ids(vocabulary)
    hidden = {vocabulary.tokens[id] for id in vocabulary.controls()}
    order = np.argsort(-values, kind="stable").tolist()
    merges = []
    for text in (vocabulary.tokens[id] for id in order):
        if " " not in text and text not in hidden:
            cuts = ((text[:at], text[at:]) for at in range(len(text) - 1, 0, -1))
            merges += [f"{left} {right}" for left, right in cuts if left in ids and right in ids]
    return merges


# --- special tokens ---------------------------------------------------------------------------------------------------


def _added_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Tokens that are looked for in the text itself."""
    return [
        {
            "id": special.id,
            "content": special.text,
            "single_word": False,
            "lstrip": special.strips_left,
            "rstrip": special.strips_right,
            "normalized": False,
            "special": special.only_if_parsed,
        }
        for special in sorted(tokenizer.specials, key=lambda special: special.id)
    ]


def _post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Begin and end tokens as the file says."""
    begin = tokenizer.bos_id if tokenizer.add_bos else None
    end = tokenizer.eos_id if tokenizer.add_eos else None
    if begin is None and end is None:
        return None
    names = {id: tokenizer.name(id) for id in (begin, end) if id is not None}

    def around(*sequences: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            pieces += [] if begin is None else [{"SpecialToken": {"id": names[begin], "type_id": type_id}}]
            pieces += [{"Sequence": {"id": sequence, "type_id": type_id}}]
            pieces += [] if end is None else [{"SpecialToken": {"id": names[end], "type_id": type_id}}]
        return pieces

    specials = {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()}
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": specials,
    }


# --- check ------------------------------------------------------------------------------------------------------------


def probes_of(file: ModelFile) -> list[str]:
    """Those of PROBES that tokenizer.json cuts as the file's tokenizer does."""
    model, pre = kind_of(TokenizerMetadata(file))
    if model == "llama" or PRE_TOKENIZERS[pre] not in LOOSE:
        return list(PROBES)
    return [text for text in PROBES if not any(unicodedata.category(char)[0] == "M" for char in text)]


def _check(file: ModelFile, ours: Tokenizer, made: dict[str, Any]) -> None:
    """Raises UnsupportedModel where `tokenizers` reads what was made otherwise than the file's own tokenizer."""
    theirs = tokenizers.Tokenizer.from_str(json.dumps(made))
    names = [special.text for special in ours.specials]
    some = [*names[:64], *names[-64:]]
    around = [f"user: {name}Hi{name}\n{name} {name}" for name in some]
    for text in (*probes_of(file), *around):
        for add_special in (False, True):
            wanted = ours.encode(text, add_special=add_special, parse_special=True)
            found = theirs.encode(text, add_special_tokens=add_special).ids
            if found != wanted:
                raise UnsupportedModel(
                    f"{file.path}: no tokenizer.json gives the tokens of this vocabulary: for {text!r:.80} they are "
                    f"{_parts(ours, wanted)}, with tokenizer.json {_parts(ours, found)}"
                )


def _parts(tokenizer: Tokenizer, ids: list[int]) -> str:
    return f"{[tokenizer.name(id) for id in ids]!r:.200}"
