"""Errors and results go to other processes and come back equal; what holds a model says that it cannot."""

import copy
import inspect
import multiprocessing
import pickle

import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common import errors
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, InvalidGGUF, NotPicklable
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.completion import Completion, Piece
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingParams

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
ERRORS = {
    kind
    for kind in [*vars(errors).values(), *(getattr(edgeinfer, name) for name in edgeinfer.__all__)]
    if isinstance(kind, type) and issubclass(kind, EdgeInferError)
}
ARGUMENTS = {"path": "x.gguf", "field": "general.name", "offset": 24, "reason": "no text", "n_tokens": 9, "n_ctx": 4}
BOUND = {"Engine", "Conversation", "Answer", "Stream"}  # of the public classes, those that hold a model


def copies(value):
    """What pickle makes of it with each protocol, and copy."""
    yield from (pickle.loads(pickle.dumps(value, protocol)) for protocol in PROTOCOLS)
    yield copy.copy(value)
    yield copy.deepcopy(value)


def made(kind):
    """An error of this kind, as its constructor takes it."""
    signature = inspect.signature(kind.__init__)
    names = [name for name, parameter in signature.parameters.items() if parameter.default is inspect.Parameter.empty]
    if set(names[1:]) <= set(ARGUMENTS):
        return kind(**{name: ARGUMENTS[name] for name in names[1:]})
    return kind("what was expected, found and is to be done")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def engine(model):
    with edgeinfer.load(model) as engine:
        yield engine


@pytest.mark.parametrize("kind", sorted(ERRORS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_message_and_attributes(kind):
    error = made(kind)
    error.mine = [1, "two"]
    error.add_note("while reading")
    for other in copies(error):
        assert type(other) is kind and str(other) == str(error) and other.args == error.args
        assert vars(other) == vars(error) and other.exit_code == error.exit_code


def test_attributes_of_errors_are_those_that_were_given():
    overflow, damaged = ContextOverflow(9, 4, at_least=True), InvalidGGUF("x.gguf", "general.name", 24, "no text")
    for other in copies(overflow):
        assert (other.n_tokens, other.n_ctx) == (9, 4) and "at least 9 tokens" in str(other)
    for other in copies(damaged):
        assert (other.field, other.offset, other.reason) == ("general.name", 24, "no text")


def test_an_error_of_the_callers_own_kind_comes_back():
    for other in copies(TooLate(3, "minutes")):
        assert type(other) is TooLate and str(other) == "3 minutes late" and other.n == 3


class TooLate(EdgeInferError):
    def __init__(self, n, unit):
        super().__init__(f"{n} {unit} late")
        self.n = n


def _overflow(n):
    raise ContextOverflow(n, 4)


def test_a_worker_that_raises_an_error_does_not_end_the_pool():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(ContextOverflow, match="9 tokens") as raised:
            pool.map_async(_overflow, [9]).get(timeout=200)
        assert raised.value.n_tokens == 9
        assert pool.apply(abs, (-1,)) == 1


def example(name, engine, model):
    """An object of a public class that is no error."""
    completion = engine.generate("hello", max_tokens=4, seed=1)
    call = edgeinfer.ToolCall("{}", "f", {"a": [1]})
    return {
        "CallResult": lambda: edgeinfer.CallResult(call, {"b": 2}),
        "Completion": lambda: completion,
        "LoadOptions": lambda: LoadOptions(n_ctx=64, draft=("suffix",), budget="1GiB"),
        "Piece": lambda: Piece("a", (1,), "stop", "b"),
        "Profile": lambda: edgeinfer.profile(model, n_ctx=64),
        "Round": lambda: edgeinfer.Round((call,), (edgeinfer.CallResult(call, 5),)),
        "SamplingParams": lambda: SamplingParams(logit_bias={5: False, 7: 1.5}, dry_sequence_breakers=["x"], seed=3),
        "Score": lambda: engine.score("hello", [" world"])[0],
        "Speculation": lambda: completion.timings.speculation,
        "Timings": lambda: completion.timings,
        "TokenLogprob": lambda: edgeinfer.TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.5))),
        "ToolCall": lambda: call,
        "ToolSelection": lambda: edgeinfer.ToolSelection(most=3),
        "Usage": lambda: completion.usage,
    }[name]()


RESULTS = [
    name
    for name in edgeinfer.__all__
    if isinstance(getattr(edgeinfer, name), type) and getattr(edgeinfer, name) not in ERRORS and name not in BOUND
]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_comes_back_equal(name, engine, model):
    value = example(name, engine, model)
    assert type(value) is getattr(edgeinfer, name)
    for other in copies(value):
        assert type(other) is type(value) and other == value


def test_what_an_engine_tells_comes_back_equal(engine):
    chat = engine.chat(system="be brief")
    chat.send("hello", max_tokens=4, seed=1).close()
    for value in (engine.memory, engine.memory_plan, engine.default_params, engine.device, chat.messages):
        assert all(other == value for other in copies(value))


def test_a_completion_is_the_same_in_another_process(engine):
    completion = engine.generate("hello", max_tokens=4, seed=1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_echo, (completion,)).get(timeout=200) == completion


def _echo(completion):
    assert isinstance(completion, Completion)
    return completion


def bound(name, engine):
    chat = engine.chat()
    return {
        "Engine": lambda: engine,
        "Conversation": lambda: chat,
        "Answer": lambda: chat.send("hello", max_tokens=2),
        "Stream": lambda: engine.stream("hello", max_tokens=2),
        "session": lambda: engine.session,
        "model": lambda: engine.session.model,
        "tokenizer": lambda: engine.tokenizer,
    }[name]()


@pytest.mark.parametrize("name", [*sorted(BOUND), "session", "model", "tokenizer"])
def test_what_holds_a_model_says_what_to_do_instead(name, engine):
    value = bound(name, engine)
    makers = [lambda protocol=protocol: pickle.dumps(value, protocol) for protocol in PROTOCOLS]
    for make in (*makers, lambda: copy.copy(value), lambda: copy.deepcopy(value), lambda: pickle.dumps([value])):
        with pytest.raises(NotPicklable, match=r"cannot be pickled or copied: load the model in each process"):
            make()
    with pytest.raises(TypeError):  # what others raise for it
        pickle.dumps(value)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_sessions_of_backends_say_so_too(backend, model):
    with edgeinfer.load(model, backend=backend) as engine:
        for value in (engine.session, engine.session.model):
            assert isinstance(value, OfOneProcess)
            with pytest.raises(NotPicklable):
                copy.deepcopy(value)


def test_a_file_and_a_template(model):
    with ModelFile.open(model) as file, pytest.raises(NotPicklable):
        pickle.dumps(file)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", "<s>", "</s>")
    for other in copies(template):
        assert other.render([{"role": "user", "content": "a"}]) == "<s>a" and other.source == template.source
