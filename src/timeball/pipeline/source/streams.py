"""What the streams share: connections to the groups they read, and when a micro-batch is worth while.

One instance lives beside the driver for the whole query. Each look asks the broker anew which groups there are, so a
group that is added while the query runs is read from its first row on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader

from timeball.clock import Clock
from timeball.errors import SetupError
from timeball.pipeline.endpoint import Connections
from timeball.pipeline.source.options import ReadOptions, check_stream
from timeball.pipeline.source.pacing import Pace
from timeball.pipeline.source.spark_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

Offset = dict[str, Any]


class BrokerStream(Connections, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The part that all streams share: connections. Tasks only call `read`."""

    def stop(self) -> None:
        """See DataSourceStreamReader."""
        self.close()


class PacedStream(BrokerStream, Pace):
    """A stream with a rule when a micro-batch is worth while."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        BrokerStream.__init__(self, options.endpoint)
        Pace.__init__(self, options, clock)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to max_rows_per_batch rows."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def rows_max(self, limit: ReadLimit) -> int | None:
        """Return how many rows a batch may have; None for all there are."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return int(getattr(limit, "max_rows", self.options.max_rows_per_batch))


def check_known(names: Iterable[str], groups: Collection[str]) -> None:
    """Refuse an offset that names a group which is not there."""
    for name in names:
        if name not in groups:
            raise SetupError(
                f"the checkpoint has come to a row of the group {name!r}, which is not there: it belongs to another "
                "cluster; remove the checkpoint folder of this query"
            )
