"""The vocabulary of a Hugging Face checkpoint, tokenizer.json, as the keys of a GGUF file.

Two kinds are converted: byte-level BPE, and BPE made from a SentencePiece model. The result is compared with the
`tokenizers` library on some texts and refused if it differs.
"""

from __future__ import annotations

import json
import re
import tempfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers

from edgeinfer.errors import ModelFileError, TokenizerError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Config, Folder
from edgeinfer.exporters.gguf import write_gguf
from edgeinfer.models import tokenizer
from edgeinfer.models.gguf import MetadataValue, ModelFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PROBES = (
    "Hello world, it's WE'LL don't I'm you've he'd THEY'RE.",
    "1 12 123 1234 12345 1234567 3.14159 $1,000 50% 2+2=4 a1b22c333 x86_64",
    "  two  spaces   three\ttab\n\nlines \n \n  indented\r\nend   ",
    "def f(x, *args):\n    return {'a': [x**2 for _ in range(10)]}  # comment!!! ... ---\n",
    "Grüße, naïve façade, Ωμέγα, Привет мир, שלום, नमस्ते दुनिया, 你好世界 1234年, こんにちは, 안녕하세요",
    "emoji 🙂👍🏽 ‘quotes’ “double” — dash… e\u0301 \u00a0nbsp https://example.com/a?b=c&d=e_f",
    "CamelCaseWords snake_case_words ALLCAPS MixedUP iPhone's O'Neill (parentheses) [brackets] <tags/>",
)


def read_vocabulary(folder: Folder, config: Config, n_rows: int) -> dict[str, MetadataValue]:
    """The keys tokenizer.* of a checkpoint's folder, with a token for each of the n_rows embeddings.

    config: of the model, for the ids of begin and end. Raises UnsupportedModel, ModelFileError.
    """
    return _Vocabulary(folder, config, n_rows).keys()


