"""SQL filters: a parsed condition, and its evaluation for the rows of a topic.

The evaluation is compiled if the build had a C compiler (sql_program.pyx). Otherwise sql_conditions.py evaluates the
condition with Arrow and numpy. For the same rows, both give the same result.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.broker.filters import sql_conditions, sql_grammar
from timeball.broker.filters.tags import BoolArray
from timeball.log.format import EntryArray

try:
    from timeball.broker.filters.sql_program import Program  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    Program = None


class SqlFilter:
    """A filter that matches messages for which a condition on their properties is TRUE."""

    matches_all = False

    def __init__(self, text: str) -> None:
        """Parse the condition. Raises InvalidFilter."""
        self.text = text.strip()
        self._condition, self._names = sql_grammar.parse(text)
        self._program = None if Program is None else Program(self._condition, self._names)

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)  # the index does not contain properties

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        if self._program is None:
            return sql_conditions.matches(self._condition, self._names, rows)
        return np.frombuffer(self._program.matches(rows), np.bool_)
