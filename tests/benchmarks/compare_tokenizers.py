"""Differences between edgeinfer's tokeniser and llama.cpp's. There must be none.

python tests/benchmarks/compare_tokenizers.py MODEL_OR_VOCAB.gguf ... [--strings 10000] [--seed N] [--texts FILE ...]

Each string is encoded twice, with special tokens parsed and not; ids, pieces, stop tokens and the rest of what a
vocabulary says are compared as well. --pre all repeats it with every pre-tokeniser that edgeinfer knows, in copies of
the vocabulary that name it. Needs llama-cpp-python. The last line on stdout is JSON with every figure.
"""

import argparse
import ctypes
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import PRE_TOKENIZERS, Tokenizer

REPOSITORY = Path(__file__).parents[2]


class Oracle:
    """llama.cpp's vocabulary of a file."""

    def __init__(self, path: str) -> None:
        _silence()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[:n])

    def piece(self, id: int) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        n = llama_cpp.llama_token_to_piece(self.vocab, id, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def facts(self) -> dict[str, Any]:
        every = range(self.n_vocab)
        return {
            "n_vocab": self.n_vocab,
            "bos_id": llama_cpp.llama_vocab_bos(self.vocab),
            "eos_id": llama_cpp.llama_vocab_eos(self.vocab),
            "add_bos": llama_cpp.llama_vocab_get_add_bos(self.vocab),
            "add_eos": llama_cpp.llama_vocab_get_add_eos(self.vocab),
            "stop_ids": {id for id in every if llama_cpp.llama_vocab_is_eog(self.vocab, id)},
            # llama.cpp writes its own note for a token that is not in the byte alphabet; for us it is plain text.
            "pieces": [None if b"[UNK_BYTE_0x" in (piece := self.piece(id)) else piece for id in every],
        }


_ignore = llama_cpp.llama_log_callback(lambda level, text, user_data: None)


def _silence() -> None:
    llama_cpp.llama_log_set(_ignore, ctypes.c_void_p(0))


def facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What Oracle.facts gives, of ours."""
    names = ("n_vocab", "bos_id", "eos_id", "add_bos", "add_eos")
    return {name: getattr(tokenizer, name) for name in names} | {
        "stop_ids": set(tokenizer.stop_ids),
        "pieces": [tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)],
    }


# --- strings ----------------------------------------------------------------------------------------------------------

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
    """Lines of the repository's own files and of others; a .jsonl file's strings."""
    found = []
    for path in [*REPOSITORY.glob("**/*.py"), *REPOSITORY.glob("**/*.md"), *REPOSITORY.glob("*/*/*.cpp"), *paths]:
        if not {".venv", "build"} & set(path.relative_to(REPOSITORY).parts if path.is_relative_to(REPOSITORY) else ()):
            found += [line for line in path.read_text(errors="replace").split("\n\n") if line.strip()]
    return found


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(path: str, n_strings: int, seed: int, real: list[str]) -> dict[str, Any]:
    """Figures of one file; differences are printed on stderr, ten at most."""
    with ModelFile.open(path) as file:
        tokenizer = Tokenizer.from_file(file)
    oracle = Oracle(path)
    ours, theirs = facts(tokenizer), oracle.facts()
    known = [piece is not None for piece in theirs["pieces"]]
    for pieces in (ours, theirs):
        pieces["pieces"] = list(itertools.compress(pieces["pieces"], known))
    wrong = [name for name in ours if ours[name] != theirs[name]]
    for name in wrong:
        print(f"{path}: {name} differs: {_first_difference(ours[name], theirs[name])}", file=sys.stderr)
    specials = [*tokenizer.special_texts[:200], *tokenizer.special_texts[-200:], "<|im_end|>", "</s>", "<0x0A>"]
    n_different = 0
    for text in itertools.islice(texts(seed, specials, real), n_strings):
        for parse_special in (False, True):
            got = tokenizer.encode(text, parse_special=parse_special)
            wanted = oracle.encode(text, True, parse_special)
            if got != wanted:
                n_different += 1
                if n_different <= 10:
                    print(f"{path}: {text!r} parse_special={parse_special}\n  {got}\n  {wanted}", file=sys.stderr)
    oracle.close()
    return {"file": Path(path).name, "strings": n_strings, "differences": n_different, "facts_that_differ": wrong}


def _first_difference(ours: object, theirs: object) -> str:
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        n = sum(a != b for a, b in zip(ours, theirs, strict=True))
        return f"{n} elements, first [{index}] {ours[index]!r}, llama.cpp {theirs[index]!r}"
    return f"{ours!r:.200}, llama.cpp {theirs!r:.200}"


def load_times(path: str, repeats: int) -> dict[str, float]:
    """Median milliseconds from a path to a tokeniser, ours and theirs by turns."""

    def ours() -> None:
        with ModelFile.open(path) as file:
            Tokenizer.from_file(file)

    loaders: dict[str, Callable[[], None]] = {"load_ms": ours, "load_ms_llama_cpp": lambda: Oracle(path).close()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(repeats):
        for name, load in loaders.items():
            start = time.perf_counter()
            load()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def with_pre(path: str, pre: str, folder: str) -> str:
    """A copy of a byte-level vocabulary, without weights, that names another pre-tokeniser."""
    import gguf

    with ModelFile.open(path) as file:
        metadata: dict[str, Any] = dict(file.metadata)
    copy = str(Path(folder) / f"{Path(path).stem}.{pre}.gguf")
    writer = gguf.GGUFWriter(copy, "llama")
    for key, value in metadata.items():
        if not key.startswith("tokenizer.ggml.") or key == "tokenizer.ggml.pre":
            continue
        if key.endswith("_token_id"):
            writer.add_uint32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, np.asarray(value, np.int32).tolist() if isinstance(value[0], int) else value)
    writer.add_string("tokenizer.ggml.pre", pre)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    return copy


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="MODEL_OR_VOCAB.gguf")
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="files whose paragraphs are used as well")
    parser.add_argument("--pre", nargs="*", default=[], help="names of pre-tokenisers, or all")
    parser.add_argument("--repeats", type=int, default=5, help="loads of each file, of which the median is given")
    options = parser.parse_args()
    real = real_texts(options.texts)
    results = []
    for path in options.paths:
        results.append(compare(path, options.strings, options.seed, real) | load_times(path, options.repeats))
        print(results[-1], file=sys.stderr)
        for pre in sorted(PRE_TOKENIZERS) if options.pre == ["all"] else options.pre:
            with tempfile.TemporaryDirectory() as folder:
                copy = with_pre(path, pre, folder)
                results.append(compare(copy, options.strings, options.seed, real))
                print(results[-1], file=sys.stderr)
    n_different = sum(result["differences"] + len(result["facts_that_differ"]) for result in results)
    report = {"differences": n_different, "seed": options.seed, "vocabularies": results, "machine": machine()}
    print(json.dumps(report))
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
