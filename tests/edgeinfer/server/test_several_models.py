"""Several models in one budget: loaded when asked for, the one that was not used for longest out."""

import concurrent.futures
import threading
import time

import pytest
from http_server import SECONDS, running, server_is_there
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.server.several import SeveralModels

CHAT = "/v1/chat/completions"
NAMES = ("one", "two", "three")


class Loads:
    """Loads tiny models, of which two fit."""

    def __init__(self, most):
        self.most, self.loaded, self.log = most, [], []
        self.closed = {}  # when each was, by time.monotonic
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, path, n_bytes):
        self.gate.wait(SECONDS)
        if len(self.loaded) >= self.most:
            raise BudgetExceeded("it does not fit")
        engine = edgeinfer.load(path, backend="native", parallel=2, draft="none")
        engine.tokenizer.stop_ids = frozenset()
        self.loaded.append(path.stem)
        self.log.append(path.stem)
        close = engine.close

        def closed():
            if path.stem in self.loaded:
                self.loaded.remove(path.stem)
            self.closed[path.stem] = time.monotonic()
            close()

        engine.close = closed
        return engine


@pytest.fixture
def files(tmp_path, native):
    server_is_there()
    return {name: write_tiny_model(tmp_path / f"{name}.gguf", seed=n, n_ctx_train=256) for n, name in enumerate(NAMES)}


@pytest.fixture
def served(files):
    """(server, loads) with room for two models."""
    loads = Loads(2)
    with concurrent.futures.ThreadPoolExecutor(1) as loader:
        models = SeveralModels(files, loads, None, loader)
        with running(models=models) as server:
            yield server, loads
        models.close()
    assert loads.loaded == []


def ask(server, name, **options):
    asked = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "seed": 1}
    return server.ask(CHAT, **asked | options)["choices"][0]["message"]["content"]


def ask_alone(server, name):
    """The same, until the model is in use no more, which is soon after the answer."""
    text = ask(server, name)
    server.wait(lambda: not any(each.n_users for each in server.server.models._entries))
    return text


def test_models_are_loaded_when_asked_for_and_the_oldest_goes(served):
    server, loads = served
    assert [each["id"] for each in server.get("/v1/models").json["data"]] == list(NAMES) and loads.log == []
    texts = {name: ask_alone(server, name) for name in ("one", "two", "one", "three", "two", "three")}
    assert loads.log == ["one", "two", "three", "two"] and len(set(texts.values())) == 3
    assert sorted(loads.loaded) == ["three", "two"]
    assert [each["name"] for each in server.get("/api/ps").json["models"]] == ["two:latest", "three:latest"]
    assert len(server.get("/api/tags").json["models"]) == 3
    assert ask(server, "two") == texts["two"]


def test_the_oldest_is_the_one_that_was_not_asked_for_longest(served):
    server, loads = served
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        long = threads.submit(ask, server, "one", max_tokens=200)  # ends after those of "two"
        server.wait(lambda: loads.loaded == ["one"])
        ask(server, "two")
        long.result(SECONDS)
    server.wait(lambda: not any(each.n_users for each in server.server.models._entries))
    ask(server, "three")
    assert "one" not in loads.loaded and loads.log == ["one", "two", "three"]


def test_requests_wait_for_a_model_in_use(served):
    server, loads = served
    names = [NAMES[number % 3] for number in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(lambda name: ask(server, name, max_tokens=40), names))
    assert len(set(zip(names, texts, strict=True))) == 3
    server.wait(lambda: len(loads.loaded) <= 2)


def test_those_who_ask_meanwhile_share_one_load(served):
    server, loads = served
    loads.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server, "one") for _ in range(4)]
        server.wait(lambda: len(server.server.models._changing._waiters or ()) == 3)  # for the first one's load
        assert server.get("/health").status == 200
        loads.gate.set()
        assert len({each.result(SECONDS) for each in asked}) == 1
    assert loads.log == ["one"]


def test_keep_alive_is_honoured(served):
    server, loads = served
    asked = {"model": "one", "messages": [{"role": "user", "content": "hello"}], "stream": False}
    options = {"num_predict": 2}
    server.ask("/api/chat", **asked, options=options, keep_alive=600)
    assert loads.loaded == ["one"]
    began = time.monotonic()
    server.ask("/api/chat", **asked, options=options, keep_alive=0.2)
    server.wait(lambda: loads.loaded == [])
    server.wait(lambda: "one" in loads.closed)
    assert loads.log == ["one"] and loads.closed["one"] - began >= 0.2
    server.ask("/api/generate", model="one", keep_alive=-1)
    assert loads.loaded == ["one"]
    assert server.ask("/api/generate", model="one", keep_alive=0)["done_reason"] == "unload"
    assert loads.loaded == []


def test_a_request_without_a_name_and_one_that_does_not_fit(served):
    server, loads = served
    assert server.post("/completion", {"prompt": "a"}).status == 400
    assert server.post(CHAT, {"model": "four", "messages": [{"role": "user", "content": "a"}]}).status == 404
    loads.most = 0
    reply = server.post(CHAT, {"model": "one", "messages": [{"role": "user", "content": "a"}]})
    assert reply.status == 503 and reply.json["error"]["code"] == "no_memory"
