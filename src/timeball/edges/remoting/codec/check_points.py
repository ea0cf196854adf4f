"""The texts of POP: the check points that acknowledge messages, and the header fields that they are made from.

A check point identifies a popped message. The consumer returns it to acknowledge that message. A message carries it as
its property POP_CK: eight words with blanks between them.

    first offset · pop time · invisible time · revive queue · retry · broker · queue · offset

`retry` states which topic the queue belongs to: 0 is the topic asked for, 1 is `%RETRY%<group>_<topic>`, 2 is the same
with "+". The revive queue is an internal queue of RocketMQ's broker, and 999 means "in order". An answer does not
repeat all eight words for every message. Its header has lists by queue, from which the client builds the check points:

    startOffsetInfo   retry queue first;…          msgOffsetInfo   retry queue offset,offset,…;…
    orderCountInfo    retry queue least times;…  and for single messages  retry qo<queue>%<offset> times;…
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import msgspec

from timeball.model.errors import InvalidMessage
from timeball.model.message import RETRY_PREFIX

NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"
REVIVE_QUEUE, REVIVE_QUEUE_IN_ORDER = 0, 999
WORDS = 8
BITS_MAX = 1 << 16  # messages that one entry of a batch may acknowledge

POP_CK = "POP_CK"


class CheckPoint(msgspec.Struct, frozen=True):
    """The check point of a popped message, from which its receipt handle is made."""

    first_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    def encode(self) -> str:
        """Return the eight words as RocketMQ writes them."""
        return " ".join(str(word) for word in msgspec.structs.astuple(self))


def parse(text: str) -> CheckPoint:
    """Parse the text of a check point. Raises InvalidMessage."""
    words = text.split(" ")
    if len(words) == WORDS and words[4] in (NORMAL, RETRY_V1, RETRY_V2):
        try:
            first, pop_ms, invisible_ms, revive, _, _, queue_id, offset = (
                0 if at in (4, 5) else int(word) for at, word in enumerate(words)
            )
            return CheckPoint(first, pop_ms, invisible_ms, revive, words[4], words[5], queue_id, offset)
        except ValueError:
            pass
    raise InvalidMessage(f"{text[:200]!r} is no check point of a popped message: {WORDS} words")


def retry_mark(topic: str) -> str:
    """Return the `retry` word for queues of this topic."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """Return the topic of a queue, from the topic that the consumer asked for and the `retry` word."""
    if retry == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"


Place = tuple[str, int, int]  # retry word, queue, offset


def start_offset_info(places: Iterable[Place]) -> str:
    """Return the first offset of each queue. `places` are in the order of the messages in the answer."""
    firsts: dict[tuple[str, int], int] = {}
    for retry, queue_id, offset in places:
        firsts.setdefault((retry, queue_id), offset)
    return ";".join(f"{retry} {queue_id} {first}" for (retry, queue_id), first in firsts.items())


def msg_offset_info(places: Iterable[Place]) -> str:
    """Return all offsets, grouped by queue."""
    offsets: dict[tuple[str, int], list[str]] = {}
    for retry, queue_id, offset in places:
        offsets.setdefault((retry, queue_id), []).append(str(offset))
    return ";".join(f"{retry} {queue_id} {','.join(of)}" for (retry, queue_id), of in offsets.items())


def order_count_info(places: Iterable[Place], times: Iterable[int]) -> str:
    """Return how often each ordered message was handed out before, and the least count per queue for old clients."""
    parts, least = [], dict[tuple[str, int], int]()
    for (retry, queue_id, offset), count in zip(places, times, strict=True):
        if count:
            parts.append(f"{retry} qo{queue_id}%{offset} {count}")
        least[retry, queue_id] = min(count, least.get((retry, queue_id), count))
    parts += [f"{retry} {queue_id} {count}" for (retry, queue_id), count in least.items()]
    return ";".join(parts)


def bits(text: str) -> list[int]:
    """Return the positions of the bits set in a Java BitSet, given as base64. Raises InvalidMessage."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage("bits of a batch acknowledgement: no base64") from error
    if len(data) * 8 > BITS_MAX:
        raise InvalidMessage(f"bits of a batch acknowledgement: more than {BITS_MAX}")
    return [8 * at + bit for at, byte in enumerate(data) for bit in range(8) if byte >> bit & 1]
