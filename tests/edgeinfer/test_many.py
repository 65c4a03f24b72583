"""Many texts at once: each is what it is alone, and none is in the way of another."""

import asyncio
import threading
import time

import numpy as np
import pytest
from drafting import FixedCosts
from random_requests import in_threads, passes_of, random_requests, served
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import ContextOverflow, EngineBusy, InvalidArgument, NumericalError
from edgeinfer.scheduling.pace import LEAST_PIECE
from edgeinfer.scheduling.sequence import RUN_AHEAD

PROMPTS = [f"hello world number {i}, there is the one and there is {'more ' * (5 * i % 17)}" for i in range(9)]
GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture
def opened(model):
    engines = []

    def load(**changes):
        engine = edgeinfer.load(model, backend="native", **{"parallel": 4, "draft": "none"} | changes)
        engine.tokenizer.stop_ids = frozenset()
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(opened):
    return opened()


def alone(opened, prompts=PROMPTS, **options):
    """The completions of requests one after the other, each on an empty cache."""
    engine, found = opened(parallel=1), []
    for prompt in prompts:
        engine.forget()
        found.append(engine.generate(prompt, **options))
    return found


@pytest.mark.parametrize("draft", ["none", "auto"])
@pytest.mark.parametrize("options", [GREEDY, {"seed": 3}, {"seed": 4, "temperature": 1.5, "repeat_penalty": 1.2}])
def test_texts_side_by_side_are_what_they_are_alone(opened, draft, options, monkeypatch):
    engine = opened(draft=draft)
    if engine.speculator is not None:
        engine.speculator.costs = FixedCosts()
    sizes = passes_of(engine, monkeypatch)
    found = list(engine.generate_many(PROMPTS, max_tokens=40, **options))
    assert [each.tokens for each in found] == [each.tokens for each in alone(opened, max_tokens=40, **options)]
    assert max(sizes) == 4, "four at once"


def test_drafts_of_all_texts_go_through_one_pass(opened):
    engine = opened(draft=["suffix"])
    engine.speculator.costs = FixedCosts()
    found = list(engine.generate_many(["a b c d " * 8] * 4, max_tokens=60, **GREEDY))
    assert all(each.timings.speculation.tokens > 0 for each in found)
    assert sum(each.timings.speculation.by_drafter.get("suffix").accepted for each in found) > 60
    assert len({each.tokens for each in found}) == 1


def test_as_completed_tells_the_number_of_the_prompt(engine):
    in_order = list(engine.generate_many(PROMPTS, max_tokens=12, seed=1))
    found = dict(engine.generate_many(PROMPTS, max_tokens=12, seed=1, as_completed=True))
    assert sorted(found) == list(range(len(PROMPTS)))
    assert [found[i].tokens for i in range(len(PROMPTS))] == [each.tokens for each in in_order]


def test_an_iterator_that_is_left_frees_all_places(engine):
    for _ in engine.generate_many(PROMPTS, max_tokens=50, seed=1):
        break
    assert not engine.scheduler.texts


def test_a_prompt_that_is_refused_raises_and_the_engine_goes_on(engine):
    texts = engine.generate_many(["hello", "x " * 400, "world"], max_tokens=5, seed=1)
    with pytest.raises(ContextOverflow):
        list(texts)
    assert not engine.scheduler.texts and engine.generate("hello", max_tokens=5, seed=1).tokens


@pytest.mark.parametrize("wrong", ["one text", b"x", 3, None])
def test_prompts_that_are_none_are_refused(engine, wrong):
    with pytest.raises(InvalidArgument, match="prompts must be several"):
        engine.generate_many(wrong)


def test_streams_of_one_thread_take_turns_as_they_are_read(engine, opened):
    streams = [engine.stream(prompt, max_tokens=30, seed=1) for prompt in PROMPTS[:6]]
    while any([next(stream, None) for stream in streams]):
        pass
    found = [stream.completion.tokens for stream in streams]
    assert found == [each.tokens for each in alone(opened, PROMPTS[:6], max_tokens=30, seed=1)]


