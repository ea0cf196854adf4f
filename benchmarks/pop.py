"""RocketMQ's POP: 32 messages of 128 bytes a request, each acknowledged by a request of its own, over and over.

Eight consumers of one group do so side by side, a connection each; the acknowledgements of a pop leave in one write.

Not measured: the network (loopback), real clients (their own work is many times the wire's), long polls, redelivery,
messages that must be read from the disk. The load generator is threads of one Python process on the same two cores, so
the rate is a lower bound; the server's CPU is what compares.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from benchmarks.harness import TOPIC, messages, serving
from benchmarks.report import Report
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Splitter, decode, encode
from timeball.edges.remoting.codec.records import CheckPoint

QUEUES, CONSUMERS, ROWS = 8, 8, 32
PRELOADED, PRELOADED_SMALL = 400_000, 100_000
SECONDS, SECONDS_SMALL = 6.0, 0.5
RATE_BAR = 11_600.0  # that of the two engines before decision 0032, on two quiet cores
GROUP = "bench"
BOUND_S = 60.0


class Consumer(threading.Thread):
    """Pops and acknowledges until it is told to stop."""

    def __init__(self, address: str, is_over: Callable[[], bool]) -> None:
        super().__init__()
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=BOUND_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter, self._is_over = Splitter(), is_over
        self.acked = self.failures = 0

    def run(self) -> None:
        """See threading.Thread."""
        while not self._is_over():
            (popped,) = self._ask([_pop()])
            if popped.code != ResponseCode.SUCCESS:
                self.failures += 1
                continue
            answers = self._ask([_ack(point) for point in points(popped.ext)])
            bad = sum(answer.code != ResponseCode.SUCCESS for answer in answers)
            self.failures += bad
            self.acked += len(answers) - bad
        self._socket.close()

    def _ask(self, requests: list[bytes]) -> list[Command]:
        self._socket.sendall(b"".join(requests))
        answers: list[Command] = []
        while len(answers) < len(requests):
            data = self._socket.recv(512 * 1024)
            if not data:
                raise RuntimeError("the broker has closed a connection under load")
            answers += map(decode, self._splitter.feed(data))
        return answers


def points(ext: dict[str, str]) -> list[CheckPoint]:
    """Return the check points that RocketMQ's client makes of a pop's header."""
    firsts = dict(part.rsplit(" ", 1) for part in ext["startOffsetInfo"].split(";"))
    found = []
    for part in ext["msgOffsetInfo"].split(";"):
        queue, offsets = part.rsplit(" ", 1)
        retry, number = queue.split()
        found += [
            CheckPoint(
                int(firsts[queue]), int(ext["popTime"]), int(ext["invisibleTime"]), int(ext["reviveQid"]), retry,
                "timeball", int(number), int(offset),
            )
            for offset in offsets.split(",")
        ]  # fmt: skip
    return found


def _pop() -> bytes:
    return _request(
        RequestCode.POP_MESSAGE, queueId=-1, maxMsgNums=ROWS, pollTime=0, invisibleTime=60_000, bornTime=0, initMode=0
    )  # fmt: skip


def _ack(point: CheckPoint) -> bytes:
    return _request(
        RequestCode.ACK_MESSAGE, queueId=point.queue_id, offset=point.offset, extraInfo=point.encode()
    )


def _request(code: int, **fields: object) -> bytes:
    ext = {"consumerGroup": GROUP, "topic": TOPIC, **{name: str(value) for name, value in fields.items()}}
    return encode(Command(code=code, opaque=1, ext=ext, version=409))


def run(small: bool = False) -> Report:
    """Measure; rates in messages a second, CPU in microseconds a message."""
    report = Report("pop", small)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        ball.send_many(messages(PRELOADED_SMALL if small else PRELOADED))
        over = threading.Event()
        consumers = [Consumer(server.remoting, over.is_set) for _ in range(CONSUMERS)]
        for consumer in consumers:
            consumer.start()
        seconds = SECONDS_SMALL if small else SECONDS
        time.sleep(seconds / 4)  # the first calls pay for code paths never run before
        label = f"pop {ROWS} and ack each, {CONSUMERS}x1"
        with server.spending(label) as spent:
            begun, acked = time.perf_counter(), sum(each.acked for each in consumers)
            own_s = time.process_time()
            time.sleep(seconds)
            rows = sum(each.acked for each in consumers) - acked
            passed_s, own_s = time.perf_counter() - begun, time.process_time() - own_s
        over.set()
        for consumer in consumers:
            consumer.join(BOUND_S)
        report.add(f"{label}: rate", rows / passed_s, "msg/s", RATE_BAR)
        report.add_cost(spent, rows)
        report.add(f"{label}: load's own CPU", own_s / rows * 1e6, "us/msg")
        report.add(f"{label}: failed, missing", sum(each.failures for each in consumers), "requests")
    return report
