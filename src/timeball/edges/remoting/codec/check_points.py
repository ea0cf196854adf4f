"""Encode and parse POP's check points, and the header fields from which clients build them.

A check point identifies a popped message. The consumer sends it back to acknowledge the message. As the property POP_CK
of a message, it has eight words, separated by spaces:

    first offset · pop time · invisible time · revive queue · retry · broker · queue · offset

`retry` states the topic of the queue: 0 is the requested topic, 1 is `%RETRY%<group>_<topic>`, and 2 is the same with
"+" instead of "_". The revive queue is an internal queue of RocketMQ's broker, and 999 means an orderly group. An
answer does not repeat all eight words for every message. Its header has lists by queue, from which the client builds
the check points:

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
    """The check point of a popped message. Clients use its text as the receipt handle."""

    first_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    def encode(self) -> str:
        """Encode the check point as its eight words."""
        return " ".join(str(word) for word in msgspec.structs.astuple(self))


def parse(text: str) -> CheckPoint:
    """Parse the text of a check point. Raises InvalidMessage."""
    words = text.split(" ")
    if len(words) == WORDS and words[4] in (NORMAL, RETRY_V1, RETRY_V2):
        try:
            first_offset, pop_ms, invisible_ms, revive_queue_id, _, _, queue_id, offset = (
                0 if index in (4, 5) else int(word) for index, word in enumerate(words)
            )
            return CheckPoint(
                first_offset, pop_ms, invisible_ms, revive_queue_id, words[4], words[5], queue_id, offset
            )
        except ValueError:
            pass
    raise InvalidMessage(f"{text[:200]!r} is not a check point of a popped message, which has {WORDS} words")


def retry_mark(topic: str) -> str:
    """Return the `retry` word for queues of this topic."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """Return the topic of a queue, given the topic that the consumer requested and the `retry` word."""
    if retry == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"


Position = tuple[str, int, int]  # retry word, queue, offset


def start_offset_info(positions: Iterable[Position]) -> str:
    """Encode the first offset of each queue. `positions` are in the order of the messages in the answer."""
    first_offsets: dict[tuple[str, int], int] = {}
    for retry, queue_id, offset in positions:
        first_offsets.setdefault((retry, queue_id), offset)
    return ";".join(
        f"{retry} {queue_id} {first_offset}" for (retry, queue_id), first_offset in first_offsets.items()
    )


def msg_offset_info(positions: Iterable[Position]) -> str:
    """Encode all offsets, grouped by queue."""
    offsets: dict[tuple[str, int], list[str]] = {}
    for retry, queue_id, offset in positions:
        offsets.setdefault((retry, queue_id), []).append(str(offset))
    return ";".join(
        f"{retry} {queue_id} {','.join(offsets_of_queue)}"
        for (retry, queue_id), offsets_of_queue in offsets.items()
    )


def order_count_info(positions: Iterable[Position], times: Iterable[int]) -> str:
    """Encode how often each ordered message was popped before, and per queue the least count, for old clients."""
    items, least_counts = [], dict[tuple[str, int], int]()
    for (retry, queue_id, offset), count in zip(positions, times, strict=True):
        if count:
            items.append(f"{retry} qo{queue_id}%{offset} {count}")
        least_counts[retry, queue_id] = min(count, least_counts.get((retry, queue_id), count))
    items += [f"{retry} {queue_id} {count}" for (retry, queue_id), count in least_counts.items()]
    return ";".join(items)


def decode_bit_set(text: str) -> list[int]:
    """Return the positions of the set bits in a Java BitSet, given as base64. Raises InvalidMessage."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage("bits of a batch acknowledgement: not base64") from error
    if len(data) * 8 > BITS_MAX:
        raise InvalidMessage(f"bits of a batch acknowledgement: more than {BITS_MAX}")
    return [
        8 * byte_index + bit for byte_index, byte in enumerate(data) for bit in range(8) if byte >> bit & 1
    ]
