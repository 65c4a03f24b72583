"""Whatever is given to the public calls, they take it or raise an error of the package that says what was wanted."""

import math
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.arguments import check_file_name
from edgeinfer.common.errors import InvalidArgument, ModelNotFound
from edgeinfer.sampling import SamplingParams

TEXTS = ["x", "a\0b", "\ud800", "~nobody/x", "auto"]
FILES = [Path("nowhere.gguf"), Path("a\0b")]
NAMES = [text for text in TEXTS if "\0" not in text]  # of files
LISTS_OF_TEXTS = [["x"], ["x", "y"], ["auto"], ["none"]]
COUNTS = [1, 7, np.int64(3)]
ZERO_D = [np.array(3)]
LARGE = [2**31]
HUGE = [2**70, 10**5000]  # Python refuses to write the last one
FRACTIONS = [np.float32(0.5)]
FRACTIONS_ABOVE = [1.5]
NEGATIVE = [-1, np.int64(-3)]
IDS = [np.array([3, 4]), [3], (3,), range(3, 5)]
CALLED = [abs]
EMPTY = [[], ()]
OTHERS = [
    *(True, np.bool_(True), -(10**5000), math.nan, math.inf, -math.inf, np.float64("nan"), 1j, b"", b"ab", object()),
    *({}, {"a": 1}, {3}, {"x"}, np.array([]), np.array([0.5]), np.array([[1]]), np.array("x"), (n for n in [3])),
    *([1.5], [1, [2]], [[1], [2]], [None], [b"x"], [""], [10**5000], [10**6], [-1]),
]
ODD = [0, None, "", *EMPTY, *TEXTS, *FILES, *LISTS_OF_TEXTS, *COUNTS, *ZERO_D, *LARGE, *HUGE, *FRACTIONS]
ODD += [*FRACTIONS_ABOVE, *NEGATIVE, *IDS, *CALLED, *OTHERS]

INTEGERS = [0, *COUNTS, *ZERO_D, *LARGE]
NUMBERS = [0, *COUNTS, *FRACTIONS, *FRACTIONS_ABOVE]
LOADING = {
    "n_ctx": [*COUNTS, *ZERO_D, None],
    "n_threads": [*COUNTS, *ZERO_D, None],
    "n_batch": [*COUNTS, *ZERO_D],
    "cache_type": [],
    "ternary_bits": ["auto"],
    "backend": ["auto"],
    "draft": [*NAMES, FILES[0], *LISTS_OF_TEXTS[:1], *EMPTY, None],
    "draft_max": [*INTEGERS, *HUGE],
    "draft_device": ["auto"],
    "progress": [*CALLED, None],
}
REQUEST = {
    "max_tokens": [*INTEGERS, *HUGE, -1, None],
    "stop": [*TEXTS, *LISTS_OF_TEXTS, *EMPTY, None],
    "params": [None],
    "progress": [*CALLED, None],
    "temperature": [*NUMBERS, None],
    "top_k": [*INTEGERS, -1, None],
    "top_p": [0, 1, *FRACTIONS, None],
    "min_p": [0, 1, *FRACTIONS, None],
    "repeat_penalty": [*NUMBERS[1:], None],
    "frequency_penalty": [*NUMBERS, *NEGATIVE, None],
    "presence_penalty": [*NUMBERS, *NEGATIVE, None],
    "penalty_last_n": [*INTEGERS, -1, None],
    "seed": [*INTEGERS, -1, None],
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # drafters that cannot be used


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def engine(model):
    with edgeinfer.load(model, draft=None) as engine:
        yield engine


def assert_takes(call, wanted):
    """Of the odd values the call takes those wanted; to others it says in a typed error what it must be instead."""
    for value in ODD:
        if any(value is one for one in wanted):
            call(value)
            continue
        with pytest.raises(InvalidArgument, match=" must be | is one of | at least one |only one "):
            call(value)


@pytest.mark.parametrize("name", LOADING)
def test_load_takes_what_it_says(model, name):
    def load(value):
        backend = "native" if name.startswith("draft") else "reference"
        edgeinfer.load(model, **({"backend": backend, "n_ctx": 64} | {name: value})).close()

    assert_takes(load, LOADING[name])


def test_load_says_of_a_file_that_it_is_none():
    for value in [value for value in ODD if value is not None]:
        is_name = isinstance(value, (str, Path)) and value != "" and "\0" not in str(value)
        with pytest.raises(ModelNotFound if is_name else InvalidArgument):
            edgeinfer.load(value)


def test_a_prompt_is_a_text_or_token_ids(engine):
    def generate(prompt):
        assert len(engine.generate(prompt, max_tokens=2, seed=1).tokens) <= 2

    assert_takes(generate, [*TEXTS, *IDS])


@pytest.mark.parametrize("name", REQUEST)
def test_a_request_takes_what_it_says(engine, name):
    assert_takes(lambda value: engine.generate("hello", **({"max_tokens": 2} | {name: value})), REQUEST[name])
    assert_takes(lambda value: list(engine.chat().send("hello", **({"max_tokens": 2} | {name: value}))), REQUEST[name])


def test_messages_are_texts(engine):
    assert_takes(engine.chat, [*TEXTS, "", None])
    assert_takes(lambda value: list(engine.chat().send(value, max_tokens=2)), [*TEXTS, ""])


def test_numbers_of_numpy_are_kept_as_pythons():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=2**64 - 1)
    assert {type(value) for value in (params.top_k, params.seed)} == {int} and type(params.temperature) is float


def test_a_file_of_messages_keeps_a_lone_surrogate_and_says_where_it_is_no_json(engine, tmp_path):
    conversation = engine.chat("\ud800é")
    conversation.save(tmp_path / "saved.jsonl")
    other = engine.chat()
    other.load(tmp_path / "saved.jsonl")
    assert other.messages == conversation.messages
    (tmp_path / "deep.jsonl").write_text("\n" + "[" * 100_000)
    with pytest.raises(InvalidArgument, match="deep.jsonl, line 2 is no JSON"):
        other.load(tmp_path / "deep.jsonl")
    assert other.messages == conversation.messages


def test_without_a_working_directory_a_name_says_so(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidArgument, match="there is no working directory"):
        check_file_name("path", "./~x")
