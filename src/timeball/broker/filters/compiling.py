"""A subscription's text becomes a filter. The caller keeps it: the same text always means the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.filters import sql_grammar, tags
from timeball.broker.filters.filter import EVERYTHING, BoolArray, Filter
from timeball.broker.filters.sql_conditions import Condition
from timeball.broker.filters.sql_truth import TRUE
from timeball.broker.filters.sql_values import Values
from timeball.errors import InvalidFilter
from timeball.log.queue_file import EntryArray

TAG, SQL92 = "TAG", "SQL92"


class SqlFilter:
    """Messages for which a condition on their properties is TRUE."""

    matches_all = False

    def __init__(self, condition: Condition, names: frozenset[str]) -> None:
        self._condition, self._names = condition, names

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)  # properties do not stand in the index

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        matches: BoolArray = self._condition.truth(Values(rows, self._names)) == TRUE
        return matches


def compile_filter(text: str | None, expression_type: str | None = TAG, *, bit_mask: bool = False) -> Filter:
    """The filter of a subscription; raises InvalidFilter, and nothing else.

    `text`: tags separated by `||`, or an SQL expression. None, "" and `*` are all messages, as tags.
    `expression_type`: "TAG" (also None and "") or "SQL92". `bit_mask`: the topic's filter type is MULTI_TAG.
    """
    _check_text(text or "")
    if expression_type in (None, "", TAG):
        wanted = tags.parse(text)
        if wanted is None:
            return EVERYTHING
        return tags.TagMaskFilter(wanted) if bit_mask else tags.TagFilter(wanted)
    if expression_type == SQL92:
        return SqlFilter(*sql_grammar.parse(text or ""))
    raise InvalidFilter(f"expression type {expression_type[:80]!r}: it is {TAG} or {SQL92}")


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