def test_a_stream_that_nobody_reads_holds_up_nobody(opened):
    engine = opened(parallel=1)
    expected = engine.generate("something", max_tokens=5, **GREEDY).tokens
    with engine.stream(PROMPTS[0], seed=1, max_tokens=200) as stream:
        first = next(stream)
        assert engine.generate("something", max_tokens=5, **GREEDY).tokens == expected
        assert stream.sequence.n_ready <= RUN_AHEAD + 1, "it waits for its reader"
        tokens = [*first.tokens, *(token for piece in stream for token in piece.tokens)]
    assert tuple(tokens) == alone(opened, PROMPTS[:1], max_tokens=200, seed=1)[0].tokens


def test_a_cache_that_is_short_puts_texts_aside_and_changes_none(opened):
    engine = opened(n_ctx=256, parallel=4, draft="auto")
    engine.speculator.costs = FixedCosts()
    prompts = [" ".join(["hello world"] * (6 + i)) for i in range(4)]
    found = list(engine.generate_many(prompts, max_tokens=170, seed=1))
    assert engine.scheduler.n_put_aside > 0
    expected = opened(parallel=1)
    for prompt, each in zip(prompts, found, strict=True):
        expected.forget()
        assert each.tokens == expected.generate(prompt, max_tokens=170, seed=1).tokens


def test_drafts_of_a_text_alone_take_the_room_of_texts_that_have_ended(opened):
    engine = opened(n_ctx=128, parallel=4, draft=["suffix"])
    engine.speculator.costs = FixedCosts()
    prompt = "a b c d " * 8
    expected = alone(opened, [prompt], max_tokens=60, **GREEDY)[0].tokens
    list(engine.generate_many(PROMPTS[:4], max_tokens=100, seed=1))  # which the cache holds on to
    for _ in range(3):
        assert engine.generate(prompt, max_tokens=60, **GREEDY).tokens == expected


def test_samples_are_what_their_seeds_give_alone(engine):
    samples = engine.generate(PROMPTS[3], n=6, max_tokens=20, seed=11)
    assert [each.params.seed for each in samples] == list(range(11, 17))
    for each in samples:
        assert each.tokens == engine.generate(PROMPTS[3], max_tokens=20, seed=each.params.seed).tokens
    assert engine.generate("a", n=1, max_tokens=3)[0].params.seed is not None


def test_the_prompt_of_samples_is_read_once(opened):
    engine = opened(n_ctx=256)
    rows, model, first = [], engine.session.model, engine.session
    joint, lone = model.forward, first.forward
    model.forward = lambda batch: rows.append(sum(len(each.tokens) for each in batch)) or joint(batch)
    first.forward = lambda tokens, *more, **options: rows.append(len(tokens)) or lone(tokens, *more, **options)
    n_prompt = len(engine.tokenize("a b c " * 30))
    engine.generate("a b c " * 30, n=4, max_tokens=1, seed=1)
    assert sum(rows) <= n_prompt + 3


def test_the_first_samples_that_end_are_enough(engine):
    ended = list(engine.samples(PROMPTS[0], 8, first=3, max_tokens=16, seed=5))
    assert len(ended) == 3 and not engine.scheduler.texts


def test_a_vote_counts_what_texts_say_and_stops_when_it_is_decided(engine):
    vote = engine.vote(PROMPTS[0], 9, lambda text: len(text) > 0, max_tokens=6, seed=5)
    assert vote.choice is True and vote.counts[0][1] == len(vote.completions) < 9
    assert engine.vote(PROMPTS[0], 3, lambda text: None, max_tokens=2).choice is None
    with pytest.raises(InvalidArgument, match="key"):
        engine.vote("a", 3, "no function")


@pytest.mark.parametrize("n", [0, -1, 10**6, 1.5, True])
def test_a_wrong_number_of_samples_is_refused(engine, n):
    for ask in (lambda: engine.generate("a", n=n), lambda: engine.samples("a", n), lambda: engine.vote("a", n, len)):
        with pytest.raises(InvalidArgument, match="n must be"):
            ask()


def test_threads_get_what_one_thread_gets(opened):
    requests = random_requests(48, seed=1)
    lone = opened(parallel=1)
    expected = [request.run(lone) for request in requests]
    assert served(opened(draft="auto"), requests, 8) == expected


