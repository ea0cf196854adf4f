"""HTTP: sends of 128-byte messages in JSON, NDJSON and Arrow, and messages received and acknowledged; fdatasync each.

C x 1: C connections that are kept alive, each with one request under way. A request carries one message with a delay of
an hour, 100 as NDJSON, or 10,000 as an Arrow stream. A consumer receives 32 messages as a group and acknowledges them
in one request, over and over; receipts are scheduled messages in the log. The same sends over gRPC and Flight run
beside, on the same broker: one message a call, and 10,000 a batch with four batches on their way.

Not measured: the network (loopback), other disks, TLS, new connections, long polls, real clients. The load generator
runs on the same two cores; its CPU is shown beside the server's and is not part of it.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from benchmarks.grpc import RING, Programs, send_call, sender
from benchmarks.grpc_load import Link, Outcome, Program, Request, Tally
from benchmarks.grpc_load import run as load
from benchmarks.harness import BODY_BYTES, TOPIC, Server, messages, now_ms, quantiles, serving
from benchmarks.report import Report
from benchmarks.stream import drive

QUEUES = 8
SECONDS, SECONDS_SMALL = 4.0, 0.3
RECEIVE_ROWS = 32
PRELOADED, PRELOADED_SMALL = 200_000, 30_000  # more than is received in that time
READ_BYTES, BOUND_S = 512 * 1024, 60.0
DELAY_MS = 3_600_000
# What a machine of two cores did beside other work.
BARS = {"send 1 a request, 64x1": 5_000.0, "send Arrow 10,000 a request, 4x1": 500_000.0}
JSON = "application/json"
SENDS = f"/v1/topics/{TOPIC}/messages"
RECEIVES = f"/v1/topics/{TOPIC}/receive"


class HttpLink(Link):
    """One connection with one request under way; answers carry their length."""

    def __init__(self, address: str, programs: list[Program]) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (self._program,) = programs
        self._answer, self.open, self.done, self.failures, self.sent_ns = b"", 1, 0, 0, 0
        self._ask(next(self._program))

    def receive(self, *, over: bool) -> int:
        """Take in what has come; return how many answers that makes."""
        new = self.socket.recv(READ_BYTES)
        if not new:
            raise RuntimeError("the broker has closed a connection under load")
        self._answer += new
        head, _, body = self._answer.partition(b"\r\n\r\n")
        if not _ or len(body) < length_of(head):
            return 0
        self._answer, self.done, self.open = b"", self.done + 1, 0
        request = self._program.send(head[9:12] + body)
        if not over:
            self.open = 1
            self._ask(request)
        return 1

    def _ask(self, request: Request) -> None:
        self.socket.sendall(request.headers + request.data)
        self.sent_ns = time.perf_counter_ns()


def length_of(head: bytes) -> int:
    """Return the length of the body behind the head of an answer."""
    at = head.lower().index(b"content-length:") + 15
    return int(head[at:].split(b"\r\n", 1)[0])


def run(small: bool = False) -> Report:
    """Measure; rates in messages a second, CPU in microseconds a message."""
    report = Report("http", small)
    cases = [
        ("send 1 a request", 64, 1, JSON, _json, 512),
        ("send 1 a request", 1, 1, JSON, _json, 512),
        ("send NDJSON 100 a request", 8, 100, "application/x-ndjson", _json, 64),
        ("send Arrow 10,000 a request", 4, 10_000, "application/vnd.apache.arrow.stream", _arrow, 4),
    ]
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        # Before millions of scheduled messages wait, which the broker moves to its table in the background.
        calls = [send_call(server.grpc, number, 1) for number in range(RING)]
        _case(report, server, "gRPC, send 1 a call, 64x1", partial(sender, calls, 1), 64, small, server.grpc)
        for name, connections, rows, kind, encode, count in cases:
            ring = [_request("POST", SENDS, kind, encode(rows, at)) for at in range(count)]
            program = partial(_sender, ring, rows)
            _case(report, server, f"{name}, {connections}x1", program, connections, small)
        _flight(report, server, small)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        ball.send_many(messages(PRELOADED_SMALL if small else PRELOADED))
        _case(report, server, f"receive {RECEIVE_ROWS} and ack, 8x1", _consumer, 8, small)
    return report


def _case(
    report: Report, server: Server, label: str, program: Programs, connections: int, small: bool,
    grpc: str | None = None,
) -> None:  # fmt: skip
    seconds = SECONDS_SMALL if small else SECONDS
    run_load: Callable[[float], Outcome] = partial(load, server.http, program, connections, 1, dial=HttpLink)
    if grpc is not None:
        run_load = partial(load, grpc, program, connections, 1)
    run_load(seconds / 4)
    with server.spending(label) as spent:
        outcome = run_load(seconds)
    assert outcome.messages, f"{label}: nothing went through"
    report.add(f"{label}: rate", outcome.messages / outcome.seconds, "msg/s", BARS.get(label))
    report.add_cost(spent, outcome.messages)
    report.add(f"{label}: load's own CPU", outcome.cpu_s / outcome.messages * 1e6, "us/msg")
    report.add(f"{label}: failed, missing", outcome.failures, "requests")
    if outcome.latency_ms:
        p50, p99, _ = quantiles(np.array(outcome.latency_ms))
        report.add(f"{label}: answer p50", p50, "ms")
        report.add(f"{label}: answer p99", p99, "ms")


def _flight(report: Report, server: Server, small: bool) -> None:
    label, rows, count = "Flight, 10,000 a batch, 4 on their way", 10_000, 4 if small else 200
    due_ms = np.full(rows, now_ms() + DELAY_MS, dtype=np.int64)
    batches = [messages(rows, due_ms, seed=at) for at in range(4)] * (count // 4)
    drive(server.endpoint, batches[:4], 4)
    with server.spending(label) as spent:
        latency_ms, seconds = drive(server.endpoint, batches, 4)
    report.add(f"{label}: rate", rows * count / seconds, "msg/s")
    report.add_cost(spent, rows * count)
    report.add(f"{label}: answer p99", quantiles(latency_ms)[1], "ms")


def _sender(ring: list[Request], rows: int, number: int, tally: Tally) -> Program:
    at = number * 31
    while True:
        answer = yield ring[at % len(ring)]
        at += 1
        good = answer[:3] == b"201"
        tally.messages += rows if good else 0
        tally.failures += not good


def _consumer(_: int, tally: Tally) -> Program:
    receive = _request("POST", f"{RECEIVES}?group=bench&max={RECEIVE_ROWS}&wait=1s", JSON, b"")
    while True:
        answer = yield receive
        receipts = [one["receipt"] for one in json.loads(answer[3:])["messages"]]
        if not receipts:
            tally.failures += 1
            continue
        body = json.dumps({"receipts": receipts}).encode()
        answer = yield _request("POST", f"/v1/topics/{TOPIC}/ack?group=bench", JSON, body)
        good = answer.count(b'"valid":true')
        tally.messages += good
        tally.failures += good != len(receipts)


def _request(method: str, path: str, kind: str, body: bytes) -> Request:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-type: {kind}"]
    if body:
        lines.append(f"content-length: {len(body)}")
    return Request("\r\n".join([*lines, "", ""]).encode(), body)


def _json(rows: int, _: int) -> bytes:
    lines = (
        json.dumps({"body": base64.b64encode(os.urandom(BODY_BYTES * 3 // 4)).decode(), "after": "1h"})
        for _ in range(rows)
    )
    return "\n".join(lines).encode()


def _arrow(rows: int, seed: int) -> bytes:
    batch = messages(rows, seed=seed).drop_columns(["topic"])
    batch = batch.append_column("delay_ms", pa.repeat(pa.scalar(DELAY_MS, pa.int64()), rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
