"""Texts on which two tokenizers are compared."""

from __future__ import annotations

import random
from functools import cache

_PLAIN = (
    "Hello world, it's WE'LL don't I'm you've he'd THEY'RE.",
    "1 12 123 1234 12345 1234567 3.14159 $1,000 50% 2+2=4 a1b22c333 x86_64",
    "  two  spaces   three\ttab\n\nlines \n \n  indented\r\nend   ",
    "def f(x, *args):\n    return {'a': [x**2 for _ in range(10)]}  # comment!!! ... ---\n",
    "Grüße, naïve façade, Ωμέγα, Привет мир, שלום, नमस्ते दुनिया, 你好世界 1234年, こんにちは, 안녕하세요",
    "emoji 🙂👍🏽 ‘quotes’ “double” — dash… e\u0301 \u00a0nbsp https://example.com/a?b=c&d=e_f",
    "CamelCaseWords snake_case_words ALLCAPS MixedUP iPhone's O'Neill (parentheses) [brackets] <tags/>",
)
_ATOMS = (  # what pre-tokenisers tell apart
    *("a", "Bc", "DE", "x", "Y", "é", "ß", "Ж", "ǅ", "\u0301", "\u093e", "\u0345", "ſ"),
    *("1", "23", "7", "٣", "½", "Ⅷ", "²", "你", "好", "の", "カ", "한", "ก", "א"),
    *(".", ",", "!", "/", "_", "'", "’", "$", "+", "|", "。", "«", "€", "🙂", "👍🏽"),
    *("\u200d", "\ufe0f", "\u00ad", "\u0000", "'s", "'S", "'Re", "n't", "'ll", "'D"),
    *(" ", " ", " ", "  ", "   ", "\t", "\n", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u0085", "\u2028", "\u200b"),
)
_TEXTS, _ATOMS_A_TEXT = 80, 60


@cache
def probes() -> tuple[str, ...]:
    """Plain texts, and rows of what pre-tokenisers tell apart in any order, the same each time."""
    rng = random.Random(0)
    return _PLAIN + tuple("".join(rng.choices(_ATOMS, k=_ATOMS_A_TEXT)) for _ in range(_TEXTS))
