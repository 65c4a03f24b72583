"""Made-up vocabularies of the sizes that published models have: texts of several lengths and scripts, and their merges.

Each token is two earlier ones joined, as if a trainer had found it. For `write_tiny_model(vocabulary=...)`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain

import gguf
from tiny_models import SPECIAL_TOKENS, add_tokens, byte_characters

_MOST_CHARACTERS = 12  # of a joined token
_SPECIALS = 6_000  # that Gemma 3 has: user-defined ones, mostly for tags and unused places


def add_large_bpe(
    writer: gguf.GGUFWriter,
    n_vocab: int,
    special: Mapping[str, gguf.TokenType],
    template: str,
    *,
    in_order: bool = True,
    merges_per_token: int = 1,
) -> None:
    """Byte-level tokens, joined ones and the special tokens.

    in_order: the merges are in the order of the tokens that they make, as in most files.  merges_per_token: several
    pairs make the same token, as in Llama 3's.
    """
    tokens = byte_characters()
    n_joined = n_vocab - len(tokens) - len(SPECIAL_TOKENS) - len(special)
    pairs = _joined(tokens, n_joined, len(tokens))
    rules = [f"{left} {right}" for left, right in pairs]
    if merges_per_token > 1:
        more = (f"{left[0]} {(left + right)[1:]}" for left, right in pairs)
        rules = list(chain.from_iterable(zip(rules, more, strict=True)))
    elif not in_order:
        rules[: n_joined // 2] = reversed(rules[: n_joined // 2])
    tokens += [left + right for left, right in pairs]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    add_tokens(writer, tokens, [gguf.TokenType.NORMAL] * len(tokens), n_vocab, special, template)
    writer.add_token_merges(rules)


def add_large_spm(
    writer: gguf.GGUFWriter,
    n_vocab: int,
    special: Mapping[str, gguf.TokenType],
    template: str,
    *,
    is_apart: bool = True,
) -> None:
    """<unk> <s> </s>, 256 byte tokens, letters of several scripts, joined pieces, some user-defined tokens.

    is_apart: "▁" begins a piece and is nowhere else in one.
    """
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    defined = [f"<unused{i}>" for i in range(min(_SPECIALS, n_vocab // 40))]
    scripts = [(0x21, 0x7F), (0xC0, 0x180), (0x391, 0x3C9), (0x410, 0x450), (0x5D0, 0x5EA), (0x905, 0x939)]
    scripts += [(0x3041, 0x30FF), (0x4E00, 0x4E00 + n_vocab // 16), (0xAC00, 0xAC00 + n_vocab // 64)]
    letters = [chr(code) for first, end in scripts for code in range(first, end)]
    pieces = letters + ["▁" + letter for letter in letters[: n_vocab // 32]]
    n_joined = n_vocab - len(head) - len(defined) - 1 - len(pieces) - len(SPECIAL_TOKENS) - len(special)
    pieces += [left + right for left, right in _joined(pieces, n_joined, len(letters if is_apart else pieces))]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.USER_DEFINED] * len(defined) + [gguf.TokenType.NORMAL] * (1 + len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    n_head = len(head) + len(defined)
    writer.add_token_scores([0.0] * n_head + [-float(i) for i in range(n_vocab - n_head)])
    writer.add_unk_token_id(0)
    add_tokens(writer, [*head, *defined, "▁", *pieces], kinds, n_vocab, special, template)


def _joined(first: Sequence[str], n: int, n_inner: int) -> list[tuple[str, str]]:
    """n pairs of an earlier text and one of the first n_inner texts, each of which makes a new one."""
    rng, texts, known, pairs = random.Random(0), list(first), set(first), []
    while len(pairs) < n:
        left, right = texts[int(rng.random() * len(texts))], texts[int(rng.random() * n_inner)]
        joined = left + right
        if len(joined) <= _MOST_CHARACTERS and joined not in known:
            known.add(joined)
            texts.append(joined)
            pairs.append((left, right))
    return pairs
