"""What the streams share: connections to the groups they read, and when a micro-batch is worth while.

One instance lives beside the driver for the whole query. Each look asks the broker anew which groups there are, so a
group that is added while the query runs is read from its first row on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader

from timeball.clock import Clock, SystemClock
from timeball.errors import SetupError
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.groups import Group, groups_of
from timeball.pipeline.source.options import ReadOptions, check_stream
from timeball.pipeline.source.spark_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from timeball.wire import Status

Offset = dict[str, Any]
Part = TypeVar("Part", int, str, tuple[str, int])


class BrokerStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The part that all streams share: connections. Tasks only call `read`."""

    def __init__(self, endpoint: str) -> None:
        self._uri = endpoint
        self._opened: dict[str, Endpoint] = {}

    def stop(self) -> None:
        """See DataSourceStreamReader."""
        for endpoint in self._opened.values():
            endpoint.close()
        self._opened = {}

    def broker(self, uri: str | None = None) -> Endpoint:
        """Return the driver's connection: to the endpoint that the query names, or to a group's own."""
        uri = uri or self._uri
        if uri not in self._opened:
            self._opened[uri] = Endpoint(uri)
        return self._opened[uri]

    def statuses(self) -> list[tuple[Group, Status]]:
        """Return the groups there are now, and the status of each; one call where there is one group."""
        status = self.broker().status()
        groups = self._groups_of(status)
        if len(groups) == 1:
            return [(groups[0], status)]
        return [(group, self.broker(group.endpoint).status()) for group in groups]

    def groups(self) -> list[Group]:
        """Return the groups there are now."""
        return self._groups_of(self.broker().status())

    def _groups_of(self, status: Status) -> list[Group]:
        groups = groups_of(status, self._uri)
        for uri in self._opened.keys() - {self._uri, *(group.endpoint for group in groups)}:
            self._opened.pop(uri).close()  # its group has another leader
        return groups

    def __getstate__(self) -> dict[str, Any]:
        # Tasks receive a copy; a connection is of no use to them.
        return {**self.__dict__, "_opened": {}}


class PacedStream(BrokerStream):
    """A stream with a rule when a micro-batch is worth while."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        super().__init__(options.endpoint)
        self.options = options
        self._clock = clock or SystemClock()
        self._idle_since_ns = self._clock.monotonic_ns()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to max_rows_per_batch rows."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def rows_max(self, limit: ReadLimit) -> int | None:
        """Return how many rows a batch may have; None for all there are."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return int(getattr(limit, "max_rows", self.options.max_rows_per_batch))

    def worth(self, rows: int) -> bool:
        """Return whether so many new rows are a micro-batch now."""
        options = self.options
        if rows >= min(options.min_rows_per_batch, options.max_rows_per_batch):
            return True
        waited_ms = (self._clock.monotonic_ns() - self._idle_since_ns) // 1_000_000
        return 0 < options.max_trigger_delay_ms <= waited_ms and rows >= options.few_rows

    def begin_batch(self) -> None:
        """Start the wait of `max_trigger_delay_ms` anew."""
        self._idle_since_ns = self._clock.monotonic_ns()


def check_known(names: Iterable[str], groups: Collection[str]) -> None:
    """Refuse an offset that names a group which is not there."""
    for name in names:
        if name not in groups:
            raise SetupError(
                f"the checkpoint has come to a row of the group {name!r}, which is not there: it belongs to another "
                "cluster; remove the checkpoint folder of this query"
            )


def share(lag: Mapping[Part, int], rows: int) -> dict[Part, int]:
    """Share `rows` rows out in proportion to the lag of each part; all there are when these are fewer."""
    total = sum(lag.values())
    if total <= rows:
        return dict(lag)
    taken: dict[Part, int] = {}
    given = seen = 0
    for part in sorted(lag):
        seen += lag[part]
        taken[part] = rows * seen // total - given
        given += taken[part]
    return taken
