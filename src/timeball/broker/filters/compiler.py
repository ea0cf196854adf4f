"""A subscription's text becomes a filter. The caller keeps it: the same text always means the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.filters import tags
from timeball.broker.filters.tags import ALL, EVERYTHING, BoolArray, Filter
from timeball.errors import InvalidFilter
from timeball.log.queue_entry import EntryArray

if TYPE_CHECKING:
    from timeball.broker.filters.sql_conditions import Condition

TAG, SQL92 = "TAG", "SQL92"
# Of all texts kept: some 8 MB of filters, in each of the four rooms that keep some.
CHARACTERS_MAX = 256 * 1024
OVERHEAD_CHARACTERS = 64  # of a filter whose text is short


class SqlFilter:
    """Messages for which a condition on their properties is TRUE."""

    matches_all = False

    def __init__(self, condition: Condition, names: frozenset[str], text: str) -> None:
        self._condition, self._names, self.text = condition, names, text

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)  # properties do not stand in the index

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        from timeball.broker.filters.sql_values import TRUE, Values

        matches: BoolArray = self._condition.truth(Values(rows, self._names)) == TRUE
        return matches


def compile_filter(text: str | None, expression_type: str | None = TAG, *, bit_mask: bool = False) -> Filter:
    """Return the filter of a subscription; raises InvalidFilter, and nothing else.

    `text`: tags separated by `||`, or an SQL expression. None, "" and `*` are all messages, as tags.
    `expression_type`: "TAG" (also None and "") or "SQL92". `bit_mask`: the topic's filter type is MULTI_TAG.
    """
    # Before the cache's key or the parser sees it: the text is a client's, of any size.
    _check_text(text or "")
    # RocketMQ's clients leave the type out for tags.
    if expression_type in (None, "", TAG):
        wanted = tags.parse(text)
        if wanted is None:
            return EVERYTHING
        return tags.TagMaskFilter(wanted) if bit_mask else tags.TagFilter(wanted)
    if expression_type == SQL92:
        # A start is over sooner without it (protocols/edges.py): a parser of SQL takes 40 ms to make.
        from timeball.broker.filters import sql_grammar

        return SqlFilter(*sql_grammar.parse(text or ""), (text or "").strip())
    raise InvalidFilter(f"expression type {expression_type[:80]!r}: it is {TAG} or {SQL92}")


def told(text: str, expression_type: str) -> str:
    """Return a subscription as `Filter.text` has it, also one that cannot be compiled."""
    if expression_type == SQL92:
        return text.strip()
    try:
        wanted = tags.parse(text)
    except InvalidFilter:
        return text[: limits.FILTER_BYTES_MAX]
    return ALL if wanted is None else tags.joined(wanted)


def _check_text(text: str) -> None:
    try:
        # Counted in characters first, so that a text of any size costs nothing.
        size = len(text) if len(text) > limits.FILTER_BYTES_MAX else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidFilter(
            f"character {error.start + 1} is half of a surrogate pair, which is no text",
            position=error.start + 1,
        ) from None
    if size > limits.FILTER_BYTES_MAX:
        raise InvalidFilter(
            f"the filter has more than {limits.FILTER_BYTES_MAX} bytes (FILTER_BYTES_MAX)",
            limit="FILTER_BYTES_MAX",
        )


class FiltersKept:
    """Filters that have been compiled: consumers ask with the same few texts. Belongs to the event loop.

    A cache of a pure function. A filter takes some thirty times its text in memory, so the sum of the texts is bounded:
    a client that asks with ever new ones costs the others a compilation, and no memory.
    """

    def __init__(self) -> None:
        self._filters: dict[tuple[str, str, bool], Filter] = {}
        self.characters = 0

    def get(self, text: str, expression_type: str, *, bit_mask: bool) -> Filter:
        """The filter, as `compile_filter` makes it; raises InvalidFilter."""
        key = (text, expression_type, bit_mask)
        found = self._filters.get(key)
        if found is None:
            # A text that is refused is not kept: it raises each time, and costs its sender alone.
            found = compile_filter(text, expression_type, bit_mask=bit_mask)
            if self.characters >= CHARACTERS_MAX:
                # All at once: what is in use is compiled again with the next pulls, and an order of use would cost
                # each pull.
                self._filters.clear()
                self.characters = 0
            self._filters[key] = found
            self.characters += len(text) + OVERHEAD_CHARACTERS
        return found
