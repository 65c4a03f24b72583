"""A tiny model, its engine, and a server of it."""

import importlib.util
import time

import pytest
from http_server import running, server_is_there
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer


@pytest.fixture(scope="module")
def model(tmp_path_factory, native):
    server_is_there()
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture(scope="module")
def engine(model):
    with edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()  # a random model draws them at random
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def ending(model):
    """A server whose texts end as the model says, with what reads constraints."""
    if importlib.util.find_spec("llguidance") is None:
        missing("grammar", "llguidance is not installed")
    with edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine, running(engine) as found:
        yield found


@pytest.fixture
def slow(engine, monkeypatch):
    """An engine whose passes take 20 ms more, so that no text is over in less."""
    for owner in (type(engine.session), type(engine.session.model)):
        forward = owner.forward

        def slowly(*arguments, forward=forward, **options):
            time.sleep(0.02)
            return forward(*arguments, **options)

        monkeypatch.setattr(owner, "forward", slowly)
    return engine
