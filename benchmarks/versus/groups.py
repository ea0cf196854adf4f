"""One message for many consumer groups that wait for it, each over a connection of its own.

The message is visible at once. Noted is how long after the send each group has its answer. The groups have received a
message before, so none of them begins with this one.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import quantiles
from benchmarks.versus.delayed_queues import TOPIC, HttpQueue
from benchmarks.versus.peers import HTTP, REMOTING, Peer
from benchmarks.versus.wire import Link
from benchmarks.versus.work import Bench, Sample
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode
from timeball.edges.remoting.codec.frame import Command, encode

GROUPS, GROUPS_SMALL = 1_000, 20
ROUNDS, ROUNDS_SMALL = 5, 1
REST_S = 1.0  # until all wait: nothing says when a request is held
BOUND_S = 60.0
WAIT_MS = 30_000


def _receive(number: int, _: int) -> bytes:
    path = f"/v1/topics/{TOPIC}/receive?group=group-{number}&max=1&wait={WAIT_MS}ms"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()


def _stream(number: int, message: int) -> bytes:
    if message:
        return b""  # the stream is open
    path = f"/v1/topics/{TOPIC}/stream?group=group-{number}&credit=256"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()


def _pull(number: int, message: int) -> bytes:
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    fields = {
        "consumerGroup": f"group-{number}", "topic": TOPIC, "queueId": 0, "queueOffset": message, "maxMsgNums": 1,
        "sysFlag": int(flags), "commitOffset": 0, "suspendTimeoutMillis": WAIT_MS, "subscription": "*",
        "subVersion": 0, "expressionType": "TAG",
    }  # fmt: skip
    ext = {name: str(value) for name, value in fields.items()}
    return encode(Command(code=RequestCode.PULL_MESSAGE, opaque=1, ext=ext, version=409))


REQUESTS: dict[str, Callable[[int, int], bytes]] = {
    "http": _receive,
    "http stream": _stream,
    "remoting": _pull,
}
BODY = b"the message that all groups wait for, number %d."


def one_for_all(client: str, peer: Peer, bench: Bench) -> Sample:
    """Measure the time until the last group has the message, in ms: the median of some messages."""
    address = peer.addresses[REMOTING if client == "remoting" else HTTP]
    groups, rounds = (GROUPS_SMALL, ROUNDS_SMALL) if bench.small else (GROUPS, ROUNDS)
    with Link(peer.addresses[REMOTING]) as link:
        link.create_topic(TOPIC, 1)
    host, _, port = address.rpartition(":")
    sender, selector = HttpQueue(peer.addresses[HTTP]), selectors.DefaultSelector()
    sockets = [socket.create_connection((host, int(port)), timeout=BOUND_S) for _ in range(groups)]
    try:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        lasts_ms, answers_ms, cpu_s, failures = [], [], 0.0, 0
        for message in range(1 + rounds):
            for number, each in enumerate(sockets):
                each.sendall(REQUESTS[client](number, message))
            time.sleep(REST_S)
            used_s, begin_s = peer.cpu_s(), time.perf_counter()
            body = BODY % message
            sender.send_now(body)
            taken_ms, wrong = _answers(selector, groups, body, begin_s)
            if message:  # the first creates the groups
                cpu_s += peer.cpu_s() - used_s
                lasts_ms.append(max(taken_ms))
                answers_ms += taken_ms
                failures += wrong
    finally:
        selector.close()
        sender.close()
        for each in sockets:
            each.close()
    p50, p99, _ = quantiles(np.array(answers_ms))
    return Sample(float(np.median(lasts_ms)), p50, p99, cpu_s / len(answers_ms) * 1e6, failures)


def _answers(
    selector: selectors.BaseSelector, groups: int, body: bytes, begin_s: float
) -> tuple[list[float], int]:
    """Wait for one answer on each connection: after how many ms each came, and how many lack the message."""
    taken_ms: list[float] = []
    answers: dict[int, bytearray] = {}
    give_up = time.monotonic() + BOUND_S
    while len(taken_ms) < groups:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{groups - len(taken_ms)} groups have no answer")
        for key, _ in selector.select(1.0):
            data = answers.setdefault(key.fd, bytearray())
            before = body in data
            data += key.fileobj.recv(65_536)  # type: ignore[union-attr]
            if body in data and not before:
                taken_ms.append((time.perf_counter() - begin_s) * 1e3)
    return taken_ms, sum(bytes(data).count(body) != 1 for data in answers.values())
