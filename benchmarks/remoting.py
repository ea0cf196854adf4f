"""RocketMQ's wire: sends, batches and pulls of 128-byte messages, fdatasync before every acknowledgement.

C x W: C connections with W requests in flight each; JSON and RocketMQ's binary headers. Batches hold 32 and 128
messages, 8 x 32 of them in flight; pulls ask for 32 and 256 messages of one of 8 queues, 8 x 4 in flight.

"First read": each message is pulled once and none was read before, as by the only group of a topic. "Second read":
the same messages round and round, as by further groups; the broker has them encoded then.

Not measured: the network (loopback), other disks, real clients (their own work is many times the wire's), consumers
beside producers, cold reads: what is pulled has just been written and is in memory. The load generator runs on the
same two cores; its CPU is shown beside the server's and is not part of it.
"""

from __future__ import annotations

import os

import numpy as np

from benchmarks.harness import BODY_BYTES, TOPIC, Server, quantiles, serving
from benchmarks.report import Report
from benchmarks.wire_load import Outcome, Ring
from benchmarks.wire_load import run as load
from timeball import Timeball
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Command, encode
from timeball.edges.remoting.codec.records import BatchRecord, encode_batch
from timeball.model.message import encode_properties

QUEUES = 8
RING = 1_024
SECONDS, SECONDS_SMALL = 4.0, 0.2
BORN_MS = "1761000000000"  # any instant; producers put theirs in
SEND_CASES = [(8, 512), (64, 16), (256, 1), (64, 1), (1, 1)]
SEND_BARS = {(8, 512): 200_000.0, (64, 1): 35_000.0}
BATCHES, PULLS = [32, 128], [32, 256]
PULL_BARS = {32: 300_000.0}
PULL_ROWS = 65_536


def run_case(
    report: Report, server: Server, label: str, ring: Ring, shape: tuple[int, int], rows: int, small: bool,
    bar: float | None = None, warm_up: Ring | None = None,
) -> Outcome:  # fmt: skip
    """One load; `rows` messages a request. With a ring of its own for the warm-up, that of the load is sent once."""
    seconds = SECONDS_SMALL if small else SECONDS
    # The first calls pay for code paths never run before.
    load(server.remoting, warm_up or ring, *shape, seconds / 4)
    with server.spending(label) as spent:
        outcome = load(server.remoting, ring, *shape, seconds, once=warm_up is not None)
    messages = outcome.answers * rows
    report.add(f"{label}: rate", messages / outcome.seconds, "msg/s", bar)
    report.add_cost(spent, messages)
    report.add(f"{label}: load's own CPU", outcome.cpu_s / messages * 1e6, "us/msg")
    report.add(f"{label}: failed, missing", outcome.failures, "requests")
    if outcome.latency_ms:
        p50, p99, _ = quantiles(np.array(outcome.latency_ms))
        report.add(f"{label}: ack p50", p50, "ms")
        report.add(f"{label}: ack p99", p99, "ms")
    return outcome


def run(small: bool = False) -> Report:
    """Measure; rates in messages a second, CPU in microseconds a message."""
    report = Report("remoting", small)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        for name, serialisation in (("JSON", JSON), ("binary", BINARY)):
            ring = Ring([send_request(number, serialisation) for number in range(RING)])
            for shape in SEND_CASES:
                label = f"send {name} {shape[0]}x{shape[1]}"
                bar = SEND_BARS.get(shape) if serialisation == JSON else None
                run_case(report, server, label, ring, shape, 1, small, bar)
        for rows in BATCHES:
            ring = Ring([batch_request(number, rows) for number in range(64)])
            run_case(report, server, f"batches of {rows}", ring, (8, 32), rows, small)
        _pulls(report, server, ball, small)
    return report


def _pulls(report: Report, server: Server, ball: Timeball, small: bool) -> None:
    """The newest messages of each queue: once, then over and over; older ones warm up for the first read."""
    held = [queue.max for queue in ball.queues(TOPIC).values()]
    for rows in PULLS:
        span = min(PULL_ROWS // QUEUES, min(held) // 2) // rows * rows
        assert span, "fewer messages have been sent than two pulls ask for"
        newest, older = ([high - back * span for high in held] for back in (1, 2))
        ring = Ring(_pass(newest, span, rows))
        shape = (8, min(4, ring.count // 8))
        if rows == PULLS[0]:
            label = f"pulls of {rows}, first read"
            run_case(report, server, label, ring, shape, rows, small, warm_up=Ring(_pass(older, span, rows)))
        run_case(
            report, server, f"pulls of {rows}, second read", ring, shape, rows, small, PULL_BARS.get(rows)
        )


def _pass(begins: list[int], span: int, rows: int) -> list[bytes]:
    """Pulls of `span` messages of each queue from its begin on, a stretch of each queue in turn."""
    return [
        pull_request(queue, begin + at, rows)
        for at in range(0, span, rows)
        for queue, begin in enumerate(begins)
    ]


def send_request(number: int, serialisation: int, body: bytes = b"", **properties: str) -> bytes:
    """One message as Java's producer sends it, with these properties besides its own; random bytes without a body."""
    fields = _fields(number % QUEUES) | {"i": _properties(**properties)}
    return encode(
        Command(
            code=RequestCode.SEND_MESSAGE_V2, opaque=number + 1, ext=fields, body=body or os.urandom(BODY_BYTES),
            version=409, serialisation=serialisation,
        )
    )  # fmt: skip


def batch_request(number: int, rows: int) -> bytes:
    """A batch as Java's producer sends it."""
    body = encode_batch([BatchRecord(0, os.urandom(BODY_BYTES), _properties()) for _ in range(rows)])
    fields = _fields(number % QUEUES) | {"i": "", "m": "true"}
    return encode(
        Command(code=RequestCode.SEND_BATCH_MESSAGE, opaque=number + 1, ext=fields, body=body, version=409)
    )


def pull_request(queue: int, offset: int, rows: int, opaque: int = 1) -> bytes:
    """A pull that does not wait for messages."""
    fields = {
        "consumerGroup": "bench", "topic": TOPIC, "queueId": queue, "queueOffset": offset, "maxMsgNums": rows,
        "sysFlag": int(PullFlag.SUBSCRIPTION), "commitOffset": 0, "suspendTimeoutMillis": 15_000,
        "subscription": "*", "subVersion": 0, "expressionType": "TAG",
    }  # fmt: skip
    ext = {name: str(value) for name, value in fields.items()}
    return encode(Command(code=RequestCode.PULL_MESSAGE, opaque=opaque, ext=ext, version=409))


def _fields(queue: int) -> dict[str, str]:
    """As Java's producer sends them, in its order."""
    return {
        "a": "producers", "b": TOPIC, "c": "TBW102", "d": str(QUEUES), "e": str(queue), "f": "0", "g": BORN_MS,
        "h": "0", "i": "", "j": "0", "k": "false", "l": "16", "m": "false", "n": "timeball",
    }  # fmt: skip


def _properties(**more: str) -> str:
    own = {"UNIQ_KEY": os.urandom(16).hex().upper(), "WAIT": "true", "TAGS": "TagA"}
    return encode_properties({**own, **more})
