"""The calls that Spark's processes make to a broker, over the client's connection (client/calls.py).

Each may be repeated without harm and is repeated for `patience_s`: attach carries its own job and epoch, and a number
that is reserved twice is only a hole. Errors come back as the types the broker raised; a broker that cannot be reached
is `Unavailable`, so that a runner can tell "wait" from "give up".

An endpoint may be confined to one group of a cluster (groups.py). Its first call asks the node that is named which
group it keeps, and goes on to the group's own nodes when that is another one: no call reaches a group not meant.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball import wire
from timeball.client.calls import Calls, translated
from timeball.clock import Clock
from timeball.errors import OutOfRange, TimeballError, Unavailable
from timeball.limits import PULL_ROWS_MAX
from timeball.message import TABLE_SCHEMA
from timeball.pipeline.groups import Group, endpoint_of, groups_of, known_groups, split_endpoint
from timeball.table import attachment as att

LOG = logging.getLogger("timeball.pipeline")

CALL_TIMEOUT_MS = 60_000
LONG_CALL_TIMEOUT_MS = 1_800_000
PATIENCE_S = 20.0  # a broker that restarts with a million rows in its tail is back within seconds
LEASE_LOOK_S = 0.1
COMPACTED = "hour_log"  # the strategy whose promises move to the pending table


class Endpoint:
    """One broker: of a cluster the leader of one group. Not shared between processes; cheap to open in each task."""

    def __init__(self, uri: str, *, patience_s: float = PATIENCE_S, clock: Clock | None = None) -> None:
        self.uri = uri
        addresses, self._group = split_endpoint(uri)
        self._patience_s, self._clock = patience_s, clock
        self._dialled = self._dial(addresses)
        self._is_there = not self._group

    def _dial(self, addresses: str) -> Calls:
        return Calls(addresses, CALL_TIMEOUT_MS, patience_s=self._patience_s, clock=self._clock)

    @property
    def _calls(self) -> Calls:
        """The connection, to a node of the group that is meant."""
        if not self._is_there:
            status = self._ask_status(self._dialled)
            if status.group != self._group:
                self._dialled.close()
                found = endpoint_of(self.uri, self._group, known_groups(status))
                self._dialled = self._dial(split_endpoint(found)[0])
            self._is_there = True
        return self._dialled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._dialled.close()

    def status(self) -> wire.Status:
        """Return where log, watermark and table stand now."""
        return self._ask_status(self._calls)

    @staticmethod
    def _ask_status(calls: Calls) -> wire.Status:
        return calls.action("status", wire.Nothing(), wire.Status)

    def reserve(self, rows: int) -> int:
        """Set aside `rows` sequence numbers; return the first."""
        return self._calls.action("reserve", wire.Reserve(rows=rows), dict[str, int])["first_seq"]

    def attach(self, attachment: att.Attachment) -> wire.Attached:
        """Make files part of the pending table; a repeated attach is answered with `repeated`."""
        return self._calls.action("attach", attachment, wire.Attached)

    def cancel_ranges(self, ranges: Sequence[tuple[int, int]], reason: str = "") -> wire.RangesCancelled:
        """End what waits of these numbers of a bulk job, (first_seq, rows); may be repeated.

        Some hundred thousand a second, so it may take minutes.
        """
        body = wire.CancelRange(ranges=list(ranges), reason=reason)
        return self._calls.action("cancel_range", body, wire.RangesCancelled, LONG_CALL_TIMEOUT_MS)

    def campaigns(self, campaign: str | None = None) -> list[wire.Campaign]:
        """Return one campaign with its ranges, or all without; NotFound when there is none of this id."""
        body = wire.Campaigns(campaign=campaign)
        return self._calls.action("campaigns", body, dict[str, list[wire.Campaign]])["campaigns"]

    def change_campaign(
        self,
        campaign: str,
        change: wire.CampaignChange,
        *,
        rows: int = 0,
        at_ms: int | None = None,
        shift: bool = False,
        groups: Sequence[str] = (),
    ) -> wire.Campaign:
        """Plan, pause, resume or cancel a campaign; may be repeated. A resume writes all that it holds again."""
        body = wire.ChangeCampaign(
            campaign=campaign, change=change, rows=rows, at_ms=at_ms, shift=shift, groups=list(groups)
        )
        return self._calls.action("campaign", body, wire.Campaign, LONG_CALL_TIMEOUT_MS)

    def drain(self, heir: str, *, dry_run: bool = False) -> wire.Drained:
        """Hand over all that waits in this group to another one; return how far that is. May be repeated."""
        return self._calls.action("drain", wire.Drain(heir=heir, dry_run=dry_run), wire.Drained)

    def starts(self, from_seq: int, to_seq: int) -> list[wire.Start]:
        """Return when the log was taken up again, of the starts whose first row lies in [from_seq, to_seq)."""
        body = wire.Starts(from_seq=from_seq, to_seq=to_seq)
        return self._calls.action("starts", body, dict[str, list[wire.Start]])["starts"]

    def lease_dispatcher(self, lease_ms: int) -> None:
        """Tell the broker that a dispatcher brings due promises for the next `lease_ms`; 0: it has stopped."""
        self._calls.action("dispatcher", wire.DispatcherLease(lease_ms=lease_ms), dict[str, Any])

    def lease_compactor(self, lease_ms: int) -> None:
        """Tell the broker that an outside compactor is at work for the next `lease_ms`."""
        self._calls.action("compactor", wire.Lease(lease_ms=lease_ms), dict[str, Any])

    def release(self, batches: Iterable[pa.RecordBatch]) -> list[wire.ReleaseAnswer]:
        """Bring batches of TABLE_SCHEMA rows that are due; one answer each. The batches may be slow to come."""
        answers: list[wire.ReleaseAnswer] = []
        with translated(self.uri):
            descriptor = flight.FlightDescriptor.for_path(*wire.RELEASE_PATH)
            writer, reader = self._calls.flight.do_exchange(descriptor)
            with writer:
                writer.begin(TABLE_SCHEMA)
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
                for chunk in reader:
                    metadata = chunk.app_metadata.to_pybytes()
                    answers.append(msgspec.json.decode(metadata, type=wire.ReleaseAnswer))
        return answers

    def read_log(
        self,
        from_seq: int,
        to_seq: int,
        kinds: Sequence[int] | None = None,
        coalesce_rows: int = wire.COALESCE_ROWS,
        columns: Sequence[str] | None = None,
        placed: bool | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows from_seq <= seq < to_seq of these kinds, in order, as batches of `columns` of READ_SCHEMA.

        `placed`: only rows that have a place in a queue, or only those that have none.
        """
        yield from self._rows(
            wire.ReadLog(
                from_seq=from_seq,
                to_seq=to_seq,
                kinds=None if kinds is None else [int(kind) for kind in kinds],
                coalesce_rows=coalesce_rows,
                columns=None if columns is None else list(columns),
                placed=placed,
            )
        )

    def queues(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return of each queue of a topic the first offset that is kept and the next one; NotFound without a topic."""
        body = wire.Queues(topic=topic)
        found = self._calls.action("queues", body, dict[str, dict[int, wire.QueueRange]])["queues"]
        return {queue: (each.min, each.max) for queue, each in found.items()}

    def read_queue(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows begin <= offset < end of a queue, in order, in READ_SCHEMA; OutOfRange if it is shorter."""
        while begin < end:
            rows, count = min(end - begin, PULL_ROWS_MAX), 0
            for batch in self._rows(wire.ReadQueue(topic=topic, queue_id=queue_id, offset=begin, rows=rows)):
                count += batch.num_rows
                yield batch
            if not count:
                raise OutOfRange(f"queue {queue_id} of {topic!r} ends at {begin}, before {end}")
            begin += count

    def _rows(self, ticket: wire.Ticket) -> Iterator[pa.RecordBatch]:
        for batch in self._calls.batches(ticket):
            if batch.num_rows:
                yield batch


def group_statuses(endpoint: str, *, patience_s: float = PATIENCE_S) -> list[tuple[Group, wire.Status]]:
    """Return the groups to be read at an endpoint, and the status of each; one call where there is one group."""
    with Endpoint(endpoint, patience_s=patience_s) as broker:
        status = broker.status()
    groups = groups_of(status, endpoint)
    if len(groups) == 1:
        return [(groups[0], status)]
    found = []
    for group in groups:
        with Endpoint(group.endpoint, patience_s=patience_s) as broker:
            found.append((group, broker.status()))
    return found


def read_groups(endpoint: str) -> list[Group]:
    """Return the groups to be read at an endpoint."""
    with Endpoint(endpoint) as broker:
        return groups_of(broker.status(), endpoint)


# ---- a read that goes on --------------------------------------------------------------------------------------

# Rows of the log and of queues are numbered and never change, so a reader that remembers the last number can read on
# when the broker restarts meanwhile, and yield every row once. It waits as long as any call does.

READ_TRIES = 3

Read = Callable[[int], Iterator[pa.RecordBatch]]  # rows from a position on, in order
After = Callable[[pa.RecordBatch, int], int]  # the position behind a batch that began at one


def retrying_read(endpoint: Endpoint, read: Read, position: int, after: After) -> Iterator[pa.RecordBatch]:
    """Yield all batches of `read(position)`; Unavailable when the broker stays away."""
    broken = 0
    while True:
        try:
            for batch in read(position):
                position, broken = after(batch, position), 0
                yield batch
            return
        except Unavailable as error:
            broken += 1
            if broken > READ_TRIES:
                raise
            LOG.warning(
                "read broke off broker=%s at_seq=%d try=%d reason=%s", endpoint.uri, position, broken, error
            )
            endpoint.status()  # returns once the broker is back


def behind_last_seq(batch: pa.RecordBatch, _: int) -> int:
    """Return the position behind rows of the log, which must have their number."""
    return int(batch.column("seq")[-1].as_py()) + 1


def behind_rows(batch: pa.RecordBatch, position: int) -> int:
    """Return the position behind rows of a queue, which has one at each offset."""
    return position + int(batch.num_rows)


# ---- all groups -----------------------------------------------------------------------------------------------


class Connections:
    """Connections to all groups at an endpoint, kept open; each look asks anew which groups there are."""

    def __init__(self, endpoint: str) -> None:
        self._uri = endpoint
        self._opened: dict[str, Endpoint] = {}

    def close(self) -> None:
        """Let go of all connections."""
        for endpoint in self._opened.values():
            endpoint.close()
        self._opened = {}

    def broker(self, uri: str | None = None) -> Endpoint:
        """Return the connection: to the endpoint that was named, or to a group's own."""
        uri = uri or self._uri
        if uri not in self._opened:
            self._opened[uri] = Endpoint(uri)
        return self._opened[uri]

    def statuses(self) -> list[tuple[Group, wire.Status]]:
        """Return the groups there are now, and the status of each; one call where there is one group."""
        status = self.broker().status()
        groups = self._groups_of(status)
        if len(groups) == 1:
            return [(groups[0], status)]
        return [(group, self.broker(group.endpoint).status()) for group in groups]

    def groups(self) -> list[Group]:
        """Return the groups there are now."""
        return self._groups_of(self.broker().status())

    def _groups_of(self, status: wire.Status) -> list[Group]:
        groups = groups_of(status, self._uri)
        for uri in self._opened.keys() - {self._uri, *(group.endpoint for group in groups)}:
            self._opened.pop(uri).close()  # its group has another leader
        return groups

    def __getstate__(self) -> dict[str, Any]:
        # Tasks receive a copy; a connection is of no use to them.
        return {**self.__dict__, "_opened": {}}


# ---- a job at work --------------------------------------------------------------------------------------------------


class Lease:
    """Tells a broker every few seconds that a job is at work, for as long as `needed` says so."""

    def __init__(
        self,
        endpoint: str,
        job: str,
        grant: Callable[[Endpoint, int], None],
        needed: Callable[[], bool],
        *,
        lease_ms: int,
        renew_s: float,
        is_returned: bool = False,
    ) -> None:
        """`grant`: Endpoint.lease_compactor or its like. `is_returned`: the broker is told when none is needed."""
        self._endpoint, self._job, self._grant, self._needed = endpoint, job, grant, needed
        self._lease_ms, self._renew_s, self._is_returned = lease_ms, renew_s, is_returned
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        held = False
        while not self._stopped.wait(self._renew_s if held else LEASE_LOOK_S):
            needed = self._needed()
            if needed:
                self._tell(self._lease_ms)
            elif held and self._is_returned:
                self._tell(0)
            held = needed
        if held and self._is_returned:
            self._tell(0)

    def _tell(self, lease_ms: int) -> None:
        try:
            with Endpoint(self._endpoint, patience_s=0) as broker:
                self._grant(broker, lease_ms)
        except TimeballError as error:
            # Harmless: the broker does the work by itself once the lease has run out.
            LOG.warning("lease not renewed job=%s reason=%s", self._job, error)
