"""DRY as llama.cpp has it, and a loop guard that ends loops and nothing else."""

import base64
import ctypes
import itertools
import json
import math
import random
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.loading.open import default_model as find_default_model
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.repetition import LoopGuard, breakers_of, dry_penalties
from edgeinfer.sampling import SamplingParams, adjusted

GUARD = SamplingParams().loop_guard
BREAKERS = ("\n", ":", '"', "*")


@pytest.fixture(scope="module")
def tokenizer(default_model) -> Tokenizer:
    assert default_model == find_default_model()
    with ModelFile.open(default_model) as file:
        return Tokenizer.from_file(file)


def end_of(tokenizer, text, n=GUARD):
    """Tokens after which the guard ends an answer, None if it does not."""
    guard = LoopGuard(n, tokenizer)
    tokens = tokenizer.encode(text, add_special=False) if isinstance(text, str) else text
    return next((at for at, token in enumerate(tokens, start=1) if guard.push(token)), None)


# ---- What it ends ------------------------------------------------------------------------------------------------


def tokens_of_kind(tokenizer, expected):
    texts = ((id, tokenizer.token_bytes(id).decode(errors="ignore")) for id in range(1000, 20_000))
    return [id for id, text in texts if expected(text)]


@pytest.mark.parametrize("of_words", [True, False])
@pytest.mark.parametrize("period", [1, 2, 3, 5, 12, 13, 31, 32, 33, 64, 65, 100, 147, 200, 256, 300, 384])
def test_every_period_ends(tokenizer, period, of_words):
    chance = random.Random(period)
    expected = (
        (lambda text: text.strip().isalpha()) if of_words else (lambda text: text and not any(map(str.isalnum, text)))
    )
    block = chance.choices(tokens_of_kind(tokenizer, expected), k=period)
    begin = tokenizer.encode("First of all, thank you for your question. Here is what I have found:", add_special=False)
    end = end_of(tokenizer, [*begin, *itertools.islice(itertools.cycle(block), 8 * GUARD)])
    if of_words and period <= 128:
        least = GUARD if period <= 32 else 2 * GUARD
    else:
        least = 3 * GUARD if period <= 96 else 4 * GUARD if period <= 256 else 6 * GUARD
    assert least - 32 <= end <= least + len(begin) + 32


def test_one_word_for_ever_ends_at_the_token_that_the_parameter_says(tokenizer):
    (word,) = tokenizer.encode(" poem", add_special=False)
    for n in (64, 100, GUARD):
        assert end_of(tokenizer, [word] * 2 * GUARD, n) == n


@pytest.mark.parametrize(
    "line",
    [
        "{}. **Locate the tyre**: You will need to locate the flat tyre you need to change.\n",
        "Day {}: we went to the beach and had a great time with the whole family.\n",
        " | {} feet of beachy material (e.g. blankets, pillows, beach chairs)",
        "Step {} of 5000 is to take a deep breath and count to {}.\n\n",
    ],
)
def test_a_counter_hides_no_loop(tokenizer, line):
    text = "".join(line.format(number, number + 1) for number in range(7, 400))
    assert GUARD <= end_of(tokenizer, text) <= 2 * GUARD + 100


@pytest.mark.parametrize(
    "unit",
    [
        "A:",
        "- 1 100g pancake\n",
        "!",
        " 0",
        "\n \n",
        "|---",
        "ha ",
        "生命是一条河。",
        "Она продолжает. ",
        "🙂",
        "\t}\n",
    ],
)
def test_a_loop_of_anything_ends(tokenizer, unit):
    assert end_of(tokenizer, tokenizer.encode(unit, add_special=False) * 4 * GUARD) <= 3 * GUARD + 12


def test_two_lines_that_take_turns_by_chance_are_a_loop(tokenizer):
    chance, lines = random.Random(1), ["A journey of life\n\n", "In a lifetime, a river is more\n\n"]
    assert end_of(tokenizer, "".join(chance.choice(lines) for _ in range(600))) is not None


def test_a_loop_ends_however_long_the_good_part_before_it_is(tokenizer):
    good = Path(random.__file__).read_text()[:12_000]
    n_good = len(tokenizer.encode(good, add_special=False))
    end = end_of(tokenizer, good + "\nShe continues to inspire." * 400)
    assert n_good + GUARD - 32 <= end <= n_good + GUARD + 32


