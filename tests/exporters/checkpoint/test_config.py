"""config.json in the spellings of transformers 4 and 5, and what is said of wrong values."""

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Config


def config(**values: Any) -> Config:
    return Config(values, Path("m/config.json"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
SPELLINGS = [  # the same rotation as 4 and 5 write it
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, "llama3", 5e5),
    ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, "llama3", 5e5),
    ({"rope_parameters": LLAMA3, "rope_theta": 5e5}, "llama3", 5e5),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3", 5e5),
    ({"rope_theta": 5e5, "rope_scaling": None}, "default", 5e5),
    ({"rope_theta": 5e5}, "default", 5e5),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "default", 5e5),
    ({"rope_scaling": {"type": "su", "rope_type": "longrope"}}, "longrope", 1e4),
    ({"rope_scaling": {"type": "su"}}, "longrope", 1e4),
]


@pytest.mark.parametrize("values, kind, theta", SPELLINGS)
def test_a_rotation_is_the_same_in_each_spelling(values: dict[str, Any], kind: str, theta: float) -> None:
    rope = config(**values).rope()
    assert (rope.kind, rope.theta, rope.share) == (kind, theta, 1.0)
    if kind == "llama3":
        assert rope.values.number("factor") == 8
    assert config(**values).rope("sliding_attention").theta == theta


def test_types_of_layers_may_be_rotated_differently() -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    five = config(rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}})
    four = config(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    for found in (five, four):
        assert (found.rope().kind, found.rope().theta, found.rope().values.number("factor")) == ("linear", 1e6, 8.0)
        assert (found.rope("sliding_attention").kind, found.rope("sliding_attention").theta) == ("default", 1e4)
    with pytest.raises(ModelFileError, match="rope_parameters must be an object with sliding_attention"):
        config(rope_parameters={"full_attention": full}).rope("sliding_attention")


def test_a_part_of_the_head_may_be_rotated() -> None:
    assert config(partial_rotary_factor=0.5).rope().share == 0.5
    assert config(rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 1e4}).rope().share == 0.25
    with pytest.raises(ModelFileError, match="partial_rotary_factor must be a number above 0, at most 1: found 1.5"):
        config(partial_rotary_factor=1.5).rope()


def test_what_else_is_spelt_in_two_ways() -> None:
    assert config(torch_dtype="bfloat16").dtype == config(dtype="torch.bfloat16").dtype == "bfloat16"
    assert config().dtype is None and config(architectures=["A"]).architecture == "A" and config().architecture == ""
    whole = config(model_type="gemma3", architectures=["Whole"], eos_token_id=7, text_config={"model_type": "text"})
    assert whole.language().text("model_type") == "text" and whole.language().integer("eos_token_id") == 7
    assert whole.language().architecture == "Whole" and config(a=1).language().integer("a") == 1


def test_messages_name_key_wanted_and_found() -> None:
    found = config(a="x", b=True, c=[1, "2"], d=float("inf"), e={"f": -1}, n=None)
    for call, words in [
        (lambda: found.integer("a"), "m/config.json: a must be an integer in 1..2147483647: found 'x'"),
        (lambda: found.integer("b"), "b must be an integer .*: found True"),
        (lambda: found.integer("n"), "n must be an integer .*: it is missing"),
        (lambda: found.number("d"), r"d must be a number above 0, at most 1e\+30: found inf"),
        (lambda: found.number("a", 1.0), "a must be a number"),
        (lambda: found.flag("a"), "a must be true or false: found 'x'"),
        (lambda: found.text("b"), "b must be a text: found True"),
        (lambda: found.integers("c"), "c must be a list of integers in 0..2147483647"),
        (lambda: found.integers("c", 3), "c must be a list of 3 integers"),
        (lambda: found.numbers("c"), "c must be a list of numbers"),
        (lambda: found.texts("c"), "c must be a list of texts"),
        (lambda: found.part("a"), "a must be an object: found 'x'"),
        (lambda: config(e={"f": -1}).part("e").integer("f"), "e.f must be an integer in .*: found -1"),
        (lambda: found.integer("c", 10**400, least=10**500), "c must be an integer"),
    ]:
        with pytest.raises(ModelFileError, match=words):
            call()
    with pytest.raises(UnsupportedModel, match="a must be y or z: found 'x'"):
        found.choice("a", ("y", "z"))
    assert found.integer("n", 3) == 3 and found.flag("m", True) and found.get("m") is None
