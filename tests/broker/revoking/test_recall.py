"""Recall: the answers for a message that is pending, delivered, rescheduled, unknown, or older than the log."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import delivered, remove_all_rows
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, World

from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.revoking.cancel import Handle, RecallRefused, decode_handle, encode_handle
from timeball.model.access import ANONYMOUS
from timeball.model.errors import InvalidMessage, NotFound

SOON_MS = 2_000


async def send_for_handle(world: World, delay_ms: int, key: str = "x", topic: str = "a") -> str:
    """Send a message, and return its recall handle."""
    due_ms = world.clock.wall + delay_ms
    await world.broker.send(batch(1, unique_key=[key], due_ms=[due_ms], topic=[topic]))
    return encode_handle(topic, "timeball", due_ms, key)


async def refused(world: World, handle: str) -> tuple[str, int | None]:
    """Check that the recall is refused, and return the verdict and the time of the refusal."""
    with pytest.raises(RecallRefused) as refusal:
        await world.broker.recall("a", handle)
    assert refusal.value.sentence == str(refusal.value)
    return refusal.value.verdict, refusal.value.at_ms


@on_node()
async def test_a_pending_message_is_recalled_and_a_second_recall_succeeds(world: World) -> None:
    handle = await send_for_handle(world, FAR_MS)
    for _ in range(2):
        assert await world.broker.recall("a", handle) == "x"
    await world.advance(HOUR_MS)
    assert await delivered(world) == []


@on_node()
async def test_a_message_of_another_topic_with_the_same_id_is_not_recalled(world: World) -> None:
    handle, _ = await send_for_handle(world, FAR_MS), await send_for_handle(world, FAR_MS, topic="b")
    await world.broker.recall("a", handle)
    await world.advance(HOUR_MS)
    assert [row.place.topic for row in (await world.outcome()).rows] == ["b"]


@on_node()
async def test_a_message_that_was_moved_to_the_topic_of_the_handle_is_not_recalled(world: World) -> None:
    await send_for_handle(world, FAR_MS, topic="b")
    move = SelectionFacts(seq=0, at_ms=0, topics=["b"], action="move", to_topic="a")
    await world.broker.selections.select(move, ANONYMOUS)
    await world.broker.create_topic("a", 1)
    handle = encode_handle("a", "timeball", world.clock.wall + FAR_MS, "x")
    assert await refused(world, handle) == ("not_found", None)
    await world.advance(HOUR_MS)
    assert await delivered(world) == ["x"]


@on_node()
async def test_a_recall_of_a_delivered_message_is_refused(world: World) -> None:
    handle = await send_for_handle(world, SOON_MS)
    await world.advance(SOON_MS)
    released_ms = world.clock.wall
    await world.advance(SOON_MS)
    assert await refused(world, handle) == ("released", released_ms)
    assert await delivered(world) == ["x"]


@on_node()
async def test_a_rescheduled_message_is_found_by_its_old_handle(world: World) -> None:
    handle = await send_for_handle(world, SOON_MS)
    await world.broker.reschedule(ids=["x"], delay_ms=HOUR_MS)
    await world.advance(FAR_MS)
    assert await world.broker.recall("a", handle) == "x"
    await world.advance(HOUR_MS)
    assert await delivered(world) == []


@on_node()
async def test_a_recall_of_a_message_that_was_moved_earlier_and_delivered_is_refused(world: World) -> None:
    handle = await send_for_handle(world, HOUR_MS)
    await world.broker.reschedule(ids=["x"], delay_ms=SOON_MS)
    await world.advance(SOON_MS)
    assert await refused(world, handle) == ("released", world.clock.wall)


@on_node()
async def test_a_recall_of_an_unknown_message_is_refused(world: World) -> None:
    await send_for_handle(world, FAR_MS)
    forged = encode_handle("a", "timeball", world.clock.wall + FAR_MS, "nobody")
    assert await refused(world, forged) == ("not_found", None)
    assert await refused(world, encode_handle("a", "timeball", 5, "nobody")) == ("not_found", None)


@on_node(retention_ms=1)
async def test_a_recall_of_a_message_older_than_the_log_is_expired(world: World) -> None:
    old = await send_for_handle(world, SOON_MS)
    await world.advance(SOON_MS)
    await remove_all_rows(world)
    assert await refused(world, old) == ("expired", None)
    # The log would still contain a message with a later due time.
    unknown = encode_handle("a", "timeball", world.clock.wall + FAR_MS, "nobody")
    assert await refused(world, unknown) == ("not_found", None)


@on_node()
async def test_a_handle_that_is_invalid_or_of_another_topic_or_broker_is_refused(world: World) -> None:
    handle = await send_for_handle(world, FAR_MS)
    await send_for_handle(world, FAR_MS, topic="b")
    for topic, text, sentence in (
        ("a", "@@@", "is invalid"),
        ("b", handle, "another topic"),
        ("a", encode_handle("a", "elsewhere", world.clock.wall + FAR_MS, "x"), "another broker"),
    ):
        with pytest.raises(InvalidMessage, match=sentence):
            await world.broker.recall(topic, text)
    with pytest.raises(NotFound, match="not exist"):
        await world.broker.recall("nobody", handle)
    await world.advance(HOUR_MS)
    assert await delivered(world) == ["x", "x"]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=40)


def encoded(text: str | bytes) -> str:
    """The text of a handle with any content."""
    return base64.urlsafe_b64encode(text.encode() if isinstance(text, str) else text).decode()


def test_a_handle_has_the_bytes_of_rocketmq() -> None:
    handle = encode_handle("Orders", "broker-a", 1_700_000_000_123, "7F0000010001")
    assert handle == "djEgT3JkZXJzIGJyb2tlci1hIDE3MDAwMDAwMDAxMjMgN0YwMDAwMDEwMDAx"
    assert base64.urlsafe_b64decode(handle) == b"v1 Orders broker-a 1700000000123 7F0000010001"


@given(topic=NAMES, broker=NAMES, due_ms=st.integers(0, 1 << 62), key=NAMES)
def test_a_handle_is_decoded_to_the_items_it_was_encoded_from(
    topic: str, broker: str, due_ms: int, key: str
) -> None:
    handle = encode_handle(topic, broker, due_ms, key)
    assert decode_handle(handle) == Handle(topic, broker, due_ms, key)
    assert decode_handle(handle.rstrip("=")) == Handle(topic, broker, due_ms, key)


def test_items_of_a_handle_after_the_fifth_are_ignored() -> None:
    assert decode_handle(encoded("v1 t b 5 k later additions")) == Handle("t", "b", 5, "k")


@pytest.mark.parametrize("key", ["", "two words"])
def test_an_empty_item_or_one_with_a_blank_gives_no_handle(key: str) -> None:
    assert encode_handle("t", "b", 5, key) == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "!", "a", "djE+", "x" * 3_000, encoded("v2 t b 5 k"), encoded("v1 t b 5"), encoded("v1 t b five k"),
        encoded("v1 t b -5 k"), encoded("v1  t b 5 k"), encoded(b"\xff\xfe v1 t b 5 k"),
    ],
)  # fmt: skip
def test_an_invalid_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="recall handle"):
        decode_handle(text)


@given(text=st.text(max_size=60))
def test_any_text_is_decoded_or_refused_with_invalid_message(text: str) -> None:
    try:
        assert isinstance(decode_handle(text), Handle)
    except InvalidMessage as error:
        assert "recall handle" in str(error)
