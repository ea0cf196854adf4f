"""The texts of POP: what a consumer gives back to acknowledge a message, and how an answer tells it what to give.

A check point, which a message carries as its property POP_CK, is eight words with blanks between them:

    first offset · pop time · invisible time · revive queue · retry · broker · queue · offset

`retry` says which topic the queue is of: 0 the topic asked for, 1 `%RETRY%<group>_<topic>`, 2 the same with "+".
The revive queue is an inner queue of RocketMQ's broker; 999 says "in order". An answer does not repeat all that for
every message: lists by queue, from which the client makes the check points, stand in its header.

    startOffsetInfo   retry queue first;…          msgOffsetInfo   retry queue offset,offset,…;…
    orderCountInfo    retry queue least times;…  and for single messages  retry qo<queue>%<offset> times;…
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import msgspec

from timeball.errors import InvalidMessage
from timeball.message import RETRY_PREFIX

NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"
REVIVE_QUEUE, REVIVE_QUEUE_IN_ORDER = 0, 999
WORDS = 8
BITS_MAX = 1 << 16  # messages that one entry of a batch may acknowledge

POP_CK = "POP_CK"


class CheckPoint(msgspec.Struct, frozen=True):
    """The check point of a popped message, which its receipt is made of."""

    first_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    def encode(self) -> str:
        """As RocketMQ writes it."""
        return " ".join(str(word) for word in msgspec.structs.astuple(self))


def parse(text: str) -> CheckPoint:
    """Inverse of `CheckPoint.encode`; raises InvalidMessage."""
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
    """The `retry` word of a queue of this topic."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """The topic that the `retry` word makes of the one a consumer knows."""
    if retry == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"


Place = tuple[str, int, int]  # retry word, queue, offset


def start_offset_info(places: Iterable[Place]) -> str:
    """The first offset of each queue, of messages in the order in which the answer has them."""
    firsts: dict[tuple[str, int], int] = {}
    for retry, queue_id, offset in places:
        firsts.setdefault((retry, queue_id), offset)
    return ";".join(f"{retry} {queue_id} {first}" for (retry, queue_id), first in firsts.items())


def msg_offset_info(places: Iterable[Place]) -> str:
    """All offsets of each queue."""
    offsets: dict[tuple[str, int], list[str]] = {}
    for retry, queue_id, offset in places:
        offsets.setdefault((retry, queue_id), []).append(str(offset))
    return ";".join(f"{retry} {queue_id} {','.join(of)}" for (retry, queue_id), of in offsets.items())


def order_count_info(places: Iterable[Place], times: Iterable[int]) -> str:
    """How often each message has been handed out before, in order; and the least of each queue, for old clients."""
    parts, least = [], dict[tuple[str, int], int]()
    for (retry, queue_id, offset), count in zip(places, times, strict=True):
        if count:
            parts.append(f"{retry} qo{queue_id}%{offset} {count}")
        least[retry, queue_id] = min(count, least.get((retry, queue_id), count))
    parts += [f"{retry} {queue_id} {count}" for (retry, queue_id), count in least.items()]
    return ";".join(parts)


def bits(text: str) -> list[int]:
    """Positions that are set in a Java BitSet, as its bytes in base64; raises InvalidMessage."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage("bits of a batch acknowledgement: no base64") from error
    if len(data) * 8 > BITS_MAX:
        raise InvalidMessage(f"bits of a batch acknowledgement: more than {BITS_MAX}")
    return [8 * at + bit for at, byte in enumerate(data) for bit in range(8) if byte >> bit & 1]