def test_a_guard_remembers_no_other_answer_and_needs_no_more_time_late_in_one(tokenizer):
    (word,) = tokenizer.encode(" poem", add_special=False)
    first, second = LoopGuard(64, tokenizer), LoopGuard(64, tokenizer)
    assert [first.push(word) for _ in range(63)] == [False] * 63
    assert [second.push(word) for _ in range(64)] == [False] * 63 + [True]
    sizes = set()
    for token in range(1000, 2000):
        second.push(token)
        sizes.update(len(window._runs) for window in second._of_long)
    assert max(sizes) == 6 * 64 - 31


# ---- What it does not end ----------------------------------------------------------------------------------------


# Of these packages pyproject.toml names one version each: what others have differs from machine to machine.
PACKAGES = ("clang-format", "mypy", "pytest-timeout", "pytest-xdist", "ruff")
FOLDERS = ("backends", "docs", "edgeinfer", "exporters", "models", "tests")  # of this repository
INSTALLED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # in the folder of the standard library


def files_of_every_machine() -> Iterator[Path]:
    root, library = Path(__file__).parents[2], Path(sysconfig.get_path("stdlib"))
    yield from (path for path in library.rglob("*") if not INSTALLED.intersection(path.relative_to(library).parts))
    for folder in FOLDERS:
        yield from (root / folder).rglob("*")
    for package in PACKAGES:
        files = distribution(package).files or ()  # but for tables of one number, again and again
        yield from (Path(str(file.locate())) for file in files if "lib-rt" not in file.parts)