class _Vocabulary:
    def __init__(self, folder: Folder, config: Config, n_rows: int) -> None:
        self._path = folder.path / "tokenizer.json"
        if "tokenizer.json" not in folder:
            self._refuse("is missing: save the tokenizer in the form of the tokenizers library first")
        self._source = folder.json("tokenizer.json", 128 << 20)
        self._settings = folder.optional_json("tokenizer_config.json")
        self._template = folder.path / "chat_template.jinja"
        self._config = config
        self._n_rows = n_rows
        self._model = self._source.get("model") or {}
        if self._model.get("type") != "BPE" or not isinstance(self._model.get("vocab"), dict):
            self._refuse(f"must have a model of type BPE: found {self._model.get('type')!r:.80}")
        try:
            self._theirs = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises nothing more special
            raise ModelFileError(f"{self._path}: the tokenizers library cannot read it: {error}") from error

    def keys(self) -> dict[str, MetadataValue]:
        """All of them, checked."""
        texts, types = self._tokens()
        keys: dict[str, MetadataValue] = {"tokens": list(texts), "token_type": list(types)}
        if self._is_byte_level():
            keys |= {"model": "gpt2", "pre": self._pre_tokenizer(), "merges": self._merges()}
        elif self._model.get("byte_fallback"):
            keys |= {"model": "llama", "pre": "default", "scores": self._scores(texts)}
            keys["add_space_prefix"] = self._adds_space()
        else:
            self._refuse("must be byte-level BPE, or BPE with byte_fallback as SentencePiece's models become: neither")
        keys |= self._special_ids(len(texts))
        found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        template = self._chat_template()
        if template:
            found["tokenizer.chat_template"] = template
        self._compare(found)
        return found

    def _tokens(self) -> tuple[list[str], list[int]]:
        """(texts, token types) by id."""
        by_id = {int(id): text for text, id in self._model["vocab"].items()}
        added = {int(token["id"]): token for token in self._source.get("added_tokens") or []}
        by_id |= {id: token["content"] for id, token in added.items()}
        n_tokens = max(by_id) + 1
        if n_tokens > self._n_rows:
            self._refuse(f"has {n_tokens} tokens, and the model {self._n_rows} embeddings")
        texts = [by_id.get(id, f"[PAD{id}]") for id in range(self._n_rows)]
        return texts, [self._type(id, by_id, added) for id in range(self._n_rows)]

    def _type(self, id: int, by_id: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
        if id not in by_id:
            return _UNUSED
        falls_back = self._model.get("byte_fallback")
        if falls_back and by_id[id] == self._model.get("unk_token"):
            return _UNKNOWN
        if id in added:
            return _CONTROL if added[id].get("special") else _USER_DEFINED
        return _BYTE if falls_back and _BYTE_TOKEN.fullmatch(by_id[id]) else _NORMAL

    def _merges(self) -> list[str]:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in self._model.get("merges") or []]
        if not pairs or not all(len(pair) == 2 and " " not in "".join(pair) for pair in pairs):
            self._refuse("must have merges, pairs of tokens without spaces")
        return [" ".join(pair) for pair in pairs]

    def _scores(self, texts: list[str]) -> list[float]:
        """SentencePiece merges what makes the best token; the merges stand in the order of the tokens they make."""
        order: dict[str, int] = {}
        for merge in self._merges():
            order.setdefault(merge.replace(" ", ""), len(order))
        return [-float(order.get(text, len(order))) for text in texts]

    def _is_byte_level(self) -> bool:
        parts = _parts(self._source.get("pre_tokenizer"))
        return any(part.get("type") == "ByteLevel" for part in parts) and not self._model.get("byte_fallback")

    def _adds_space(self) -> bool:
        """Whether a text gets a space before it."""
        if any(part.get("type") == "Prepend" for part in _parts(self._source.get("normalizer"))):
            return True
        marks = [part for part in _parts(self._source.get("pre_tokenizer")) if part.get("type") == "Metaspace"]
        return any(mark.get("prepend_scheme", "always") != "never" for mark in marks)

    def _pre_tokenizer(self) -> str:
        """The one that cuts the probes as theirs does."""
        keeps = bool(self._model.get("ignore_merges"))
        for name in tokenizer.PRE_TOKENIZERS:
            if tokenizer.keeps_tokens(name) == keeps and all(
                list(tokenizer.cut(name, text)) == self._cut(text) for text in _PROBES
            ):
                return name
        found = json.dumps(self._source.get("pre_tokenizer"))
        return self._refuse(
            f"must cut texts as a pre-tokeniser that is known does; none cuts like this one: {found:.300}"
        )

    def _cut(self, text: str) -> list[str]:
        return [text[first:last] for _, (first, last) in self._theirs.pre_tokenizer.pre_tokenize_str(text)]

    def _special_ids(self, n_tokens: int) -> dict[str, MetadataValue]:
        keys: dict[str, MetadataValue] = {}
        ends = self._config.get("eos_token_id")
        first, *more = ends if isinstance(ends, list) and ends else [ends]
        ids = {"bos": self._config.get("bos_token_id"), "eos": first, "eot": more[0] if more else None}
        for name, id in ids.items():
            if id is None and name != "eot":
                id = self._id_by_text(f"{name}_token")
            if isinstance(id, int) and 0 <= id < n_tokens:
                keys[f"{name}_token_id"] = id
        unknown = self._theirs.token_to_id(str(self._model.get("unk_token")))
        if unknown is not None:
            keys["unknown_token_id"] = unknown
        plain, marked = (self._theirs.encode("a", add_special_tokens=special).ids for special in (False, True))
        keys["add_bos_token"] = marked != plain and marked[:1] == [keys.get("bos_token_id")]
        keys["add_eos_token"] = marked != plain and marked[-1:] == [keys.get("eos_token_id")]
        return keys

    def _id_by_text(self, key: str) -> int | None:
        token = self._settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        id: int | None = self._theirs.token_to_id(text) if isinstance(text, str) else None
        return id

    def _chat_template(self) -> str | None:
        if self._template.is_file():
            return self._template.read_text()
        found = self._settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def _compare(self, keys: Mapping[str, MetadataValue]) -> None:
        """Raises UnsupportedModel where the ids of a probe are not theirs."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            write_gguf(path, keys, [])
            with ModelFile.open(path) as file:
                try:
                    ours = tokenizer.Tokenizer.from_file(file)
                except TokenizerError as error:
                    raise UnsupportedModel(f"{self._path}: does not make a vocabulary: {error}") from error
        composed = any(part.get("type") == "NFC" for part in _parts(self._source.get("normalizer")))
        for text in _PROBES:
            text = unicodedata.normalize("NFC", text) if composed else text  # GGUF has no word for it
            wanted = self._theirs.encode(text, add_special_tokens=False).ids
            if ours.encode(text, add_special=False) != wanted:
                self._refuse(f"cannot be converted: {text!r:.60} would become other tokens")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModel(f"{self._path}: {reason}")


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A step of the tokenizers library, or the steps of a sequence."""
    if not step:
        return []
    inner = step.get("pretokenizers") or step.get("normalizers") or step.get("decoders")
    return list(inner) if inner else [step]
