"""What every filter can do, and the filter that lets everything pass."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.queue_file import EntryArray

BoolArray = npt.NDArray[np.bool_]


class Filter(Protocol):
    """Both masks have one element a message; `exact` implies `candidates`."""

    @property
    def matches_all(self) -> bool:
        """Nothing need be asked: both masks are true throughout."""
        ...

    def candidates(self, entries: EntryArray) -> BoolArray:
        """Which entries of a queue index (log.queue_index.ENTRY) may match.

        The `tag` field must hold what the topic's filter type says. In a delay level's queue it is an instant: there
        only `exact` means anything.
        """
        ...

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        """Which rows match. `rows`: READ_SCHEMA or LOG_SCHEMA."""
        ...


class _Everything:
    """The subscription `*`."""

    matches_all = True

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        return np.ones(rows.num_rows, dtype=np.bool_)


EVERYTHING: Filter = _Everything()
