"""Random consumers against a model of leases: one consumer at a time holds a message, and each message ends once.

Each run takes random steps from a seed: receives of simple and of push consumers, all calls with receipt handles,
clients that disconnect before or after they have their messages, time that passes, restarts. The model knows which
handles are valid, and every response must agree with it. At the end, all remaining messages are received and
acknowledged. Then each message has been acknowledged once or is a dead letter.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, consumer_of
from tests.edges.grpc.wire import definition, receive_request

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.edges.grpc.edge import GrpcEdge

STEPS = 120
STEP_MS = 5_000
ATTEMPTS_MAX = 6
POLICY = RetryPolicy(customized_retry_policy=CustomizedRetry([1_000, 2_000, 20_000]))
PAUSE_MS = 20_000  # before each retry: as in RocketMQ, the first retry has the third pause of the list


@dataclass
class Lease:
    """A message that a consumer holds. `due_ms` None: it is renewed while its client is connected."""

    message: definition.Message
    consumer: Consumer
    due_ms: int | None


@dataclass
class Model:
    """The expected state of all messages, by message id."""

    waiting: set[str] = field(default_factory=set)
    in_flight: dict[str, Lease] = field(default_factory=dict)
    stale: list[definition.Message] = field(default_factory=list)  # their handles are not valid any more
    acknowledged: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    delayed: dict[str, int] = field(default_factory=dict)  # message id: time of the next delivery in ms

    def receive(self, message: definition.Message, consumer: Consumer, due_ms: int | None) -> None:
        """Note that a consumer has received a message. Assert that no consumer holds it, and its attempt."""
        key = message.system_properties.message_id
        assert key in self.waiting, f"{key} is received, although it was acknowledged or a consumer holds it"
        self.waiting.discard(key)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        assert message.system_properties.delivery_attempt == self.attempts[key]
        self.in_flight[key] = Lease(message, consumer, due_ms)

    def come_back(self, key: str, *, counts: bool = True, due_ms: int | None = None) -> None:
        """End a lease without an acknowledgement: the message is received again, with `due_ms` only from then on."""
        self.stale.append(self.in_flight.pop(key).message)
        if not counts:
            self.attempts[key] -= 1
        if self.attempts[key] >= ATTEMPTS_MAX:
            self.dead.add(key)
        elif due_ms is not None:
            self.delayed[key] = due_ms
        else:
            self.waiting.add(key)

    def pass_time(self, now_ms: int) -> None:
        """Let the delayed messages that are due now wait for a consumer."""
        for key in [key for key, due_ms in self.delayed.items() if due_ms <= now_ms]:
            del self.delayed[key]
            self.waiting.add(key)


class GroupRun:
    """One run of a consumer group with its clients."""

    def __init__(self, world: World, consumer: Consumer, seed: int) -> None:
        self.world, self.random, self.model = world, random.Random(seed), Model()
        self.consumers = [Consumer(world, consumer.edge, f"client-{n}") for n in range(3)]
        self.edges = [consumer.edge]
        self.count = 0
        # For messages whose invisible time was changed: whether their delivery then counts as no attempt.
        self.suspended: dict[str, bool] = {}

    async def begin(self) -> None:
        self.world.broker.tables.groups.update(
            SubscriptionGroup(GROUP, retry_max_times=ATTEMPTS_MAX - 1, group_retry_policy=POLICY)
        )
        for consumer in self.consumers:
            consumer.connect()
        await self.send()

    async def send(self) -> None:
        keys = [f"id-{self.count + n}" for n in range(self.random.randrange(1, 8))]
        self.count += len(keys)
        self.model.waiting.update(keys)
        await self.consumers[0].send(len(keys), unique_key=keys)

    async def receive(self) -> None:
        consumer, rows = self.random.choice(self.consumers), self.random.randrange(1, 5)
        pushes = self.random.random() < 0.5
        invisible_ms = None if pushes else self.random.choice([1_000, 7_000, 60_000])
        messages = await consumer.receive(batch_size=rows, auto_renew=pushes, invisible_ms=invisible_ms)
        assert len(messages) == min(rows, len(self.model.waiting)), "all available messages are received"
        due_ms = None if invisible_ms is None else self.world.clock.wall + invisible_ms
        for message in messages:
            self.model.receive(message, consumer, due_ms)

    async def receive_unread(self) -> None:
        """Receive messages with a client that disconnects before it has read all. They stay available."""
        consumer = self.random.choice(self.consumers)
        request = receive_request(GROUP, TOPIC, wait_ms=0, batch_size=3)
        responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), request)
        for _ in range(self.random.randrange(1, 3)):
            await anext(responses, None)
        await responses.aclose()
        await self.finish_background_tasks()

    def _choose_held(self) -> tuple[str, Lease] | None:
        """Choose one of the messages that a consumer holds, None if there is none."""
        held = sorted(self.model.in_flight.items())
        return self.random.choice(held) if held else None

    async def ack(self) -> None:
        if (chosen := self._choose_held()) is not None:
            key, held = chosen
            response = await held.consumer.ack(held.message)
            assert response.status.code == definition.Code.OK, (key, response)
            self.model.stale.append(self.model.in_flight.pop(key).message)
            self.model.acknowledged.add(key)

    async def ack_stale(self) -> None:
        if self.model.stale:
            message = self.random.choice(self.model.stale)
            code = (await self.consumers[0].ack(message)).status.code
            # A second acknowledgement may succeed, while the broker remembers the first. A handle whose message has
            # come back is invalid.
            key = message.system_properties.message_id
            has_ended = key not in {*self.model.in_flight, *self.model.waiting, *self.model.delayed}
            assert code == definition.Code.INVALID_RECEIPT_HANDLE or (
                has_ended and code == definition.Code.OK
            ), key

    async def change(self) -> None:
        if (chosen := self._choose_held()) is not None:
            key, held = chosen
            ms, suspend = self.random.choice([0, 10, 1_000, 9_000, 90_000]), self.random.random() < 0.3
            response = await held.consumer.change(held.message, ms, suspend=suspend)
            assert response.status.code == definition.Code.OK, (key, response)
            assert response.receipt_handle == held.message.system_properties.receipt_handle
            held.due_ms = self.world.clock.wall + ms
            self.suspended[key] = suspend
            await self.pass_time(0)

    async def dead_letter(self) -> None:
        if self.random.random() < 0.3 and (chosen := self._choose_held()) is not None:
            key, held = chosen
            assert await held.consumer.dead_letter(held.message) == definition.Code.OK
            self.model.stale.append(self.model.in_flight.pop(key).message)
            self.model.dead.add(key)

    async def end_session(self) -> None:
        """End the session of a client. Its renewed messages come back by the retry policy. Then connect it again."""
        consumer = self.random.choice(self.consumers)
        consumer.edge.context.sessions.remove(consumer.name)
        await self.finish_background_tasks()
        for key, held in list(self.model.in_flight.items()):
            if held.consumer is consumer and held.due_ms is None:
                self.model.come_back(key, due_ms=self.world.clock.wall + PAUSE_MS)
        consumer.connect()

    async def pass_time(self, ms: int | None = None) -> None:
        steps = self.random.choice([1, 1, 3, 15]) if ms is None else 1
        for _ in range(steps):
            await self.consumers[0].pass_time(STEP_MS if ms is None else ms)
            await asyncio.gather(*self.edges[-1]._renewals.start_due())
            now_ms = self.world.clock.wall
            self.model.pass_time(now_ms)
            for key, held in list(self.model.in_flight.items()):
                if held.due_ms is not None and held.due_ms <= now_ms:
                    self.model.come_back(key, counts=not self.suspended.pop(key, False))

    async def restart(self) -> None:
        if self.random.random() < 0.3:
            await self.finish_background_tasks()
            for held in self.model.in_flight.values():
                if held.due_ms is None:
                    return  # it is not renewed after a restart, and the model does not know when it comes back
            await self.edges[-1].close()
            await self.world.restart()
            self.edges.append(GrpcEdge(self.world.broker))
            for consumer in self.consumers:
                consumer.edge = self.edges[-1]
                consumer.connect()

    async def finish_background_tasks(self) -> None:
        """Wait for the background tasks of broker and edge."""
        edge = self.edges[-1]
        await asyncio.gather(*edge._renewals._tasks)
        await self.pass_time(0)

    async def end(self) -> None:
        """End all sessions, receive the remaining messages with one consumer, and compare with the model."""
        for consumer in self.consumers:
            consumer.edge.context.sessions.remove(consumer.name)
        last = self.consumers[0]
        received: list[str] = []
        for _ in range(4 * ATTEMPTS_MAX):
            await self.finish_background_tasks()
            await last.pass_time(10 * MINUTE_MS)
            while messages := await last.receive():
                received += [message.system_properties.message_id for message in messages]
                assert (await last.ack(*messages)).status.code == definition.Code.OK
        dead: list[str] = []
        while messages := await last.receive("readers-of-dead-letters", "%DLQ%g"):
            dead += [message.system_properties.message_id for message in messages]
        ended = [*received, *sorted(self.model.acknowledged), *dead]
        assert sorted(ended) == sorted(f"id-{n}" for n in range(self.count))
        assert self.model.dead <= set(dead)


STEP_NAMES = [
    "send", "receive", "receive", "receive", "receive_unread", "ack", "ack", "ack_stale", "change", "dead_letter",
    "end_session", "pass_time", "pass_time", "restart",
]  # fmt: skip


async def run_steps(world: World, seed: int) -> GroupRun:
    """Run random steps on a new edge of this node."""
    async with consumer_of(world) as consumer:
        run = GroupRun(world, consumer, seed)
        await run.begin()
        for _ in range(STEPS):
            await getattr(run, run.random.choice(STEP_NAMES))()
        await run.end()
        await run.edges[-1].close()
        return run


@pytest.mark.parametrize("seed", range(12))
def test_each_message_ends_once_with_random_consumers(seed: int) -> None:
    @on_node()
    async def check(world: World) -> None:
        run = await run_steps(world, seed)
        assert run.model.acknowledged and run.count > 10

    check()


# ---- controls: the model notices a broken broker ----------------------------------------------------------------


async def _acknowledge_nothing(receipts: Any) -> list[bool]:
    return [True] * len(receipts)


async def _nothing(*_: Any, **__: Any) -> None:
    return None


def _break(world: World, breach: str) -> None:
    """Make the broker break a rule, for the negative controls."""
    engine = world.broker.consuming
    if breach == "acknowledged, and nothing settled":
        engine.acknowledge = _acknowledge_nothing
    elif breach == "not renewed":
        change = engine.change_invisible_time
        # Only a renewal calls it without options.
        engine.change_invisible_time = lambda receipt, ms, **options: (
            change(receipt, ms, **options) if options else _nothing()
        )
    else:
        engine.give_back = _nothing


@pytest.mark.parametrize("breach", ["acknowledged, and nothing settled", "not renewed", "not given back"])
def test_the_model_sees_a_breach(breach: str) -> None:
    failures = 0
    for seed in range(6):

        @on_node()
        async def check(world: World, seed: int) -> None:
            _break(world, breach)
            await run_steps(world, seed)

        try:
            check(seed)
        except AssertionError:
            failures += 1
    assert failures
