"""The parts of PySpark's data source interface that came after 4.0, with a stand-in for each that is missing.

    4.1    filters that Spark pushes down; a stream's sink that takes Arrow batches
    4.2    how much a stream's micro-batch may read; availableNow for Python streams

So batch reads and writes work on 4.0 and 4.1. A stand-in is the base or the type of nothing: no Spark of that version
asks for what it stands in for, but for a stream, which is refused.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pyspark

from timeball.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamArrowWriter,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class Missing:
        """Stands for a class that this PySpark has not got."""

    def _part(module: str, name: str) -> type:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return Missing

    _BATCH, _STREAM = "pyspark.sql.datasource", "pyspark.sql.streaming.datasource"
    DataSourceStreamArrowWriter = _part(_BATCH, "DataSourceStreamArrowWriter")
    EqualTo = _part(_BATCH, "EqualTo")
    Filter = _part(_BATCH, "Filter")
    GreaterThan = _part(_BATCH, "GreaterThan")
    GreaterThanOrEqual = _part(_BATCH, "GreaterThanOrEqual")
    In = _part(_BATCH, "In")
    LessThan = _part(_BATCH, "LessThan")
    LessThanOrEqual = _part(_BATCH, "LessThanOrEqual")
    ReadAllAvailable = _part(_STREAM, "ReadAllAvailable")
    ReadLimit = _part(_STREAM, "ReadLimit")
    ReadMaxRows = _part(_STREAM, "ReadMaxRows")
    SupportsTriggerAvailableNow = _part(_STREAM, "SupportsTriggerAvailableNow")

__all__ = [
    "DataSourceStreamArrowWriter",
    "EqualTo",
    "Filter",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
    "LessThan",
    "LessThanOrEqual",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "check_streams",
]


def check_streams() -> None:
    """Raise SetupError unless this PySpark has all that streams need."""
    if SupportsTriggerAvailableNow.__module__ == __name__:
        raise SetupError(
            f"streams need pyspark 4.2 or later, and this is {pyspark.__version__}; batch reads and writes work"
        )
