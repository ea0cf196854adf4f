"""gRPC: one message a SendMessage, and 32 messages a ReceiveMessage with one AckMessage for them.

RocketMQ answers in its proxy in local mode, which holds the broker. The load generator is benchmarks/grpc_load.py. A
consumer first opens its telemetry stream and says its settings, as each client does. A receive that brings nothing
while there are messages counts as failed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import numpy as np

from benchmarks.grpc import CLIENT, GROUP, RECEIVE_SHAPE, RING, Programs, consumer, send_call, sender
from benchmarks.grpc_load import run as load
from benchmarks.harness import TOPIC, quantiles
from benchmarks.versus.peers import GRPC, REMOTING, Peer
from benchmarks.versus.sending import BATCH_ROWS, BATCH_SHAPE, batches
from benchmarks.versus.wire import Link
from benchmarks.versus.work import Bench, Row, Sample, Work
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.edges.grpc.dispatch import SERVICE_NAME

SEND_SHAPE = (64, 1)
LOADED, LOADED_SMALL = 160_000, 6_400  # more than one measurement receives
BOUND_S = 60.0


def send(peer: Peer, bench: Bench) -> list[Sample]:
    """Send, with 64 calls in flight."""
    ring = [send_call(peer.addresses[GRPC], number, 1) for number in range(RING)]
    return [_measured(peer, bench, partial(sender, ring, 1), SEND_SHAPE)]


def receive(peer: Peer, bench: Bench) -> list[Sample]:
    """Receive and acknowledge messages that have been sent before."""
    address, count = peer.addresses[REMOTING], LOADED_SMALL if bench.small else LOADED
    with Link(address) as link:
        link.create_group(GROUP)
    with _settled(peer.addresses[GRPC]):
        bench.load.run(address, batches(), BATCH_SHAPE, BOUND_S, limit=count // BATCH_ROWS, rows=BATCH_ROWS)
        return [_measured(peer, bench, partial(consumer, peer.addresses[GRPC]), RECEIVE_SHAPE)]


def _measured(peer: Peer, bench: Bench, programs: Programs, shape: tuple[int, int]) -> Sample:
    address = peer.addresses[GRPC]
    load(address, programs, *shape, bench.seconds * 2)  # the first calls pay for code paths never run before
    cpu_s = peer.cpu_s()
    outcome = load(address, programs, *shape, bench.seconds)
    used_s = peer.cpu_s() - cpu_s
    if not outcome.messages:
        raise RuntimeError(f"{peer.name}: not one call succeeded, {outcome.failures} failed")
    p50, p99, _ = quantiles(np.array(outcome.latency_ms))
    return Sample(
        outcome.messages / outcome.seconds, p50, p99, used_s / outcome.messages * 1e6, outcome.failures
    )


@contextmanager
def _settled(address: str) -> Iterator[None]:
    """A telemetry stream that stays open: the server knows then what the client consumes."""
    wanted: queue.SimpleQueue[s.TelemetryCommand | None] = queue.SimpleQueue()
    settings = d.Settings(client_type=d.ClientType.SIMPLE_CONSUMER)
    settings.request_timeout.seconds = 3
    settings.subscription.group.name = GROUP
    settings.subscription.long_polling_timeout.seconds = 1
    entry = settings.subscription.subscriptions.add()
    entry.topic.name = TOPIC
    entry.expression.type, entry.expression.expression = d.FilterType.TAG, "*"
    wanted.put(s.TelemetryCommand(settings=settings))
    with grpc.insecure_channel(address) as channel:
        open_stream: Callable[..., Iterator[s.TelemetryCommand]] = channel.stream_stream(
            f"/{SERVICE_NAME}/Telemetry",
            request_serializer=s.TelemetryCommand.SerializeToString,
            response_deserializer=s.TelemetryCommand.FromString,
        )
        answers = open_stream(iter(wanted.get, None), metadata=list(CLIENT.items()), timeout=BOUND_S)
        if not next(answers).HasField("settings"):
            raise RuntimeError(f"{address} does not answer a client's settings")
        yield
        wanted.put(None)


WORK = [
    Work("grpc", (Row(f"gRPC send, {SEND_SHAPE[0]}x{SEND_SHAPE[1]}", "msg/s"),), send, GRPC),
    Work(
        "grpc",
        (Row(f"gRPC receive of 32 and ack, {RECEIVE_SHAPE[0]}x{RECEIVE_SHAPE[1]}", "msg/s"),),
        receive,
        GRPC,
    ),
]
