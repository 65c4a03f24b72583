"""Text to token ids and back, with the vocabulary of a GGUF file.

The ids equal llama.cpp's for every text (tests/benchmarks/compare_tokenizers.py counts differences). Special tokens are
cut out of the text; the `tokenizers` library cuts the rest into words by the file's pre-tokeniser; each word is merged
into tokens here. That library's BPE is not used for this: it takes 126 ms and 40 MB to construct for a vocabulary of
152,000 tokens (llama.cpp loads the whole file in 177 ms), and is no faster than merging each word once. For
SentencePiece, merges would have to be derived from the scores first (140 ms for 32,000 tokens), and could not express
the rule for equal scores: the leftmost pair.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import cached_property, partial

from edgeinfer.common.errors import TokenizerError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.provenance import plain, recased
from edgeinfer.models.tokenization.merging import WordMerger, index_bytes, makes_in_order, merger_of
from edgeinfer.models.tokenization.metadata import TokenizerMetadata, kind_of
from edgeinfer.models.tokenization.pre_tokenizers import ADD_BOS, GEMMA4, PRE_TOKENIZERS, cut, keeps_tokens
from edgeinfer.models.tokenization.special_tokens import NAMED_KEYS, Special, specials_in, turn_marks, with_ids
from edgeinfer.models.tokenization.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    bytes_of,
    n_specials,
)

__all__ = ["PRE_TOKENIZERS", "TokenStream", "Tokenizer", "cut", "keeps_tokens"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_PIECES, _PIECE_BYTES = 2048, 200  # of tokens whose bytes are kept, and what one takes with its place in a dict
_SPECIAL_BYTES = 224  # of a special token: its text, its id and what is known of it


class Tokenizer(OfOneProcess):
    """Text to ids and back, by the vocabulary and rules of one file.

    n_vocab: number of ids.  bos_id, eos_id: begin and end of a text, None if the file has none.  add_bos, add_eos:
    whether `encode` adds them.  stop_ids: all tokens that end generation.  chat_template: Jinja source or None.
    """

    def __init__(self, file: ModelFile) -> None:
        metadata = TokenizerMetadata(file)
        model, pre = kind_of(metadata)
        if pre == "default" and not metadata.text("pre", ""):
            metadata.warn(
                "tokenizer.ggml.pre is missing: the default pre-tokeniser is used, and texts may be cut into other "
                "tokens than the model was trained with; convert the model again"
            )
        self._vocabulary = vocabulary = Vocabulary(metadata)
        self.n_vocab = len(vocabulary.tokens)
        # Without the key llama.cpp takes id 11 for both in a BPE vocabulary, Falcon's: any token elsewhere.
        self.bos_id = metadata.token_id("bos", self.n_vocab, 1 if model == "llama" else None)
        self.eos_id = metadata.token_id("eos", self.n_vocab, 2 if model == "llama" else None)
        self.add_bos = self._adds("bos", self.bos_id, metadata, model == "llama" or pre in ADD_BOS)
        self.add_eos = self._adds("eos", self.eos_id, metadata, False)
        if pre in GEMMA4 and self.bos_id is not None:
            self.add_bos = True  # whatever the file says: the first ones were converted wrongly
        self.stop_ids = vocabulary.find_stop_ids(self.eos_id)
        self.chat_template = metadata.chat_template()
        self._tokens, self._attributes = vocabulary.tokens, vocabulary.attributes
        self._specials = vocabulary.specials()
        named = [metadata.get(f"{key}_token_id") for key in NAMED_KEYS]
        self._named_ids = {id for id in named if isinstance(id, int) and not isinstance(id, bool)}
        self._protected: dict[str, frozenset[int]] = {}
        self._merger = merger_of(vocabulary, model, pre)
        vocabulary.hide_controls()
        self._adds_space = model == "llama" and metadata.flag("add_space_prefix", True)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, file: ModelFile) -> Tokenizer:
        """The tokeniser of a model file. Raises TokenizerError, UnsupportedModel."""
        return cls(file)

    @staticmethod
    def size_in(file: ModelFile) -> int:
        """Number of ids in a model file whose tokeniser is of a known kind. Raises TokenizerError, UnsupportedModel."""
        metadata = TokenizerMetadata(file)
        kind_of(metadata)
        return len(metadata.strings("tokens"))

    @staticmethod
    def memory(file: ModelFile) -> tuple[int, int]:
        """Bytes of the texts that an open file holds already, and the most that a tokeniser takes beside them."""
        metadata = TokenizerMetadata(file)
        tokens = metadata.strings("tokens")
        n_vocab, kind = len(tokens), kind_of(metadata)[0]
        held, more = tokens.table.n_held, index_bytes(n_vocab) + n_vocab  # attributes take a byte each
        more += n_specials(metadata, n_vocab) * _SPECIAL_BYTES
        if tokens.table.has_empty:  # then there is another table, see Vocabulary
            more += held + n_vocab
        if kind == "llama":
            more += 4 * n_vocab  # scores
        elif metadata.get("merges") is not None:
            merges = metadata.strings("merges")
            held += merges.table.n_held
            more += 0 if makes_in_order(tokens, merges) else index_bytes(len(merges))
        return held, more + WordMerger.CACHE_BYTES + _PIECES * _PIECE_BYTES

    @staticmethod
    def warm_up(file: ModelFile) -> None:
        """Bring what cuts the texts of a model into memory, as the first text would."""
        model, pre = kind_of(TokenizerMetadata(file))
        if model != "llama":
            list(cut(pre, "Ten words, 10 more"))

    @staticmethod
    def _adds(name: str, id: int | None, metadata: TokenizerMetadata, default: bool) -> bool:
        adds = metadata.flag(f"add_{name}_token", default and id is not None)
        if adds and id is None:
            metadata.warn(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id: none is added")
        return adds and id is not None

    @property
    def specials(self) -> tuple[Special, ...]:
        """The tokens that are looked for in a text, longest first."""
        return tuple(self._specials)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all tokens that are looked for in a text, longest first."""
        return tuple(special.text for special in self._specials)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the tokens of special_texts, in the same order."""
        return tuple(special.id for special in self._specials)

    def token_id(self, text: str) -> int | None:
        """The special token of exactly this text."""
        return next((special.id for special in self._specials if special.text == text), None)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, continues: bool = False
    ) -> list[int]:
        """Ids of a text.

        add_special: adds begin and end tokens as the file says.  parse_special: names of special tokens such as
        <|im_end|> become those tokens; user-defined tokens are found in either case.  continues: the text continues
        another one, and gets no leading space if the vocabulary adds one. A lone surrogate counts as U+FFFD.
        """
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        parts: list[int | str] = [_SURROGATE.sub("\ufffd", text)] if text else []
        for special in specials_in(self._specials, text):  # a longer one goes first, wherever in the text it stands
            if parse_special or not special.only_if_parsed:
                parts = with_ids(parts, special)
        ids += self._encode_parts(parts, continues)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_rendered(self, text: str, template: str) -> list[int]:
        """Ids of a rendered chat template, without begin and end tokens; template: its source.

        A protected token comes from trusted characters only (edgeinfer.models.provenance); elsewhere its text stays
        text. If no such text is untrusted, these are the ids of encode(text, add_special=False, parse_special=True).
        """
        protected = self.protected(template)
        parts: list[int | str] = [recased(text, partial(_SURROGATE.sub, "\ufffd"))] if text else []
        for special in specials_in(self._specials, text):
            parts = with_ids(parts, special, trusted_only=special.id in protected)
        return self._encode_parts(parts, continues=False)

    def protected(self, template: str) -> frozenset[int]:
        """The tokens that no user may write in a conversation with this template.

        All control tokens, and of the user-defined ones those that stop a generation, look like the mark of a turn
        ("<|start|>", "[INST]"), or stand in the source of the template ("<think>", and with it "</think>"). Others are
        ordinary text, such as runs of spaces or tags of HTML.
        """
        if template not in self._protected:
            marks = turn_marks(self._specials, template, self.stop_ids, self._named_ids)
            for special in marks:  # nor may merges make them
                if len(special.text) > 1:  # a single character may be all there is for a byte
                    self._merger.hide(special.text)
            self._protected[template] = frozenset(special.id for special in marks)
        return self._protected[template]

    def _encode_parts(self, parts: list[int | str], continues: bool) -> list[int]:
        ids: list[int] = []
        space = " " if self._adds_space and not continues else ""
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._merger.encode(space + plain(part))
            space = " " if self._adds_space else ""
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of a text, without tokenising it: 0 if nothing is known."""
        if any((special.strips_left or special.strips_right) and special.text in text for special in self._specials):
            text = "".join(text.split())
        return -(-self._merger.length(text) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """How much of a text, as the merger measures it, a token may stand for; 0 where it may be any amount."""
        if not self._merger.is_lossless(self._vocabulary):
            return 0
        return max([self._tokens.table.longest, *(len(bytes_of(special.text)) for special in self._specials)])

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text; a special token its name, an unused one nothing. Raises TokenizerError."""
        piece = self._pieces.get(id)
        if piece is None:
            if not 0 <= id < self.n_vocab:
                raise TokenizerError(f"token id must be 0 to {self.n_vocab - 1}: found {id}")
            if len(self._pieces) >= _PIECES:
                self._pieces.clear()
            piece = self._pieces[int(id)] = self._piece(id)
        return piece

    def name(self, id: int) -> str:
        """The text of a token by itself, such as "<|im_end|>"."""
        return self.token_bytes(id).decode(errors="replace")

    def _piece(self, id: int) -> bytes:
        text, attribute = self._tokens[id], int(self._attributes[id])
        if attribute & (CONTROL | USER_DEFINED | UNKNOWN):
            return bytes_of(text)
        if attribute & BYTE:
            return bytes([int(text[3:5], 16)])
        return self._merger.piece(text) if attribute & NORMAL else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. See `stream` for the spaces."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = False) -> TokenStream:
        """A decoder that takes one id at a time.

        skip_special: control tokens give nothing. The space that `encode` puts before a text in some vocabularies is
        taken off behind a begin token only: ids without one continue a text, and the space may be part of it.
        """
        return TokenStream(self, skip_special)

    def is_control(self, id: int) -> bool:
        """Whether the token stands for no text of its own."""
        return bool(self._attributes[id] & (CONTROL | UNKNOWN))

    def is_frame(self, id: int) -> bool:
        """Whether a control token begins, ends or fills a text, as padding does, and is no part of what is said."""
        is_unknown = bool(self._attributes[id] & UNKNOWN)
        frames = (self.bos_id, self.eos_id, *self._named_ids, *self.stop_ids)
        return self.is_control(id) and (is_unknown or id in frames)

    def hides_space(self, id: int) -> bool:
        """Whether `encode` put a space between this token and the text behind it that is no part of the text."""
        return self._adds_space and id == self.bos_id


class TokenStream:
    """Text of a growing sequence of tokens, never an incomplete character; all parts together are `Tokenizer.decode` of
    it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = False

    def push(self, id: int) -> str:
        """The characters that this token completes. Raises TokenizerError for an id that does not exist."""
        piece = self._tokenizer.token_bytes(id)
        if self._drops_space:
            piece = piece.removeprefix(b" ")
        self._drops_space = self._tokenizer.hides_space(id)
        if self._skip_special and self._tokenizer.is_control(id):
            return ""
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """U+FFFD for a character that was never completed, else nothing; the stream then begins anew."""
        rest = self._utf8.decode(b"", final=True)
        self._drops_space = False
        return rest
