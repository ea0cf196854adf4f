"""Recall: a producer takes a message back by the handle it got when it sent it; one decision for both RocketMQ edges.

    definite   success means that the message is settled and will not be delivered. A handle that is too late, unknown,
               or older than the broker remembers is refused, and the sentence says which.
    rocketmq   what a stock broker answers (`--recall-answers rocketmq`): it takes a mark that is to delete the message,
               and looks for none. A well-formed handle whose instant is ahead is success, one whose instant has
               passed is refused.

In both a message that waits is cancelled, durably, before the answer; a second recall succeeds too. A handle names the
message by its id, so it finds a message that was moved since; only the handle's own instant is then the old one.

    base64url( "v1" topic broker-name timestamp-ms unique-key )   single blanks between, with padding

A handle has RocketMQ's form, because its remoting clients decode it to find the broker it came from; only gRPC clients
pass it on unread. A decoder must ignore items behind the fifth. The timestamp is the due instant itself (RocketMQ adds
one, so that its wheel rounds it into the right slot; we name the promise by its key).
"""

from __future__ import annotations

import base64
import binascii
from functools import partial
from typing import NamedTuple

from timeball.broker.appender import Appender
from timeball.broker.components import Components, in_thread
from timeball.broker.revoking.cancel import cancel, settle
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.promise_lookup import CANCELLED, Names
from timeball.errors import InvalidMessage, NotFound
from timeball.wire import HANDED, Verdict

VERSION = "v1"
ITEMS = 5
HANDLE_CHARACTERS_MAX = 2_048  # checked before the text is decoded; names and ids are far shorter


class Handle(NamedTuple):
    """The message that a recall handle names."""

    topic: str
    broker_name: str
    timestamp_ms: int
    unique_key: str


def encode_handle(topic: str, broker_name: str, due_ms: int, unique_key: str) -> str:
    """Return the handle of a waiting message; empty when none can name it, as a blank would cut its key short."""
    # RocketMQ's form, which its tools and clients pass on: five items with blanks between, in base64.
    text = f"{VERSION} {topic} {broker_name} {due_ms} {unique_key}"
    if text.count(" ") != ITEMS - 1 or not (topic and broker_name and unique_key):
        return ""
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> Handle:
    """Inverse of `encode_handle`, with or without padding; raises InvalidMessage."""
    if len(text) > HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(
            f"a recall handle of {len(text)} characters; {HANDLE_CHARACTERS_MAX} is the most"
        )
    padding = "=" * (-len(text) % 4)
    try:
        items = base64.b64decode(text + padding, altchars=b"-_", validate=True).decode().split(" ")
        version, topic, broker_name, timestamp, unique_key = items[:ITEMS]
        if version != VERSION or not timestamp.isascii() or not timestamp.isdigit():
            raise ValueError
    except (ValueError, binascii.Error) as error:  # also text that is no UTF-8, or too few items
        raise InvalidMessage(f"recall handle {text[:64]!r} is invalid") from error
    return Handle(topic, broker_name, int(timestamp), unique_key)


SETTLED = ("cancelled", CANCELLED)
HANDED_OVER = "the message was handed over to another group of the cluster: recall it there"


class RecallRefused(Exception):
    """The message will not be taken back. `verdict`: released, expired or not_found, the last known since `at_ms`."""

    def __init__(self, verdict: str, at_ms: int | None, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict, self.at_ms, self.sentence = verdict, at_ms, sentence


async def recall(look_ups: LookUps, appender: Appender, topic: str, handle_text: str, by: str = "") -> str:
    """Take back the message that a handle names; returns its id. `by`: the account that asks for it.

    Raises NotFound (the topic), InvalidMessage (no handle, or another topic's or broker's) and RecallRefused.
    """
    parts = look_ups.parts
    if parts.topics.find_topic(topic) is None:
        raise NotFound(f"topic[{topic}] not exist")
    handle = decode_handle(handle_text)
    if handle.topic != topic:
        raise InvalidMessage("recall handle is of another topic")
    if handle.broker_name != parts.settings.broker_name:
        raise InvalidMessage("recall handle is of another broker")
    if parts.settings.recall_answers == "rocketmq":
        await _as_rocketmq(look_ups, appender, handle, by)
        return handle.unique_key
    # An id may name several messages, if its producer has used it again: all of them must be settled.
    for verdict in await _cancel(look_ups, appender, handle, by):
        # "cancelled" before counts as success: a recall that is repeated after a lost answer must succeed.
        if verdict.verdict not in SETTLED or _is_handed(parts, verdict):
            raise await _refusal(parts, handle, verdict)
    return handle.unique_key


async def _cancel(look_ups: LookUps, appender: Appender, handle: Handle, by: str) -> list[Verdict]:
    names = Names(ids=[handle.unique_key], topic=handle.topic)
    return await settle(look_ups, names, partial(cancel, look_ups.parts, appender, by=by))


async def _as_rocketmq(look_ups: LookUps, appender: Appender, handle: Handle, by: str) -> None:
    """Succeed for each handle whose instant is ahead, as RocketMQ does."""
    parts = look_ups.parts
    if handle.timestamp_ms <= parts.clock.now_ms():
        raise RecallRefused("released", None, f"too late, the instant {handle.timestamp_ms} has passed")
    if any(_is_handed(parts, verdict) for verdict in await _cancel(look_ups, appender, handle, by)):
        raise RecallRefused(HANDED, None, HANDED_OVER)


def _is_handed(parts: Components, verdict: Verdict) -> bool:
    return parts.drains.was_handed(verdict.verdict, verdict.at_ms)


async def _refusal(parts: Components, handle: Handle, verdict: Verdict) -> RecallRefused:
    if verdict.verdict == "released":
        return RecallRefused(
            "released", verdict.at_ms, f"too late, the message was delivered at {verdict.at_ms}"
        )
    if _is_handed(parts, verdict):
        return RecallRefused(HANDED, verdict.at_ms, HANDED_OVER)
    # Older than the log: then the broker cannot say that there was no such message.
    kept_from_ms = await in_thread(parts.reader_thread, _kept_from_ms, parts)
    if verdict.verdict == "expired" or handle.timestamp_ms <= kept_from_ms:
        return RecallRefused(
            "expired",
            None,
            f"too late, what became of the message then is not kept any more (since {kept_from_ms})",
        )
    return RecallRefused("not_found", None, "no such message waits here")


def _kept_from_ms(parts: Components) -> int:
    """Return when the oldest row of the log was stored; 0 while retention has removed nothing (reader thread)."""
    first_seq = parts.reader.first_seq
    if first_seq == 1:
        return 0
    _, rows = next(parts.reader.frames(first_seq, first_seq + 1))
    return int(rows.column("store_ms")[0].as_py())
