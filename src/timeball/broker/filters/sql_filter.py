"""SQL filters: a parsed condition, and its evaluation for the rows of a topic."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.broker.filters import sql_conditions, sql_grammar
from timeball.broker.filters.tags import BoolArray
from timeball.log.format import EntryArray


class SqlFilter:
    """A filter that matches messages for which a condition on their properties is TRUE."""

    matches_all = False

    def __init__(self, text: str) -> None:
        """Parse the condition. Raises InvalidFilter."""
        self.text = text.strip()
        self._condition, self._names = sql_grammar.parse(text)

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)  # the index does not contain properties

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        return sql_conditions.matches(self._condition, self._names, rows)