def real_files() -> Iterator[Path]:
    """Texts of all kinds: code, declarations, data, tables, licences, lists."""
    expected = (".py", ".pyi", ".txt", ".json", ".csv", ".h", ".md", ".rst", ".cfg", ".toml", ".svg", ".css", ".js")
    expected += (".c", ".cl", ".cpp", ".hpp", ".html", ".sv")
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(files_of_every_machine()):
        kind = path.suffix if path.suffix in expected else path.name if path.name.isupper() else ""
        if kind and path.is_file() and path.stat().st_size > 2000:
            by_kind.setdefault(kind, []).append(path)
    for paths in by_kind.values():  # half of each kind the largest, which are the tables, and half any
        paths.sort(key=lambda path: -path.stat().st_size)
    for turn in itertools.count():
        left = [paths for paths in by_kind.values() if paths]
        if not left:
            return
        for paths in left:
            yield paths.pop(0 if turn % 2 == 0 else len(paths) // 2)


def test_no_text_of_real_use_ends(tokenizer):
    n_texts = n_long = 0
    for path in real_files():
        try:
            text = path.read_bytes()[:6000].decode()
        except (UnicodeDecodeError, OSError):
            continue
        tokens = tokenizer.encode(text, add_special=False)
        assert end_of(tokenizer, tokens) is None, path
        n_texts, n_long = n_texts + 1, n_long + (len(tokens) > 3 * GUARD)
        if n_texts == 200:
            break
    assert n_texts == 200 and n_long > 60


def refrain(n):
    verse = (
        "The wind blew cold across the field, and number {} would never yield.\nWe sang of home and spring, of {}.\n"
    )
    chorus = "Oh, carry me home, carry me home,\ncarry me over the water and foam,\nback to the ones I have known!\n"
    things = ["bread", "rivers", "apple trees", "my father's coat", "the harbour lights", "a broken bell"]
    return "\n".join(f"{verse.format(i, things[i % 6])}\n{chorus}" for i in range(n))


ROWS = range(1, 21)
HARD = {
    "a song that counts down": "\n\n".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer.\nTake one down and pass it around, "
        f"{n - 1} bottles of beer on the wall."
        for n in range(99, 0, -1)
    ),
    "degrees": "\n".join(f"{c} degrees Celsius is equal to {c * 1.8 + 32:.1f} degrees Fahrenheit." for c in range(101)),
    "scores": "\n".join(f"Student {i} scored {i * 37 % 61 + 40} points in the exam." for i in range(100)),
    "a diary of numbers": "\n".join(
        f"On day {i} the temperature was {i * 53 % 29} degrees and it rained {i * 31 % 17} mm." for i in range(60)
    ),
    "populations": "\n".join(
        f"In {1900 + i}, the population of the town was {9000 + i * 137 + i * i} people." for i in range(100)
    ),
    "a multiplication table": "\n".join(" ".join(f"{a * b:4}" for a in ROWS) for b in ROWS),
    "a multiplication table in words": "\n".join(
        f"{a} times {b} is {a * b}." for a in range(1, 11) for b in range(1, 11)
    ),
    "a matrix of zeros": "[" + ",\n ".join(str([0] * 16) for _ in range(16)) + "]",
    "the identity": "\n".join(" ".join("1" if i == j else "0" for j in range(24)) for i in range(24)),
    "zeros and ones": "".join(random.Random(1).choices("01", k=2000)),
    "dna": "".join(random.Random(2).choices("ACGT", k=4000)),
    "a truth table": "\n".join(" | ".join(format(i, "06b")) for i in range(64)),
    "csv": "id,name,price\n" + "\n".join(f"{i},item {i},{i * 1.25:.2f}" for i in range(150)),
    "json": json.dumps([{"id": i, "name": f"user{i}", "active": i % 3 == 0} for i in range(60)], indent=2),
    "an empty form": "\n".join("| " + " | ".join([" " * 8] * 6) + " |" for _ in range(20)),
    "a markdown table": "| a | b | c |\n|---|---|---|\n" + "\n".join(f"| {i} | yes | no |" for i in range(60)),
    "a log": "\n".join(
        f"2026-03-{1 + i % 28:02} 12:{i % 60:02}:07 INFO worker-{i % 4} handled request {i * 37} in {i * 13 % 97} ms"
        for i in range(30)
    ),
    "rules": "\n".join(["-" * 80, "A heading", "=" * 80, "Some text."] * 8),
    "spaces": "begin" + " " * 800 + "end",
    "new lines": "begin" + "\n" * 400 + "end",
    "zeros": "0" * 800,
    "base64": base64.b64encode(random.Random(3).randbytes(3000)).decode(),
    "base64 of nothing": base64.b64encode(bytes(700)).decode(),
    "a hex dump": "\n".join(f"{16 * i:08x}  " + " ".join(["00"] * 16) for i in range(20)),
    "a song": refrain(6),
    "an outline path": "M0 0" + "".join(f" L{i * 7 % 100} {i * 13 % 100}" for i in range(250)) + " Z",
    "a board": "\n".join(["+---" * 8 + "+", "|   " * 8 + "|"] * 8),
    "a word two hundred times": "poem " * 200,
    "a word two hundred times with commas": ", ".join(["poem"] * 200),
    "a punishment": "I will not talk in class.\n" * 50,
    "a switch": "\n".join(f"        case {i}:\n            return {i * i};" for i in range(60)),
    "asserts": "\n".join(f"    assert double({i}) == {2 * i}" for i in range(80)),
    "a rota": "\n".join(
        f"{day}: Anna {i}-{i + 4}, Ben {i + 4}-{i + 8}" for i in range(8, 13) for day in ("Mon", "Tue", "Wed")
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_what_repeats_much_by_its_nature_does_not_end(tokenizer, name):
    assert end_of(tokenizer, HARD[name]) is None


# ---- DRY ---------------------------------------------------------------------------------------------------------


def test_dry_penalizes_what_would_continue_a_repetition_by_its_length():
    # a b c c b c y a b c: after "a b c" came c, after "b c" y, after "c" c and b; the longest one counts.
    a, b, c, y = 1, 2, 3, 4
    text = [a, b, c, c, b, c, y, a, b, c]
    assert dry_penalties(text, 0.5, 2.0, 1, -1, {}) == {c: 2.0, b: 0.5, y: 1.0}
    assert dry_penalties(text, 0.5, 2.0, 2, -1, {}) == {c: 1.0, y: 0.5}
    assert dry_penalties(text, 0.5, 2.0, 2, 6, {}) == {y: 0.5}  # b c y a b c
    assert dry_penalties(text, 0.5, 2.0, 4, -1, {}) == {}


def test_dry_looks_no_further_than_a_sequence_breaker_and_penalizes_none():
    text = [1, 2, 9, 3, 4, 7, 1, 2, 9, 3, 4]
    assert dry_penalties(text, 1.0, 2.0, 1, -1, {}) == {7: 16.0}
    assert dry_penalties(text, 1.0, 2.0, 1, -1, {9: [()]}) == {7: 2.0}
    assert dry_penalties(text, 1.0, 2.0, 1, -1, {9: [(3,)]}) == {7: 1.0}  # 9 3 together
    assert dry_penalties(text, 1.0, 2.0, 1, -1, {9: [(5,)]}) == {7: 16.0}
    assert dry_penalties(text, 1.0, 2.0, 1, -1, {7: [()]}) == {}


def test_dry_of_a_very_long_repetition_is_finite():
    (penalty,) = dry_penalties([5] * 4000, 1.0, 1.75, 2, -1, {}).values()
    assert math.isfinite(np.float32(penalty)) and penalty > 1e38


def test_breakers_are_found_however_tokens_spell_them(tokenizer):
    breakers = breakers_of(["\n", ". The"], tokenizer)
    assert all(() in breakers[id] for id in range(tokenizer.n_vocab) if b"\n" in tokenizer.token_bytes(id))
    (point,) = tokenizer.encode(".", add_special=False)
    assert tuple(tokenizer.encode(" The", add_special=False)) in breakers[point]


@pytest.fixture(scope="module")
def llama_vocabulary(llama_cpp, default_model):
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(default_model).encode(), parameters)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


def applied(llama_cpp, sampler, logits, text=()):
    """What llama.cpp's sampler makes of logits after a text."""
    for token in text:
        llama_cpp.llama_sampler_accept(sampler, token)
    entries = np.zeros(logits.size, dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    entries["id"], entries["logit"] = np.arange(logits.size), logits
    data = (llama_cpp.llama_token_data * logits.size).from_buffer(entries)
    array = llama_cpp.llama_token_data_array(data, logits.size, -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    assert entries["id"].tolist() == list(range(logits.size))
    return entries["logit"]


@pytest.fixture(scope="module")
def breakers(tokenizer):
    return breakers_of(BREAKERS, tokenizer)


@pytest.mark.parametrize("multiplier, base, allowed", [(0.8, 1.75, 2), (0.5, 1.1, 0), (2.0, 3.0, 5), (1.0, 1.0, 1)])
@pytest.mark.parametrize("last_n", [-1, 64, 200])
def test_dry_is_llama_cpps(llama_cpp, llama_vocabulary, tokenizer, breakers, rng, multiplier, base, allowed, last_n):
    rhyme = "She sells sea shells by the sea shore, the shells she sells are sea shells I am sure, so: if she sells "
    prose = tokenizer.encode(rhyme + rhyme, add_special=False)
    logits = rng.standard_normal(tokenizer.n_vocab).astype(np.float32)
    params = SamplingParams(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    n_changed = 0
    for n in (3, 9, 12, 17, 25, 33, len(prose) - 3, len(prose)):
        text = prose[:n]
        texts = (ctypes.c_char_p * len(BREAKERS))(*(breaker.encode() for breaker in BREAKERS))
        n_back = 4096 if last_n < 0 else last_n  # the sampler itself no longer knows -1
        sampler = llama_cpp.llama_sampler_init_dry(
            llama_vocabulary, multiplier, base, allowed, n_back, texts, len(BREAKERS)
        )
        expected = applied(llama_cpp, sampler, logits, text)
        found = adjusted(logits, params, text, breakers)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        n_changed += int((found != logits).sum())
    assert n_changed > 0


def test_logit_bias_is_llama_cpps(llama_cpp, rng):
    logits = rng.standard_normal(500).astype(np.float32)
    bias = {3: 1.5, 7: -math.inf, 499: -100.0}
    entries = (llama_cpp.llama_logit_bias * len(bias))(*bias.items())
    sampler = llama_cpp.llama_sampler_init_logit_bias(logits.size, len(bias), entries)
    found = adjusted(logits, SamplingParams(logit_bias=bias), [])
    assert found.tolist() == applied(llama_cpp, sampler, logits).tolist()
    assert found[7] == -math.inf
