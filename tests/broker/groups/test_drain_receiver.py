"""The receiver of a drain adopts each transfer once, and only from permitted callers."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.broker.groups.test_grouped import shop
from tests.broker.on_node import batch
from tests.broker.revoking.test_drain_rows import scheduled_rows
from tests.broker.two_groups import InGroup, Neighbours, in_two_groups

from timeball.broker.registry.tables import AdoptedFacts
from timeball.broker.revoking.drain_rows import build_drain_rows, encode_sent
from timeball.broker.revoking.group_questions import AdoptHere
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Forbidden, InvalidMessage, OutOfRange, OverLimit
from timeball.model.limits import MINUTE_MS
from timeball.schedule.locations import with_column


def transfer(number: int, rows: int = 3, since_ms: int = 5, due_ms: int = 100) -> AdoptHere:
    """Build a transfer from g2 with `rows` messages of the topic orders."""
    messages = with_column(scheduled_rows([None] * rows), "due_ms", pa.array([due_ms] * rows))
    sent = encode_sent(build_drain_rows(messages, "g1", 9))
    return AdoptHere(source="g2", since_ms=since_ms, transfer=number, rows=sent)


@in_two_groups
async def test_a_repeated_transfer_is_adopted_once(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    adoption = one.broker.adoption
    for number in (1, 1, 2, 1, 2):
        await adoption.adopt(transfer(number), ANONYMOUS)
    assert one.broker.tables.drains.adopted("g2") == AdoptedFacts(since_ms=5, transfer=2, rows=6)
    await one.restart()
    await one.broker.adoption.adopt(transfer(2), ANONYMOUS)
    await one.broker.adoption.adopt(transfer(1, since_ms=6), ANONYMOUS)
    assert one.broker.tables.drains.adopted("g2") == AdoptedFacts(since_ms=6, transfer=1, rows=9)
    with pytest.raises(OutOfRange, match="newer drain"):
        await one.broker.adoption.adopt(transfer(3), ANONYMOUS)
    assert {"orders"} <= one.broker.topics().keys(), "the topic of the messages was created"


@in_two_groups
async def test_the_limit_of_a_timer_slot_refuses_no_transfer(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await one.restart(strategy="timer_wheel", timer_congest_num_each_slot=1)
    due_ms = one.clock.wall + MINUTE_MS
    await one.broker.adoption.adopt(transfer(1, due_ms=due_ms), ANONYMOUS)
    assert one.broker.pending_messages == 3
    with pytest.raises(OverLimit, match="timer-congest-num-each-slot"):
        await one.broker.send(batch(1, due_ms=[due_ms]))


@in_two_groups
async def test_a_refused_transfer_adopts_nothing(neighbours: Neighbours, one: InGroup, two: InGroup) -> None:
    with pytest.raises(Forbidden):
        await one.broker.adoption.adopt(transfer(1), shop())
    with pytest.raises(InvalidMessage):
        await one.broker.adoption.adopt(AdoptHere(source="g2", since_ms=5, transfer=1, rows=b"x"), ANONYMOUS)
    assert one.broker.tables.drains.adopted("g2") is None
    assert not one.broker.pending_messages