def test_a_text_of_another_thread_joins_the_passes(engine, monkeypatch):
    sizes, begun = passes_of(engine, monkeypatch), threading.Barrier(4)

    def read(i):
        stream = engine.stream(PROMPTS[i], max_tokens=60, seed=1)
        stream.start()
        if i == 0:
            next(stream)  # this one runs when the others come
        begun.wait(60)
        for _ in stream:
            pass
        return stream.completion.tokens

    texts = in_threads(4, read)
    assert max(sizes, default=0) >= 2
    assert texts == [engine.generate(PROMPTS[i], max_tokens=60, seed=1).tokens for i in range(4)]


def test_leaving_a_text_stops_no_pass_of_the_others(engine):
    kept = engine.stream(PROMPTS[0], max_tokens=40, seed=1)
    others = [engine.stream(prompt, max_tokens=40, seed=2) for prompt in PROMPTS[1:4]]
    for stream in [kept, *others]:
        next(stream)
    others[0].close()
    others[1].cancel()
    del others[2], stream
    tokens = [token for piece in kept for token in piece.tokens]
    assert len(tokens) == 39 and others[0].completion.finish_reason == "interrupted"
    assert list(others[1])[-1].finish_reason == "interrupted" and not engine.scheduler.texts


def test_an_interrupt_ends_all_texts_and_the_next_ones_run(engine):
    streams = [engine.stream(prompt, seed=1) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert engine.interrupt() is True
    assert [list(stream)[-1].finish_reason for stream in streams] == ["interrupted"] * 3
    assert engine.generate(PROMPTS[0], max_tokens=3, seed=1).finish_reason == "length"


def test_a_timeout_ends_a_text_as_it_is(engine):
    completion = engine.generate(PROMPTS[0], timeout=1e-9)
    assert completion.finish_reason == "timeout" and completion.tokens == ()
    for wrong in (0, -1.0, "1", True):
        with pytest.raises(InvalidArgument, match="timeout"):
            engine.generate("a", timeout=wrong)


@pytest.mark.parametrize("tbt, n_most", [(1.0, LEAST_PIECE), (1e6, 100)])
def test_a_prompt_beside_a_text_that_runs_is_read_in_pieces(opened, tbt, n_most, monkeypatch):
    engine = opened(tbt=tbt)
    sizes, model = [], engine.session.model
    forward = model.forward

    def counted(rows):
        sizes.append(max(len(each.tokens) for each in rows))
        time.sleep(2e-3)  # longer than the smaller target
        return forward(rows)

    monkeypatch.setattr(model, "forward", counted)
    with engine.stream(PROMPTS[0], max_tokens=200, **GREEDY) as running:
        for _ in range(4):  # so that what a pass takes is measured
            next(running)
            engine.generate(list(range(100, 200)), max_tokens=1, **GREEDY)
            engine.forget()
            sizes, found = [], sizes
        assert max(found) == n_most


def test_a_text_with_priority_comes_first(opened):
    engine = opened(parallel=1)
    with engine.stream(PROMPTS[0], max_tokens=8, seed=1) as stream:
        next(stream)
        late = [engine.stream("hello", max_tokens=3, seed=1, priority=priority) for priority in (0, 5)]
        for each in late:
            each.start()
        for _ in stream:
            pass
        list(late[1])
        assert not late[0].sequence.has_ended
        list(late[0])


def test_too_many_that_wait_are_told_so(opened):
    engine = opened(parallel=1)
    engine.scheduler.most_waiting = 2
    streams = [engine.stream("hello", max_tokens=3, seed=1) for _ in range(3)]
    for stream in streams[:2]:
        stream.start()
    with pytest.raises(EngineBusy) as error:
        streams[2].start()
    assert error.value.n_waiting == 2
    for stream in streams[:2]:
        list(stream)


def test_an_error_of_one_text_is_that_of_no_other(engine, monkeypatch):
    expected = engine.generate(PROMPTS[1], max_tokens=20, seed=1).tokens
    streams = [engine.stream(prompt, max_tokens=20, seed=1) for prompt in PROMPTS[:2]]
    first, model = next(streams[0]), engine.session.model
    tokens = list(next(streams[1]).tokens)
    forward, broken = model.forward, streams[0].sequence.session

    def failing(batch):
        outputs = forward(batch)
        for rows, out in zip(batch, outputs, strict=True):
            if rows.session is broken:
                out.logits[:] = np.nan
        return outputs

    monkeypatch.setattr(model, "forward", failing)
    tokens += [token for piece in streams[1] for token in piece.tokens]
    with pytest.raises(NumericalError):
        list(streams[0])
    assert tuple(tokens) == expected and first.tokens and not engine.scheduler.texts


def test_a_callback_that_raises_ends_its_own_text(engine):
    def failing(share):
        raise ZeroDivisionError

    other = engine.stream(PROMPTS[0], max_tokens=10, seed=1)
    next(other)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS[1], progress=failing)
    assert len(list(other)) == 10 and not engine.scheduler.texts


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_what_comes_out_of_a_pass_is_the_leaders_alone(engine, kind, monkeypatch):
    expected = engine.generate(PROMPTS[1], max_tokens=20, seed=1).tokens
    streams = [engine.stream(prompt, max_tokens=20, seed=1) for prompt in PROMPTS[:2]]
    tokens = [*next(streams[1]).tokens]
    next(streams[0])
    forward, n_calls = engine.session.model.forward, 0

    def raising(batch):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise kind
        return forward(batch)

    monkeypatch.setattr(engine.session.model, "forward", raising)
    with pytest.raises(kind):
        list(streams[0])
    tokens += in_threads(1, lambda _: [token for piece in streams[1] for token in piece.tokens])[0]
    assert tuple(tokens) == expected and not engine.scheduler.texts


