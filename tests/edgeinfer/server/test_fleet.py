"""examples/ray/fleet.py: three replicas on a local Ray cluster, one of which is lost while answers run."""

import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from http_server import free_port, running
from parts import missing

import edgeinfer

FLEET = Path(__file__).parents[3] / "examples" / "ray" / "fleet.py"
CHAT = "/v1/chat/completions"
N_ANSWERS, N_TOKENS = 12, 400


def asked(number, stop_ids):
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"hello {number}"}],
        "max_tokens": N_TOKENS,
        "temperature": 1.2,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {str(id): -100 for id in stop_ids},
    }


class Client(threading.Thread):
    """Reads one answer.  replica: the process that began it."""

    def __init__(self, port, body):
        super().__init__(daemon=True)
        self.port, self.body = port, body
        self.data, self.status, self.replica, self.is_over = b"", None, 0, False

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", CHAT, json.dumps(self.body))
        reply = connection.getresponse()
        self.status, self.replica = reply.status, int(reply.getheader("x-edgeinfer-replica", "0"))
        while part := reply.read1():
            self.data += part
        self.is_over = True


def plain(data):
    """The bytes of a stream without its id, its time and what was in a cache."""
    assert len(set(re.findall(rb'"id":"([\w-]+)"', data))) == 1
    return re.sub(rb'"id":"[\w-]+"|"created":\d+|"cached_tokens":\d+', b"", data)


@pytest.fixture
def fleet(model, tmp_path):
    """The port of a fleet, which is ended after the test with all its processes."""
    if importlib.util.find_spec("ray") is None:
        missing("ray", "Ray is not installed: pip install -r examples/ray/requirements.txt")
    port, log = free_port(), tmp_path / "log"
    options = f"--replicas 3 --threads 1 --draft none --port {port}".split()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEINFER_", "RAY_"))}
    with log.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, str(FLEET), str(model), *options], stdout=to, stderr=to, env=environment
        )
    try:
        until = time.monotonic() + 120
        while b"listening on" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-5000:]
            time.sleep(0.2)
        yield port
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, 10)


def test_answers_of_a_lost_replica_end_with_the_same_bytes(model, fleet):
    with edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine, running(engine) as alone:
        stop_ids = sorted(engine.tokenizer.stop_ids)
        bodies = [asked(number, stop_ids) for number in range(N_ANSWERS)]
        clients = [Client(fleet, body) for body in bodies]
        for client in clients:
            client.start()
        alone.wait(lambda: all(client.data for client in clients), 60)
        unfinished = [client.replica for client in clients if not client.is_over]
        lost = max(set(unfinished), key=unfinished.count)
        os.kill(lost, signal.SIGKILL)
        assert unfinished.count(lost) >= 2 and len({client.replica for client in clients}) > 1
        for client in clients:
            client.join(120)
        for client, body in zip(clients, bodies, strict=True):
            whole = alone.post(CHAT, body)
            assert (client.status, whole.status, client.is_over) == (200, 200, True)
            assert plain(client.data) == plain(whole.body)
            assert b"data: [DONE]" in client.data
        stays = next(client for client in clients if client.replica != lost)
        same = Client(fleet, stays.body | {"max_tokens": 2})
        same.run()
        assert same.replica == stays.replica  # a consistent hash: others keep their conversations
