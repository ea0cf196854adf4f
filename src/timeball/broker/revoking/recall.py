"""Recall: a producer cancels a message with the handle that the send returned. Both RocketMQ protocols use it.

    definite   success means that the message is settled and will not be delivered. A handle that is too late, unknown,
               or older than the broker remembers is refused, and the error text states which.
    rocketmq   the answers of a RocketMQ broker (`--recall-answers rocketmq`), which stores a deletion mark without a
               search for the message. A well-formed handle succeeds before its due time and is refused afterwards.

In both modes a pending message is cancelled, durably, before the answer, and a second recall succeeds too. A handle
contains the message's id, so it also finds a message that was moved. Only its due time is outdated then.

    base64url( "v1" topic broker-name timestamp-ms unique-key )   single blanks between, with padding

The handle has RocketMQ's form, because its remoting clients decode it to find the broker. Only gRPC clients pass it on
unread. A decoder must ignore items after the fifth. The timestamp is the due time itself. (RocketMQ adds 1 ms, so that
its wheel rounds it to the right slot. Timeball finds the scheduled message by its key.)
"""

from __future__ import annotations

import base64
import binascii
from concurrent.futures import Executor
from typing import NamedTuple

from timeball.broker.registry.drains import Drains
from timeball.broker.registry.topics import Topics
from timeball.broker.revoking.cancel import Act, settle
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import CANCELLED, Names
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.config import Settings
from timeball.model.errors import InvalidMessage, NotFound
from timeball.model.wire import HANDED, Verdict

VERSION = "v1"  # of RocketMQ's handles
ITEMS = 5
HANDLE_CHARACTERS_MAX = 2_048  # checked before the text is decoded: names and ids are far shorter


class Handle(NamedTuple):
    """The message that a recall handle names."""

    topic: str
    broker_name: str  # RocketMQ's clients send the recall to this broker
    timestamp_ms: int  # the due time when the handle was made
    unique_key: str  # the message's id


def encode_handle(topic: str, broker_name: str, due_ms: int, unique_key: str) -> str:
    """Encode the handle of a pending message. "" if an item is empty or contains a blank."""
    # RocketMQ's form, which its tools and clients pass on: five items with blanks between, in base64.
    text = f"{VERSION} {topic} {broker_name} {due_ms} {unique_key}"
    if text.count(" ") != ITEMS - 1 or not (topic and broker_name and unique_key):
        return ""
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> Handle:
    """Decode a handle, with or without base64 padding. Raise InvalidMessage."""
    if len(text) > HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(
            f"a recall handle of {len(text)} characters; {HANDLE_CHARACTERS_MAX} is the most"
        )
    # Some clients remove the padding.
    padding = "=" * (-len(text) % 4)
    try:
        items = base64.b64decode(text + padding, altchars=b"-_", validate=True).decode().split(" ")
        version, topic, broker_name, timestamp, unique_key = items[:ITEMS]
        if version != VERSION or not timestamp.isascii() or not timestamp.isdigit():
            raise ValueError
    except (ValueError, binascii.Error) as error:  # also for text that is not UTF-8, or has too few items
        raise InvalidMessage(f"recall handle {text[:64]!r} is invalid") from error
    return Handle(topic, broker_name, int(timestamp), unique_key)


SETTLED = ("cancelled", CANCELLED)
HANDED_OVER_TEXT = "the message was handed over to another group of the cluster: recall it there"


class RecallRefused(Exception):
    """The message was not cancelled. `verdict`: released, expired, not_found or handed. `at_ms`: when that happened."""

    def __init__(self, verdict: str, at_ms: int | None, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict, self.at_ms, self.sentence = verdict, at_ms, sentence


async def recall(
    look_ups: LookUps,
    act: Act,
    topic: str,
    handle_text: str,
    *,
    settings: Settings,
    clock: SchedulerClock,
    reader: LogReader,
    topics: Topics,
    drains: Drains,
    reader_thread: Executor,
) -> str:
    """Cancel the message that a handle names, and return its id. `act`: `cancel` on behalf of the requesting account.

    Raise NotFound for an unknown topic, InvalidMessage for an invalid handle or a handle of another topic or broker,
    and RecallRefused if the message cannot be cancelled.
    """
    if topics.find_topic(topic) is None:
        raise NotFound(f"topic[{topic}] not exist")
    handle = decode_handle(handle_text)
    if handle.topic != topic:
        raise InvalidMessage("recall handle belongs to another topic")
    if handle.broker_name != settings.broker_name:
        raise InvalidMessage("recall handle belongs to another broker")
    if settings.recall_answers == "rocketmq":
        await _recall_as_rocketmq(look_ups, act, handle, clock=clock, drains=drains)
        return handle.unique_key
    # An id may belong to several messages, if its producer used it twice. All of them must be settled.
    for verdict in await _cancel(look_ups, act, handle):
        # An earlier cancel counts as success, because a recall that is repeated after a lost answer must succeed.
        if verdict.verdict not in SETTLED or _is_handed_over(verdict, drains=drains):
            raise await _explain_refusal(
                handle, verdict, reader=reader, drains=drains, reader_thread=reader_thread
            )
    return handle.unique_key


async def _cancel(look_ups: LookUps, act: Act, handle: Handle) -> list[Verdict]:
    """Cancel the messages with the id and topic of a handle."""
    # Limited to the topic, because producers of other topics may use the same id.
    names = Names(ids=[handle.unique_key], topic=handle.topic)
    return await settle(look_ups, names, act)


async def _recall_as_rocketmq(
    look_ups: LookUps, act: Act, handle: Handle, *, clock: SchedulerClock, drains: Drains
) -> None:
    """Succeed for each handle whose due time is ahead, as RocketMQ does."""
    if handle.timestamp_ms <= clock.now_ms():
        raise RecallRefused("released", None, f"too late, the due time {handle.timestamp_ms} has passed")
    if any(_is_handed_over(verdict, drains=drains) for verdict in await _cancel(look_ups, act, handle)):
        raise RecallRefused(HANDED, None, HANDED_OVER_TEXT)


def _is_handed_over(verdict: Verdict, *, drains: Drains) -> bool:
    return drains.was_handed_over(verdict.verdict, verdict.at_ms)


async def _explain_refusal(
    handle: Handle, verdict: Verdict, *, reader: LogReader, drains: Drains, reader_thread: Executor
) -> RecallRefused:
    """Build the error for a message that was not cancelled, with the reason as far as it is known."""
    if verdict.verdict == "released":
        return RecallRefused(
            "released", verdict.at_ms, f"too late, the message was delivered at {verdict.at_ms}"
        )
    if _is_handed_over(verdict, drains=drains):
        return RecallRefused(HANDED, verdict.at_ms, HANDED_OVER_TEXT)
    # If the message is older than the log, the broker cannot claim that it did not exist.
    oldest_store_ms = await in_thread(reader_thread, _oldest_store_ms, reader=reader)
    if verdict.verdict == "expired" or handle.timestamp_ms <= oldest_store_ms:
        return RecallRefused(
            "expired",
            None,
            f"too late, the log keeps outcomes of messages only since {oldest_store_ms}",
        )
    return RecallRefused("not_found", None, "no pending message matches the handle")


def _oldest_store_ms(*, reader: LogReader) -> int:
    """Read the store time of the log's oldest row. 0 while retention has removed nothing (reader thread)."""
    first_seq = reader.first_seq
    # Sequence numbers begin at 1, so this log is complete.
    if first_seq == 1:
        return 0
    _, rows = next(reader.frames(first_seq, first_seq + 1))
    return int(rows.column("store_ms")[0].as_py())
