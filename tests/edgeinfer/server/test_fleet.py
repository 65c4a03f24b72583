"""examples/ray/fleet.py on a local Ray cluster: a replica that is lost while answers run, and replicas that come and go
with the load."""

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
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from http_server import free_port, running
from parts import missing

import edgeinfer

FLEET = Path(__file__).parents[3] / "examples" / "ray" / "fleet.py"
CHAT = "/v1/chat/completions"
N_ANSWERS, N_TOKENS = 12, 400
FEW = 8  # answers: as many as a replica takes at once, so that none is passed on to another one
MOST_TRIES = 20
OF_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",  # it ends processes where others have the memory
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",  # else it passes over a replica that is busy for 0.1 s
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else it ends one that needs 15 s to start
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


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
    """The bytes of a stream without its id, its time, what was in a cache, and the pings of a wait."""
    assert len(set(re.findall(rb'"id":"([\w-]+)"', data))) == 1
    return re.sub(rb'"id":"[\w-]+"|"created":\d+|"cached_tokens":\d+|: ping\n\n', b"", data)


@contextmanager
def fleet(model, folder, options):
    """(port, process) of a fleet, which is ended after the block with all its processes."""
    if importlib.util.find_spec("ray") is None:
        missing("ray", "Ray is not installed: pip install -r examples/ray/requirements.txt")
    port, log = free_port(), folder / "log"
    arguments = [*options.split(), "--threads", "1", "--draft", "none", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EDGEINFER_", "RAY_"))}
    with log.open("wb") as to:
        process = subprocess.Popen(
            [sys.executable, str(FLEET), str(model), *arguments], stdout=to, stderr=to, env=environment | OF_RAY
        )
    try:
        until = time.monotonic() + 200
        while b"listening on" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-5000:]
            time.sleep(0.2)
        yield port, psutil.Process(process.pid)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, 10)


def replicas_of(process):
    """The processes of a fleet that are replicas."""
    found = set()
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            if "ServeReplica:fleet:Replica" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def on_their_way(port, bodies, wait):
    """Clients, and those of which something came before all had ended.

    Of these, at least two are answered by one replica, and one by another, or there are none.
    """
    clients = [Client(port, body) for body in bodies]
    for client in clients:
        client.start()
    found = []

    def is_so():
        found[:] = [client for client in clients if client.data and not client.is_over]
        n_of = Counter(client.replica for client in found)
        return (len(n_of) > 1 and max(n_of.values()) > 1) or all(client.is_over for client in clients)

    wait(is_so, 100)
    return clients, found


def test_answers_of_a_lost_replica_end_with_the_same_bytes(model, tmp_path):
    with (
        fleet(model, tmp_path, "--replicas 3") as (port, process),
        edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine,
        running(engine) as alone,
    ):
        stop_ids, replicas = sorted(engine.tokenizer.stop_ids), replicas_of(process)
        for number in range(0, MOST_TRIES * FEW, FEW):
            bodies = [asked(number + each, stop_ids) for each in range(FEW)]
            clients, found = on_their_way(port, bodies, alone.wait)
            if found:
                break
        assert found, "no answers of two replicas were on their way at once"
        ((lost, n_lost),) = Counter(client.replica for client in found).most_common(1)
        os.kill(lost, signal.SIGKILL)
        assert n_lost > 1
        for client, body in zip(clients, bodies, strict=True):
            client.join(120)
            whole = alone.post(CHAT, body)
            assert (client.status, whole.status, client.is_over) == (200, 200, True)
            assert plain(client.data) == plain(whole.body)
            assert b"data: [DONE]" in client.data
        stays = next(client for client in found if client.replica != lost)
        same = Client(port, stays.body | {"max_tokens": 2})
        same.run()
        # A consistent hash: the others keep their conversations, but for those of the one that comes for the lost one.
        assert same.replica == stays.replica or same.replica not in replicas


def test_replicas_come_and_go_with_the_load(model, tmp_path):
    with (
        fleet(model, tmp_path, "--replicas 1 --most 2 --grow 1 --shrink 2") as (port, process),
        edgeinfer.load(model, backend="native", parallel=4, draft="none") as engine,
        running(engine) as alone,
    ):
        bodies = [asked(number, sorted(engine.tokenizer.stop_ids)) for number in range(N_ANSWERS)]
        first, is_over, answers = replicas_of(process), threading.Event(), []
        assert len(first) == 1

        def ask(body):
            while not is_over.is_set():
                client = Client(port, body)
                client.run()
                answers.append(client)

        users = [threading.Thread(target=ask, args=(body,), daemon=True) for body in bodies]
        for user in users:
            user.start()
        alone.wait(lambda: len({client.replica for client in answers}) == 2, 120)
        is_over.set()
        for user in users:
            user.join(60)
        assert first < {client.replica for client in answers}
        alone.wait(lambda: len(replicas_of(process)) == 1, 120)
        answers.append(Client(port, bodies[0]))  # whatever replica was left
        answers[-1].run()
        whole = {json.dumps(body): plain(alone.post(CHAT, body).body) for body in bodies}
        assert all(client.status == 200 and plain(client.data) == whole[json.dumps(client.body)] for client in answers)
