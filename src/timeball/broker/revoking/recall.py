"""Recall: a producer takes a message back by the handle it got when it sent it; one decision for both RocketMQ edges.

    definite   success means that the message is settled and will not be delivered. What is too late, unknown, or older
               than anybody remembers is refused, and the sentence says which.
    rocketmq   what a stock broker answers (`--recall-answers rocketmq`): it takes a mark that is to delete the message,
               and looks for none. A well-formed handle whose instant is ahead is success, one whose instant has
               passed is refused.

In both a message that waits is cancelled, durably, before the answer; a second recall succeeds too. A handle names the
message by its id, so it finds a message that was moved since; only the handle's own instant is then the old one.
"""

from __future__ import annotations

from functools import partial

from timeball.broker.parts import Parts, in_thread
from timeball.broker.revoking.cancel import cancel, settle
from timeball.broker.revoking.promise_lookup import CANCELLED, Names
from timeball.broker.revoking.recall_handle import Handle, decode_handle
from timeball.errors import InvalidMessage, NotFound
from timeball.wire import Verdict

SETTLED = ("cancelled", CANCELLED)


class RecallRefused(Exception):
    """The message will not be taken back. `verdict`: released, expired or not_found, the last known since `at_ms`."""

    def __init__(self, verdict: str, at_ms: int | None, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict, self.at_ms, self.sentence = verdict, at_ms, sentence


async def recall(parts: Parts, topic: str, handle_text: str) -> str:
    """Take back the message that a handle names; returns its id.

    Raises NotFound (the topic), InvalidMessage (no handle, or another topic's or broker's) and RecallRefused.
    """
    if parts.topics.find(topic) is None:
        raise NotFound(f"topic[{topic}] not exist")
    handle = decode_handle(handle_text)
    if handle.topic != topic:
        raise InvalidMessage("recall handle is of another topic")
    if handle.broker_name != parts.settings.broker_name:
        raise InvalidMessage("recall handle is of another broker")
    if parts.settings.recall_answers == "rocketmq":
        await _as_rocketmq(parts, handle)
        return handle.unique_key
    for verdict in await _cancel(parts, handle):
        if verdict.verdict not in SETTLED:
            raise await _refusal(parts, handle, verdict)
    return handle.unique_key


async def _cancel(parts: Parts, handle: Handle) -> list[Verdict]:
    names = Names(ids=[handle.unique_key], topic=handle.topic)
    return await settle(parts, names, partial(cancel, parts))


async def _as_rocketmq(parts: Parts, handle: Handle) -> None:
    """Succeed for each handle whose instant is ahead, as RocketMQ does."""
    if handle.timestamp_ms <= parts.clock.now_ms():
        raise RecallRefused("released", None, f"too late, the instant {handle.timestamp_ms} has passed")
    await _cancel(parts, handle)


async def _refusal(parts: Parts, handle: Handle, verdict: Verdict) -> RecallRefused:
    if verdict.verdict == "released":
        return RecallRefused(
            "released", verdict.at_ms, f"too late, the message was delivered at {verdict.at_ms}"
        )
    kept_from_ms = await in_thread(parts.reader_thread, _kept_from_ms, parts)
    if verdict.verdict == "expired" or handle.timestamp_ms <= kept_from_ms:
        return RecallRefused(
            "expired",
            None,
            f"too late, what became of the message then is not kept any more (since {kept_from_ms})",
        )
    return RecallRefused("not_found", None, "no such message waits here")


def _kept_from_ms(parts: Parts) -> int:
    """Return when the oldest row of the log was stored; 0 while retention has removed nothing (reader thread)."""
    first_seq = parts.reader.first_seq
    if first_seq == 1:
        return 0
    _, rows = next(parts.reader.frames(first_seq, first_seq + 1))
    return int(rows.column("store_ms")[0].as_py())