def test_closing_the_engine_ends_the_texts_of_all_threads(opened):
    engine = opened()
    begun = threading.Barrier(4)

    def read(i):
        pieces = iter(engine.stream(PROMPTS[i], seed=i))
        next(pieces)
        begun.wait(30)
        return [piece.finish_reason for piece in pieces][-1]

    def close(_):
        begun.wait(30)
        time.sleep(0.01)
        engine.close()
        return "interrupted"

    found = in_threads(4, lambda i: read(i) if i < 3 else close(i))
    assert set(found) <= {"interrupted", "length"}
    with pytest.raises(InvalidArgument, match="closed"):
        engine.generate("a")


def test_scores_beside_texts_are_what_they_are_alone(engine):
    expected = engine.score(PROMPTS[2], ["one", "two words", "more of it and more"])
    streams = [engine.stream(prompt, max_tokens=30, seed=1) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert engine.score(PROMPTS[2], ["one", "two words", "more of it and more"]) == expected
    assert [len(list(stream)) for stream in streams] == [30] * 3


def test_prompts_that_begin_alike_are_held_once(opened):
    engine = opened(n_ctx=256)
    shared = " ".join(["there is the one"] * 12)
    found = list(engine.generate_many([f"{shared} {i}" for i in range(4)], max_tokens=4, seed=1))
    n_shared = len(engine.tokenize(shared))
    assert sorted(each.usage.cached_tokens for each in found)[1] >= n_shared - 2


# ---- asyncio ---------------------------------------------------------------------------------------------------------


def test_tasks_run_side_by_side(engine, opened):
    async def texts():
        return await asyncio.gather(*(engine.agenerate(prompt, max_tokens=15, seed=1) for prompt in PROMPTS))

    found = asyncio.run(texts())
    assert [each.tokens for each in found] == [each.tokens for each in alone(opened, max_tokens=15, seed=1)]


def test_a_task_that_is_cancelled_ends_its_text(engine):
    async def cancelled():
        task = asyncio.create_task(engine.agenerate("hello world", seed=1))
        while not engine.scheduler.texts:
            await asyncio.sleep(0.001)
        (text,) = engine.scheduler.texts
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return text

    text = asyncio.run(cancelled())
    assert text.end == "interrupted" and len(text.tokens) < engine.n_ctx and not engine.scheduler.texts


def test_a_stream_of_pieces_for_asyncio(engine):
    async def pieces():
        found = [piece async for piece in engine.astream("hello", max_tokens=6, seed=1)]
        async for _ in engine.astream("hello", seed=1):
            break
        return found

    found = asyncio.run(pieces())
    assert found[-1].finish_reason == "length" and sum(len(piece.tokens) for piece in found) == 6
    with pytest.raises(InvalidArgument):
        engine.astream("hello", max_tokens=-5)
