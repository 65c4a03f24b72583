"""What a caller's signal handler raises comes out as it was raised, wherever our code is at that moment."""

import gc
import inspect
import signal
import sys
from functools import partial

import pytest
from byte_vocabulary import byte_file
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import TemplateError
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.models.chat_template import CHATML, ChatTemplate
from edgeinfer.models.template_sandbox.errors import is_of_template
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.drafters.suffix import SuffixDrafter

MESSAGES = [{"role": role, "content": "a b"} for role in ("system", "user", "assistant", "user")]
BUSY = (
    "{% macro f(x) %}{{ x | upper | trim }}{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% for i in range(9) %}{% set ns.n = ns.n + m.content.split(' ') | map('length') | sum %}{{ f(m.role ~ i) }}"
    "{{ '%s' | format(ns.n) }}{{ {'a': [i]} | tojson }}{{ '{:>4}'.format(i) }}{% endfor %}{% endfor %}"
)


class Mine(Exception):
    pass


class Late(ValueError):  # as templates raise too
    pass


KINDS = [Mine, Late, TimeoutError, ValueError, RuntimeError, KeyboardInterrupt, SystemExit]


@pytest.fixture
def handled():
    """Sets what SIGALRM does."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def handler_of(kind):
    def handler(number, frame):
        raise kind("the time is over")

    return handler


def at_call(n, work):
    """Do the work, and raise SIGALRM at its n-th call of a function; gives how many there were."""
    n_calls = 0

    def count(frame, event, argument):
        nonlocal n_calls
        # What is raised while a generator is thrown away, Python itself drops.
        if event in ("call", "c_call") and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            n_calls += 1
            if n_calls == n:
                signal.raise_signal(signal.SIGALRM)

    # What the collection of garbage calls is not counted, and what is raised there, Python itself drops.
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n_calls


def compiled():
    ChatTemplate(BUSY)


TEMPLATE = ChatTemplate(BUSY)
WORK = {"render": partial(TEMPLATE.render, MESSAGES), "compile": compiled}


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_timers_exception_is_not_the_templates(kind, name, handled):
    handled(handler_of(kind))
    work = WORK[name]
    n_calls = min(at_call(0, work) for _ in range(2))  # the first one fills caches
    for n in range(1, n_calls, max(1, n_calls // 20)):
        with pytest.raises(kind) as raised:
            at_call(n, work)
        assert raised.type is kind and "the time is over" in str(raised.value), n


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_what_a_hook_raises_is_not_the_templates_either(work):
    def hook(frame, event, argument):
        if frame.f_code.co_filename.endswith("guards.py") or frame.f_code.co_name == "weight_of":
            raise ValueError("a hook of a debugger")  # no signal handler, and a kind that templates raise

    sys.setprofile(hook)
    try:
        with pytest.raises(ValueError, match="a hook") as raised:
            work()
    finally:
        sys.setprofile(None)
    assert raised.type is ValueError and not is_from_handler(raised.value)


def slow():
    while True:
        TEMPLATE.render(MESSAGES)


def raise_within_slow(number, frame):
    """Nothing before and after, where nobody waits for it."""
    while frame is not None:
        if frame.f_code is slow.__code__:
            raise TimeoutError("the time is over")
        frame = frame.f_back


@pytest.mark.parametrize("seconds", [0.003, 0.011, 0.02])
def test_a_real_timer_ends_a_rendering(seconds, handled):
    handled(raise_within_slow)
    # Again each second: what is raised while a generator or an object is thrown away, Python itself drops.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    with pytest.raises(TimeoutError, match="the time is over"):
        slow()
    signal.setitimer(signal.ITIMER_REAL, 0)


class Handler:
    def __call__(self, number, frame):
        raise ValueError("an object")

    def method(self, number, frame):
        raise ValueError("a method")


def with_more(text, number, frame):
    raise ValueError(text)


@pytest.mark.parametrize("handler", [Handler(), Handler().method, partial(with_more, "a partial")])
def test_handlers_of_all_forms_are_known(handler, handled):
    handled(handler)
    with pytest.raises(ValueError, match="an object|a method|a partial") as raised:
        signal.raise_signal(signal.SIGALRM)
    assert is_from_handler(raised.value)
    with pytest.raises(ValueError) as other:
        int("x")
    assert not is_from_handler(other.value)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ [].x.y }}", "{{ 'a' + 1 }}", "{{ '%d' % 'a' }}", "{{ {}['a']['b'] }}", "{{ 'a' | round }}",
     "{{ ['a'].index('b') }}", "{{ '{:x}'.format('a') }}", "{{ messages | sort(attribute='n') }}{{ 1 | foo }}"],
)  # fmt: skip
def test_what_a_template_raises_is_still_its_own(source, handled):
    handled(handler_of(Mine))  # a handler that is not called changes nothing
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(MESSAGES)


def test_an_exception_set_from_another_thread_is_not_the_templates():
    # Such a one has no frame of its own: it goes by its kind.
    assert not is_of_template(TimeoutError()) and not is_of_template(Late())
    assert is_of_template(ZeroDivisionError())


@pytest.mark.parametrize("kind", [Mine, TimeoutError, Late])
def test_a_drafter_is_not_dropped_for_it(kind, handled, tmp_path, monkeypatch):
    handled(handler_of(kind))
    propose = SuffixDrafter.propose

    def slow(self, *rest):
        signal.raise_signal(signal.SIGALRM)
        return propose(self, *rest)

    with edgeinfer.load(write_tiny_model(tmp_path / "tiny.gguf"), draft=["suffix"]) as engine:
        plain = engine.generate("hello hello hello", max_tokens=20, temperature=0)
        with monkeypatch.context() as patched:
            patched.setattr(SuffixDrafter, "propose", slow)
            with pytest.raises(kind):
                engine.generate("hello hello hello", max_tokens=20, temperature=0)
        assert engine.generate("hello hello hello", max_tokens=20, temperature=0).tokens == plain.tokens


def test_loading_with_a_draft_model_that_takes_too_long_ends(handled, tmp_path, monkeypatch):
    from edgeinfer.models.gguf import ModelFile

    target, draft = (write_tiny_model(tmp_path / name) for name in ("target.gguf", "draft.gguf"))
    opened = ModelFile.open

    def slow(path):
        if "draft" in str(path):
            signal.raise_signal(signal.SIGALRM)
        return opened(path)

    handled(handler_of(TimeoutError))
    monkeypatch.setattr(ModelFile, "open", slow)
    with pytest.raises(TimeoutError, match="the time is over"):
        edgeinfer.load(target, draft=draft)


@pytest.mark.parametrize("kind", [Mine, TimeoutError, Late])
def test_a_tokeniser_passes_it_on(kind, handled):
    handled(handler_of(kind))
    tokenizer = Tokenizer.from_file(byte_file(["<s>", "</s>"], []))
    template = ChatTemplate(CHATML)
    n_calls = min(at_call(0, lambda: template.encode(tokenizer, MESSAGES)) for _ in range(2))
    for n in range(1, n_calls, max(1, n_calls // 20)):
        with pytest.raises(kind):
            at_call(n, lambda: template.encode(tokenizer, MESSAGES))
