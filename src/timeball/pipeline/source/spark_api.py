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
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as DataSourceStreamArrowWriter
    from pyspark.sql.datasource import EqualTo as EqualTo
    from pyspark.sql.datasource import Filter as Filter
    from pyspark.sql.datasource import GreaterThan as GreaterThan
    from pyspark.sql.datasource import GreaterThanOrEqual as GreaterThanOrEqual
    from pyspark.sql.datasource import In as In
    from pyspark.sql.datasource import LessThan as LessThan
    from pyspark.sql.datasource import LessThanOrEqual as LessThanOrEqual
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
else:
    _BATCH = "EqualTo Filter GreaterThan GreaterThanOrEqual In LessThan LessThanOrEqual DataSourceStreamArrowWriter"
    _STREAM = "ReadAllAvailable ReadLimit ReadMaxRows SupportsTriggerAvailableNow"

    class Missing:
        """Stands for a class that this PySpark has not got."""

    def _part(module: str, name: str) -> type:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return Missing

    globals().update({name: _part("pyspark.sql.datasource", name) for name in _BATCH.split()})
    globals().update({name: _part("pyspark.sql.streaming.datasource", name) for name in _STREAM.split()})


def check_streams() -> None:
    """Raise SetupError unless this PySpark has all that streams need."""
    if SupportsTriggerAvailableNow.__module__ == __name__:
        raise SetupError(
            f"streams need pyspark 4.2 or later, and this is {pyspark.__version__}; batch reads and writes work"
        )
