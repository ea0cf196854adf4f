"""The filters by tag, and what every filter can do.

A tag subscription, `TagA || TagB`, is decided by the hash or the bit that the queue index holds of each message:

    topic's filter type   the index's `tag` of a message            may match when
    SINGLE_TAG            Java's String.hashCode of the whole tag   it is one of the subscription's hashes
    MULTI_TAG             one bit for each of the message's tags    it shares a bit with the subscription

The first is RocketMQ's. The second lets a message carry several tags (`TagA||TagB`); its bit is the hash modulo 63, so
that the field stays positive. Different tags may share a hash or a bit, hence the exact check.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.errors import InvalidFilter
from timeball.log.queue_entry import EntryArray

BoolArray = npt.NDArray[np.bool_]


class Filter(Protocol):
    """Both masks have one element a message; `exact` implies `candidates`."""

    @property
    def text(self) -> str:
        """The subscription, equal for filters that match the same messages."""
        ...

    @property
    def matches_all(self) -> bool:
        """Nothing need be asked: both masks are true throughout."""
        ...

    def candidates(self, entries: EntryArray) -> BoolArray:
        """Return which entries of a queue index (log.queue_index.ENTRY) may match.

        The `tag` field must hold what the topic's filter type says. In a delay level's queue it is an instant: there
        only `exact` means anything.
        """
        ...

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        """Return which rows match. `rows`: READ_SCHEMA or LOG_SCHEMA."""
        ...


class _Everything:
    """The subscription `*`."""

    text, matches_all = "*", True

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        return np.ones(rows.num_rows, dtype=np.bool_)


EVERYTHING: Filter = _Everything()


SEPARATOR = "||"
ALL = "*"
BITS = 63
TAGS_KEPT_MAX = 16_384
JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what Java's String.trim takes off


def java_hash(text: str) -> int:
    """Return Java's String.hashCode: 31-polynomial over UTF-16 units, as a signed 32-bit number."""
    value = 0
    data = text.encode("utf-16-be")
    for high, low in zip(data[::2], data[1::2], strict=True):
        # Held to 32 bits in each step, as Java's int overflows.
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


# Pure functions, called once for each distinct tag of every batch. The bound is for tags that are counted up: each
# costs up to 600 bytes.
@lru_cache(maxsize=TAGS_KEPT_MAX)
def tag_hash(text: str) -> int:
    """Return the index's `tag` for a message with this tag in a SINGLE_TAG topic; 0 for none."""
    return java_hash(text)


@lru_cache(maxsize=TAGS_KEPT_MAX)
def tag_mask(text: str) -> int:
    """Return the same in a MULTI_TAG topic."""
    mask = 0
    for tag in split(text):
        mask |= 1 << tag_hash(tag) % BITS
    return mask


def split(text: str) -> list[str]:
    """Return the tags of a message or subscription: trimmed, without empty ones, in order."""
    return [tag for tag in (part.strip(JAVA_BLANKS) for part in text.split(SEPARATOR)) if tag]


def parse(text: str | None) -> frozenset[str] | None:
    """Return the tags of a subscription, None for all; raises InvalidFilter when it has none or too many."""
    if text is None or text in ("", ALL):
        return None
    tags = split(text)
    if not tags:
        raise InvalidFilter(f"the subscription {text[:80]!r} names no tag; write * for all messages")
    if len(tags) > limits.FILTER_TAGS_MAX:
        # No split gives a position, and a text as long as this was built by a program.
        raise InvalidFilter(
            f"the subscription has {len(tags)} tags, at most {limits.FILTER_TAGS_MAX} (FILTER_TAGS_MAX)",
            limit="FILTER_TAGS_MAX",
        )
    return frozenset(tags)


def joined(tags: frozenset[str]) -> str:
    """Return the subscription to these tags, always in the same order."""
    return f" {SEPARATOR} ".join(sorted(tags))


class TagFilter:
    """Any of some tags, in a topic whose messages have one each."""

    matches_all = False

    def __init__(self, tags: frozenset[str]) -> None:
        self.tags, self.text = tags, joined(tags)
        self._hashes = np.array(sorted({tag_hash(tag) for tag in tags}), dtype=np.int64)
        self._values = pa.array(sorted(tags), pa.string())

    def candidates(self, entries: EntryArray) -> BoolArray:
        # By hash: two tags may share one, so `exact` compares the texts.
        mask: BoolArray = np.isin(entries["tag"].astype(np.int64), self._hashes)
        return mask

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        return np.asarray(pc.is_in(rows.column("tag"), value_set=self._values), dtype=np.bool_)


class TagMaskFilter:
    """Any of some tags, in a topic whose messages may have several."""

    matches_all = False

    def __init__(self, tags: frozenset[str]) -> None:
        self.tags, self.text = tags, joined(tags)
        self._mask = np.int64(tag_mask(SEPARATOR.join(tags)))

    def candidates(self, entries: EntryArray) -> BoolArray:
        # A bit a tag, shared by all tags that are alike modulo 63: a candidate only, which `exact` decides about.
        mask: BoolArray = (entries["tag"].astype(np.int64) & self._mask) != 0
        return mask

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        found = rows.column("tag").dictionary_encode()
        # Each distinct text once: messages of a topic carry few different ones.
        wanted = [not self.tags.isdisjoint(split(text)) for text in found.dictionary.to_pylist()]
        codes = found.indices.fill_null(len(wanted)).to_numpy()
        mask: BoolArray = np.array([*wanted, False], dtype=np.bool_)[codes]
        return mask
