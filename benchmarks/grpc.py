"""gRPC: unary sends of 128-byte messages, and messages received and acknowledged; fdatasync before every answer.

C x W: C connections with W calls in flight each. A send carries one message or 32. A consumer asks for 32 messages with
ReceiveMessage and acknowledges what it got in one AckMessage, over and over; receipts are scheduled messages in the
log, so to receive a message and to acknowledge it is a row each.

Not measured: the network (loopback), other disks, TLS, real clients (their own work is many times the wire's, so one
of them sends some hundred messages a second with one call in flight), producers beside consumers, long polls. The load
generator runs on the same two cores; its CPU is shown beside the server's and is not part of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.grpc_load import Program, Request, Tally, header_block, messages_of, request
from benchmarks.grpc_load import run as load
from benchmarks.harness import BODY_BYTES, TOPIC, Server, messages, quantiles, serving
from benchmarks.report import Report
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.edges.grpc.dispatch import SERVICE_NAME

QUEUES = 8
RING = 512
SECONDS, SECONDS_SMALL = 4.0, 0.3
BORN_S = 1_761_000_000  # any instant; producers put theirs in
# (connections, in flight), messages a call, and twice what RocketMQ 5.5.0's proxy does on a machine of two cores.
SEND_CASES: list[tuple[tuple[int, int], int, float | None]] = [
    ((8, 8), 1, 7_000.0),
    ((8, 8), 32, None),
    ((64, 1), 1, None),
    ((1, 1), 1, None),
]
RECEIVE_ROWS = 32
RECEIVE_SHAPE = (8, 1)
PRELOADED, PRELOADED_SMALL = 200_000, 50_000  # more than is received in that time
OK = b"\x08\xa0\x9c\x01"  # a status with code 20000, as its first field
GROUP = "bench"
CLIENT = {  # who calls, as a Java client says it
    "x-mq-client-id": f"bench@{os.getpid()}@0@1", "x-mq-language": "JAVA", "x-mq-protocol": "v2",
    "x-mq-client-version": "5.2.0", "x-mq-request-id": "a" * 36, "x-mq-date-time": "20260101T000000Z",
}  # fmt: skip


Programs = Callable[[int, Tally], Program]


def run(small: bool = False) -> Report:
    """Measure; rates in messages a second, CPU in microseconds a message or a call."""
    report = Report("grpc", small)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        for shape, rows, bar in SEND_CASES:
            ring = [send_call(server.grpc, number, rows) for number in range(RING)]
            label = f"send {rows} a call, {shape[0]}x{shape[1]}"
            _case(report, server, label, partial(sender, ring, rows), shape, small, bar)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        ball.send_many(messages(PRELOADED_SMALL if small else PRELOADED))
        label = f"receive {RECEIVE_ROWS} and ack, {RECEIVE_SHAPE[0]}x{RECEIVE_SHAPE[1]}"
        _case(report, server, label, partial(consumer, server.grpc), RECEIVE_SHAPE, small)
    return report


def _case(
    report: Report, server: Server, label: str, programs: Programs, shape: tuple[int, int], small: bool,
    bar: float | None = None,
) -> None:  # fmt: skip
    seconds = SECONDS_SMALL if small else SECONDS
    load(server.grpc, programs, *shape, seconds / 4)  # the first calls pay for code paths never run before
    with server.spending(label) as spent:
        outcome = load(server.grpc, programs, *shape, seconds)
    assert outcome.messages and outcome.calls, f"{label}: nothing went through"
    report.add(f"{label}: rate", outcome.messages / outcome.seconds, "msg/s", bar)
    report.add_cost(spent, outcome.messages)
    report.add(f"{label}: server CPU a call", spent.cpu_s / outcome.calls * 1e6, "us/call")
    report.add(f"{label}: load's own CPU", outcome.cpu_s / outcome.messages * 1e6, "us/msg")
    report.add(f"{label}: failed, missing", outcome.failures, "calls")
    if outcome.latency_ms:
        p50, p99, _ = quantiles(np.array(outcome.latency_ms))
        report.add(f"{label}: answer p50", p50, "ms")
        report.add(f"{label}: answer p99", p99, "ms")


def sender(ring: list[Request], rows: int, number: int, tally: Tally) -> Program:
    """A producer: the next request of the ring when the last one has been answered."""
    at = number * 31
    while True:
        body = yield ring[at % RING]
        at += 1
        good = body[7:11] == OK
        tally.messages += rows if good else 0
        tally.failures += not good


def consumer(address: str, _: int, tally: Tally) -> Program:
    """A consumer that receives messages and acknowledges them, over and over."""
    group, topic = d.Resource(name=GROUP), d.Resource(name=TOPIC)
    asking = s.ReceiveMessageRequest(
        group=group, message_queue=d.MessageQueue(topic=topic, id=-1), batch_size=RECEIVE_ROWS,
        filter_expression=d.FilterExpression(type=d.FilterType.TAG, expression="*"),
    )  # fmt: skip
    asking.invisible_duration.seconds = 60
    asking.long_polling_timeout.seconds = 1
    receive = request(_headers(address, "ReceiveMessage"), asking.SerializeToString())
    headers = _headers(address, "AckMessage")
    while True:
        found = [s.ReceiveMessageResponse.FromString(each) for each in messages_of((yield receive))]
        entries = [
            s.AckMessageEntry(
                message_id=each.message.system_properties.message_id,
                receipt_handle=each.message.system_properties.receipt_handle,
            )
            for each in found
            if each.HasField("message")
        ]
        if not entries:
            tally.failures += 1  # there was more to receive, or it was refused
            continue
        acks = s.AckMessageRequest(group=group, topic=topic, entries=entries)
        answer = yield request(headers, acks.SerializeToString())
        good = answer[7:11] == OK
        tally.messages += len(entries) if good else 0
        tally.failures += not good


def send_call(address: str, number: int, rows: int) -> Request:
    """As a Java producer sends it."""
    found = s.SendMessageRequest()
    for _ in range(rows):
        message = found.messages.add()
        message.topic.name = TOPIC
        message.body = os.urandom(BODY_BYTES)
        system = message.system_properties
        system.tag, system.message_id = "TagA", f"01{os.urandom(16).hex().upper()}"
        system.message_type, system.body_encoding = d.MessageType.NORMAL, d.Encoding.IDENTITY
        system.born_timestamp.seconds, system.born_host = BORN_S, "client.example"
        system.queue_id = number % QUEUES
    return request(_headers(address, "SendMessage"), found.SerializeToString())


def _headers(address: str, call: str) -> bytes:
    return header_block(address, SERVICE_NAME, call, **{"grpc-timeout": "30S", **CLIENT})
