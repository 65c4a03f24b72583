"""Strings on which two tokenizers are compared: scripts, marks, spaces, digits, emoji, code, special tokens, real."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SCRIPTS = [
    *[(0x20, 0x7F), (0xA0, 0x250), (0x250, 0x370), (0x370, 0x530), (0x530, 0x600), (0x600, 0x750), (0x780, 0x860)],
    *[(0x900, 0xE00), (0xE00, 0x1000), (0x1000, 0x1100), (0x1100, 0x1200), (0x1200, 0x13A0), (0x13A0, 0x1700)],
    *[(0x1780, 0x18B0), (0x1C80, 0x1CC0), (0x1D00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2200), (0x2200, 0x2C00)],
    *[(0x2C00, 0x2E80), (0x2E80, 0x3000), (0x3000, 0x3130), (0x3130, 0x3400), (0x3400, 0x4E00), (0x4E00, 0xA000)],
    *[(0xA000, 0xA960), (0xA960, 0xAC00), (0xAC00, 0xD800), (0xE000, 0xE100), (0xF8F0, 0x10000)],
    *[(0x10000, 0x10E00), (0x10E00, 0x12000), (0x13000, 0x14500), (0x16000, 0x17000), (0x1B000, 0x1D000)],
    *[(0x1D000, 0x1E000), (0x1E000, 0x1F000), (0x1F000, 0x1FC00), (0x20000, 0x20100), (0xE0000, 0xE0200)],
]
WHITE = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
MARKS = "\u0301\u0308\u0327\u0345\u05b0\u064b\u093e\u094d\u0e31\u200c\u200d\u20e3\u3099\ufe0f\U000e0101"
DIGITS = ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "²³¹½¾ⅣⅫ①②㈠〇", "𝟎𝟏𝟐𝟛"]
EMOJI = "😀 👩‍💻 👨‍👩‍👧‍👦 👍🏽 🧑🏿‍🚀 🏳️‍🌈 🇩🇪🇫🇷 ❤️‍🔥 ☺️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿".split()
SHORT = "I'm you're he's it'S WE'LL they'Ve I'D 't 'ſ ’s rock'n'roll ''s 'ré 's' d'l O'Neil's 'LLama".split()
WORDS = "the quick Brown foX naïve Straße ΣΊΣΥΦΟΣ İstanbul ǅ Привет мир שלום नमस्ते สวัสดี 你好 こんにちは 안녕 ß ﬁ".split()
CODE = [
    *[
        "def f(x):\n    return x**2\n",
        "for (int i=0;i<n;++i) {\n\t\ta[i] += b[i];\n}\r\n",
        "x = {'a': [1, 2.5e-3]}  # ok\n",
    ],
    *['<div class="a">&nbsp;</div>', "SELECT * FROM t WHERE a<>'b';", "#!/bin/sh\nset -eu\n", "a->b::c<T>&&d||!e?f:g"],
    *["https://example.com/a?b=c&d=%20#e", "C:\\Users\\x\\y.txt", "\\alpha_{i}^2", "```py\nprint('hi')\n```\n\n\n"],
]


def texts(seed: int, specials: list[str], real: list[str]) -> Iterator[str]:
    """Strings of one to eight parts, without end: scripts, marks, spaces, digits, emoji, code, special tokens."""
    rng = random.Random(seed)

    def of(alphabet: str, most: int) -> str:
        return "".join(rng.choices(alphabet, k=rng.randint(1, most)))

    def script() -> str:
        first, last = rng.choice(SCRIPTS)
        return "".join(chr(rng.randrange(first, last)) for _ in range(rng.randint(1, 12)))

    def anything() -> str:
        return "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(4))

    def special() -> str:
        text = rng.choice(specials)
        around = [of(" \n\t", 2) if rng.random() < 0.3 else "" for _ in range(2)]
        cut = text[: rng.randint(1, len(text))] if rng.random() < 0.3 else text
        return around[0] + cut + around[1]

    def line() -> str:
        text = rng.choice(real)
        start = rng.randrange(len(text))
        return text[start : start + rng.randint(1, 200)]

    makers: list[Callable[[], str]] = [
        *[script, script, anything, special, special, line, line],
        *[lambda: of(WHITE, 6), lambda: rng.choice(" \n\t\r\xa0") * rng.randint(1, 40), lambda: of(" \n\r\t", 12)],
        *[lambda: of(MARKS, 3), lambda: of(rng.choice(DIGITS), 9), lambda: of("".join(DIGITS), 6)],
        *[lambda: rng.choice(EMOJI), lambda: rng.choice(SHORT), lambda: rng.choice(WORDS), lambda: rng.choice(CODE)],
        *[lambda: rng.choice(WORDS) + of(MARKS, 2), lambda: of("!?.,;:'\"()[]{}<>|/\\`~@#$%^&*-_=+", 6)],
        *[lambda: of("ab ", 20), lambda: of("▁ a", 6), lambda: of("aAéÉ'sS", 8), lambda: " "],
    ]
    while True:
        yield "".join(rng.choice(makers)() for _ in range(rng.randint(1, 8)))


def real_texts(paths: list[Path]) -> list[str]:
    """Paragraphs of the repository's own files and of others."""
    own = sorted(path for pattern in ("**/*.py", "**/*.md", "*/*/*.cpp") for path in REPOSITORY.glob(pattern))
    own = [path for path in own if not {".venv", "build"} & set(path.relative_to(REPOSITORY).parts)]
    return [text for path in [*own, *paths] for text in _paragraphs(path)]


def sample_texts() -> list[str]:
    """Paragraphs of files that stay as they are: a change elsewhere makes no other strings of them."""
    names = ("LICENSE", *(f"tests/benchmarks/{name}" for name in ("sample.txt", "everyday.txt", "steering.c")))
    return [text for name in names for text in _paragraphs(REPOSITORY / name)]


def _paragraphs(path: Path) -> list[str]:
    return [text for text in path.read_text(errors="replace").split("\n\n") if text.strip()]
