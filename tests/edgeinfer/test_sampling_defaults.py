"""What is taken where a request says nothing: the file's sampling, a known model's, or the general one."""

import dataclasses
import math
import warnings
from types import SimpleNamespace

import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling_defaults import default_params

PROMPT = "hello world, there is the one"
SMOLLM2 = {"general.basename": "SmolLM2", "general.size_label": "135M"}


@pytest.fixture
def with_keys(tmp_path):
    """A tiny model whose file has these keys under general.sampling., and others."""

    def write(keys, others=None):
        metadata = {f"general.sampling.{key}": value for key, value in keys.items()} | (others or {})
        return write_tiny_model(tmp_path / "tiny.gguf", n_ctx_train=256, metadata=metadata)

    return write


def defaults_of(path):
    with ModelFile.open(path) as file:
        return default_params(file)


def test_a_file_that_says_nothing_has_the_general_defaults(with_keys):
    assert defaults_of(with_keys({})) == (SamplingParams(), [])


@pytest.mark.parametrize(
    "key, value, name, found",
    [
        ("temp", 0.6, "temperature", 0.6),  # as written, not the float32 next to it
        ("temp", 0.0, "temperature", 0.0),
        ("temp", 1, "temperature", 1.0),
        ("top_k", 20, "top_k", 20),
        ("top_k", 0, "top_k", 0),
        ("top_k", 20.0, "top_k", 20),
        ("top_p", 0.9, "top_p", 0.9),
        ("min_p", 0.01, "min_p", 0.01),
        ("penalty_last_n", 256, "penalty_last_n", 256),
        ("penalty_repeat", 1.05, "repeat_penalty", 1.05),
    ],
)
def test_each_key_of_the_file_is_a_default(with_keys, key, value, name, found):
    params, ignored = defaults_of(with_keys({key: value}))
    assert params == dataclasses.replace(SamplingParams(), **{name: found}) and ignored == []
    assert type(getattr(params, name)) is type(found)


def test_the_order_is_given_file_known_model_general(with_keys):
    known = defaults_of(with_keys({}, SMOLLM2))[0]
    assert (known.temperature, known.top_p, known.repeat_penalty) == (0.2, 0.9, 1.1)
    path = with_keys({"temp": 0.7, "penalty_repeat": 1.0}, SMOLLM2)
    with edgeinfer.load(path, backend="reference") as engine:
        assert engine.default_params == dataclasses.replace(known, temperature=0.7, repeat_penalty=1.0)
        used = engine.generate(PROMPT, max_tokens=4, top_k=3, seed=1).params
        assert used == dataclasses.replace(engine.default_params, top_k=3, seed=1)
        answer = engine.chat().send("hello", max_tokens=2, seed=1)
        list(answer)
        assert answer.completion.params == dataclasses.replace(engine.default_params, seed=1)
        explicit = SamplingParams(seed=3)
        assert engine.generate(PROMPT, max_tokens=4, params=explicit).params == explicit


def test_the_params_of_a_completion_say_the_same_again(with_keys):
    path = with_keys({"temp": 1.3, "top_k": 30, "penalty_repeat": 1.2})
    with edgeinfer.load(path, backend="reference") as engine:
        engine.tokenizer.stop_ids = frozenset()
        first = engine.generate(PROMPT, max_tokens=20)
        assert first.params.temperature == 1.3 and first.params.seed is not None
        seeded = engine.generate(PROMPT, max_tokens=20, seed=1)
    with edgeinfer.load(with_keys({}), backend="reference") as engine:  # the same weights, without the keys
        engine.tokenizer.stop_ids = frozenset()
        assert engine.generate(PROMPT, max_tokens=20, params=first.params).tokens == first.tokens
        assert engine.generate(PROMPT, max_tokens=20, params=seeded.params).tokens == seeded.tokens
        # Of some seeds both say the same.
        assert engine.generate(PROMPT, max_tokens=20, seed=1).tokens != seeded.tokens


@pytest.mark.parametrize(
    "key, value",
    [
        ("temp", "warm"),
        ("temp", True),
        ("temp", [0.5, 0.6]),
        ("top_k", 2.5),
        ("penalty_repeat", 0.0),
        ("penalty_last_n", [1, 2]),
        ("mirostat", 2),
        ("mirostat", "on"),
        ("xtc_probability", 0.5),
        ("sequence", "top_k;magic"),
        ("sequence", "temperature;top_k"),
        ("sequence", 5),
        ("sequence", ""),
    ],
)
def test_what_is_of_no_use_is_ignored_with_one_line(with_keys, key, value):
    path = with_keys({key: value, "min_p" if key != "min_p" else "top_p": 0.125})
    with pytest.warns(RuntimeWarning, match=f"general.sampling.{key}") as caught:
        engine = edgeinfer.load(path, backend="reference", draft="none")
    with engine:
        expected = {"min_p" if key != "min_p" else "top_p": 0.125}
        assert engine.default_params == dataclasses.replace(SamplingParams(), **expected)
        (told,) = (each for each in caught if each.category is not ResourceWarning)  # of what other tests left
        assert "\n" not in str(told.message)


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("temp", -1.0, {"temperature": 0.0}),
        ("top_p", 1.5, {"top_p": 1.0}),
        ("min_p", -0.1, {"min_p": 0.0}),
        ("top_k", -1, {"top_k": 0}),
        ("top_k", 2**31 - 1, {"top_k": 2**31 - 1}),
    ],
)
def test_what_llama_cpp_takes_for_greedy_or_off_is_that(key, value, expected):
    params, ignored = default_params(SimpleNamespace(metadata={f"general.sampling.{key}": value}))
    assert params == dataclasses.replace(SamplingParams(), **expected) and ignored == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_value_that_is_no_usable_number_is_ignored(value):
    file = SimpleNamespace(metadata={"general.sampling.temp": value, "general.sampling.top_k": 5})
    params, ignored = default_params(file)
    assert params == SamplingParams(top_k=5) and len(ignored) == 1


def test_steps_that_are_off_need_no_warning(with_keys):
    keys = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "xtc_probability": 0.0, "xtc_threshold": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edgeinfer.load(with_keys(keys), backend="reference").close()


def test_steps_that_the_files_chain_lacks_are_off(with_keys):
    params, ignored = defaults_of(with_keys({"sequence": "top_k;temperature", "temp": 0.7, "top_p": 0.5}))
    expected = SamplingParams(temperature=0.7, top_p=1.0, min_p=0.0)
    assert (params, ignored) == (expected, [])
    whole = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    assert defaults_of(with_keys({"sequence": whole})) == (SamplingParams(), [])


def test_the_default_model_has_its_authors_sampling_and_a_penalty(default_model):
    params, ignored = defaults_of(default_model)
    assert params == SamplingParams(0.2, 50, 0.9, 0.0, 1.1) and ignored == []
