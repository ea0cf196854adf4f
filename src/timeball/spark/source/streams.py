"""Base classes of the stream readers: connections to the groups, and the rule for starting a micro-batch.

Spark keeps one instance next to the driver for the whole query. The instance asks the broker for the groups before each
micro-batch, so a group that is added while the query runs is read from its first row on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from timeball.io.clock import Clock
from timeball.model.errors import SetupError
from timeball.spark.endpoint import Connections
from timeball.spark.source.options import ReadOptions, check_stream
from timeball.spark.source.pacing import Pace

Offset = dict[str, Any]


class BrokerStream(Connections, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream reader with connections to all groups. Only the driver uses them, because tasks only call `read`."""

    def stop(self) -> None:
        """Close the connections when the query ends."""
        self.close()


class PacedStream(BrokerStream, Pace):
    """A stream reader that starts a micro-batch only when there are enough rows (pacing.py)."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        BrokerStream.__init__(self, options.endpoint)
        Pace.__init__(self, options, clock)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to max_rows_per_batch rows."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def rows_max(self, limit: ReadLimit) -> int | None:
        """Read the maximum number of rows of a micro-batch from `limit`. None means no limit."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return int(getattr(limit, "max_rows", self.options.max_rows_per_batch))


def check_groups_exist(names: Iterable[str], groups: Collection[str]) -> None:
    """Check that each group in an offset still exists in the cluster. Raises SetupError."""
    for name in names:
        if name not in groups:
            raise SetupError(
                f"the checkpoint has come to a row of the group {name!r}, which is not there: it belongs to another "
                "cluster; remove the checkpoint folder of this query"
            )
