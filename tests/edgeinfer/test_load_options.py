"""What can be said about loading: each field checked once, and the keywords of `load` the same fields."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.cli import main
from edgeinfer.cli.chat import chat
from edgeinfer.cli.generate import generate
from edgeinfer.cli.options import load_keywords
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import LoadSettings, PlanKeywords, PlanOptions, options_of, variable_of
from edgeinfer.loading import open as loading
from edgeinfer.loading.options import LoadKeywords, LoadOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("n_ctx", 0, r"n_ctx must be an integer in 1\.\.2147483647: found 0"),
        ("n_ctx", 2**31, "n_ctx must be an integer"),
        ("n_threads", 0, r"n_threads must be an integer in 1\.\.1024: found 0"),
        ("n_threads", True, "n_threads must be an integer"),
        ("backend", "cuda", "backend must be auto, native, reference, llama.cpp, opencl, onnx or fpga-sim: found"),
        ("backend", None, r"backend must be a text \(str\): found None"),
        ("n_batch", 1.5, "n_batch must be an integer"),
        ("cache_type", "q4", "cache_type must be f16, q8_0 or k6v4: found 'q4'"),
        ("parallel", 0, r"parallel must be an integer in 1\.\.64: found 0"),
        ("parallel", 65, r"parallel must be an integer in 1\.\.64: found 65"),
        ("cache_ram", "50%", "cache_ram must be bytes, a size such as \"2GiB\", or None: found '50%'"),
        ("cache_ram", "auto", "cache_ram must be bytes"),
        ("cache_ram", -1, "cache_ram must be at least one byte"),
        ("cache_ram", True, "cache_ram must be"),
        ("ternary_bits", "3", "ternary_bits must be auto, 2 or 1.6: found '3'"),
        ("draft", "", 'draft must be "auto", "none", or one or several of'),
        ("draft", ["suffix", "auto"], "draft must be .*: found 'auto'"),
        (
            "draft",
            ["a.gguf", "suffix", "b.gguf"],
            "only one draft model or head .*: found a.gguf, b.gguf; leave",
        ),
        ("verify", 1, "verify must be True or False: found 1"),
        ("verify", "yes", "verify must be True or False: found 'yes'"),
        ("draft_max", -1, "draft_max must be an integer of at least 0: found -1"),
        ("draft_device", "tpu", "a draft device is one of .*: found 'tpu'"),
        ("draft_memory", "", "draft_memory must be the name of a file or None: found ''"),
        ("draft_memory", 3, "draft_memory must be the name of a file or None: found 3"),
        (
            "chat_template",
            "",
            "chat_template must be Jinja, the name of a known template, or the Path of a file: found",
        ),
        ("reasoning", "yes", "reasoning must be auto, on or off: found 'yes'"),
        ("tbt", 0, r"tbt must be a number in 1\.\.1e\+06: found 0"),
        ("tbt", "100", "tbt must be a number"),
        ("fpga_folder", 3, "fpga_folder must be the name of a folder or None: found 3"),
        ("fpga_folder", "folder", "fpga_folder is for backend=\"fpga-sim\": found 'auto'"),
        ("progress", 3, "progress must be a function or None: found 3"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field, value, message):
    with pytest.raises(InvalidArgument, match=message):
        LoadOptions(**{field: value})
    with pytest.raises(InvalidArgument, match=message):
        edgeinfer.load("/nowhere.gguf", **{field: value})  # before the file is looked for


def test_the_keywords_of_load_are_the_fields():
    assert get_type_hints(LoadKeywords) == get_type_hints(LoadOptions)
    assert {field.name for field in fields(LoadOptions)} == set(LoadKeywords.__annotations__)
    with pytest.raises(TypeError, match="n_ctxx"):
        edgeinfer.load("/nowhere.gguf", n_ctxx=3)


def test_each_field_is_an_option_that_is_described_beside_it():
    options = options_of(LoadOptions)
    assert set(options) == {field.name for field in fields(LoadOptions)}
    text = " ".join(inspect.getdoc(LoadOptions).split())
    assert all(about.text and f"{name}: {' '.join(about.text.split())}" in text for name, (_, about) in options.items())
    assert {name for name, (_, about) in options.items() if not about.flags} == {"fpga_folder", "progress"}


@pytest.mark.parametrize("command", [chat, generate])
def test_the_flags_of_a_command_are_those_that_the_options_have(command):
    flags = {parameter.name: parameter for parameter in command.params}
    for name, (_, about) in options_of(LoadOptions).items():
        if command is generate and name in ("chat_template", "reasoning"):
            assert name not in flags  # it completes texts as they are
        elif about.flags:
            flag = flags[name]
            assert (set(flag.opts), flag.help, flag.metavar) == (set(about.flags), about.help, about.metavar)
            assert flag.envvar == variable_of(*about.flags)
        else:
            assert name not in flags


@pytest.mark.parametrize("command", [chat, generate])
def test_flags_that_are_not_given_ask_for_what_the_options_are_by_default(command, monkeypatch):
    for _, about in options_of(LoadOptions).values():
        if about.flags:
            monkeypatch.delenv(variable_of(*about.flags), raising=False)
    flags = command.make_context("edgeinfer", []).params
    assert LoadOptions(**load_keywords(flags)) == LoadOptions(expert_device_bytes="auto")  # None says the same


def test_what_a_plan_is_made_for_are_options_with_their_values():
    settings = LoadSettings.of(LoadOptions(n_batch=7, cache_type="q8_0"), 64, n_threads=2)
    assert settings == LoadSettings(64, n_batch=7, n_threads=2, cache_type="q8_0")
    assert LoadOptions(**vars(settings)).n_batch == 7
    assert {field.name for field in fields(PlanOptions)} == set(PlanKeywords.__annotations__)
    assert vars(replace(settings, draft="auto").of_model) == vars(settings)


def test_memory_of_finished_texts_is_a_size_or_none():
    sizes = {None: 0, 0: 0, "2GiB": 2 << 30, 1000: 1000}
    for value, n_bytes in sizes.items():
        assert LoadSettings.of(LoadOptions(cache_ram=value), 64).cache_ram_bytes == n_bytes
    number = LoadOptions(cache_ram=np.int64(1000)).cache_ram
    assert type(number) is int and number == 1000


@pytest.mark.parametrize(
    "flags", [["--cache-ram", "2048"], ["-cram", "-1"], ["-np", "65"], ["-np", "0"], ["-cram", "1%"]]
)
def test_flags_of_several_texts_are_checked(flags, model):
    refused = CliRunner().invoke(main, ["generate", "-m", str(model), "hello", *flags])
    assert refused.exit_code == 2, refused.stderr
    if flags[1] == "2048":
        assert "give --cache-ram 2048MiB" in refused.stderr


def test_several_texts_are_for_the_native_backend(model):
    with edgeinfer.load(model, n_ctx=64, parallel=4, cache_ram="1MiB", draft="none") as engine:
        plan = engine.memory_plan
        assert (plan.n_sequences, engine.session.model.n_sequences) == (4, 4)
        assert plan.n_positions > 64 + 3 * 128
    with pytest.warns(RuntimeWarning, match="the reference backend has one session, not 4"):
        engine = edgeinfer.load(model, n_ctx=64, parallel=4, cache_ram="1MiB", draft="none", backend="reference")
    assert (engine.memory_plan.n_sequences, engine.memory_plan.n_positions) == (1, 64)
    engine.close()


def test_numbers_of_numpy_become_python_s():
    options = LoadOptions(n_ctx=np.int64(64), n_batch=np.int32(8))
    assert type(options.n_ctx) is type(options.n_batch) is int and options == LoadOptions(n_ctx=64, n_batch=8)


@pytest.mark.parametrize(
    "draft, names",
    [
        (None, "none"),
        ("auto", "auto"),
        (Path("small.gguf"), "small.gguf"),
        (["suffix", Path("a")], ("suffix", "a")),
        ([], ()),
    ],
)
def test_drafters_are_given_by_name(draft, names):
    options = LoadOptions(draft=draft)
    assert options.drafter_names() == names and replace(options, draft_max=3).drafter_names() == names


def test_keywords_change_the_options(model):
    options = LoadOptions(n_ctx=64, n_threads=1, draft="none")
    with edgeinfer.load(model, options) as engine:
        assert (engine.n_ctx, engine.device.n_threads, engine.speculator) == (64, 1, None)
    with loading.load(model, options, n_ctx=32, draft="suffix") as engine:
        assert (engine.n_ctx, engine.device.n_threads) == (32, 1) and engine.speculator is not None


def test_options_of_another_kind_are_refused(model):
    with pytest.raises(InvalidArgument, match="options must be LoadOptions: found 64"):
        edgeinfer.load(model, 64)
