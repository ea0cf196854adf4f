"""The endpoint of a broker or a cluster: calls to it, reads that resume, its groups, and leases of jobs.

An endpoint is the address that the user gives. The pipeline reads all groups of the cluster at this address:

    grpc://a:7400               this broker, or all groups of the cluster if it is in one
    grpc://a:7400,b:7400        the same, through any of these nodes that answers
    grpc://a:7400#g2            only the group g2, on any node (the option `group` produces this form)

The status of a node lists the cluster's groups and the nodes of each (answers.Status.groups), so each query includes
groups that were added since the last one. Each group is read from its leader, to which followers forward requests.
Each group has its own row numbers, table and versions, so a row number or version is meaningful only together with
its group. If there is only one group, or if the broker is in no cluster, groups appear neither in columns nor in names.

Processes of the pipeline call a broker over the client's connection (client/calls.py). Every call is safe to repeat,
and is repeated for up to `patience_s` seconds. An attach contains its job and epoch, by which the broker recognises a
repeat. A repeated reserve only leaves unused sequence numbers. An error has the type that the broker raised. A broker
that cannot be reached raises `Unavailable`, so that a runner can distinguish "wait" from "give up".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.calls import Calls, translated
from timeball.io.clock import Clock
from timeball.model import answers, wire
from timeball.model.answers import ClusterGroup, Status
from timeball.model.errors import NotFound, OutOfRange, SetupError, TimeballError, Unavailable
from timeball.model.limits import PULL_ROWS_MAX
from timeball.model.message import TABLE_SCHEMA
from timeball.table import attachment as att

LOG = logging.getLogger("timeball.spark")

CALL_TIMEOUT_MS = 60_000
LONG_CALL_TIMEOUT_MS = 1_800_000
PATIENCE_S = 20.0  # enough for a restart: a broker with a million rows in its tail needs some seconds
LEASE_CHECK_S = 0.1  # interval at which a lease that is not held checks whether it is needed
COMPACTED_STRATEGY = "hour_log"  # the only strategy whose scheduled messages move to the pending table


# ---- calls to one broker --------------------------------------------------------------------------------------


class Endpoint:
    """A connection to one broker, or to the leader of one group of a cluster.

    Processes do not share a connection. Each task opens a separate one, which is cheap.

    If the endpoint is pinned to a group, the given node is asked for its group before the first call. If it is in
    another group, the connection goes to the nodes of the requested group instead. So no call reaches a wrong group.

    Each method raises the error that the broker raised, and Unavailable if no node answers for `patience_s` seconds.
    """

    def __init__(self, uri: str, *, patience_s: float = PATIENCE_S, clock: Clock | None = None) -> None:
        self.uri = uri
        addresses, self._group = split_endpoint(uri)
        self._patience_s, self._clock = patience_s, clock
        self._connection = self._connect(addresses)
        self._is_group_checked = not self._group

    def _connect(self, addresses: str) -> Calls:
        return Calls(addresses, CALL_TIMEOUT_MS, patience_s=self._patience_s, clock=self._clock)

    @property
    def _calls(self) -> Calls:
        """The connection to a node of the requested group. The first access checks the group of the given node.

        Raises NotFound if the cluster has no such group.
        """
        if not self._is_group_checked:
            status = self._ask_status(self._connection)
            if status.group != self._group:
                self._connection.close()
                group_endpoint = endpoint_of(self.uri, self._group, cluster_groups(status))
                self._connection = self._connect(split_endpoint(group_endpoint)[0])
            self._is_group_checked = True
        return self._connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def status(self) -> answers.Status:
        """Read the broker's status, such as the ends of its log, its watermark and the version of its table."""
        return self._ask_status(self._calls)

    @staticmethod
    def _ask_status(calls: Calls) -> answers.Status:
        return calls.action("status", wire.Nothing(), answers.Status)

    def reserve(self, rows: int) -> int:
        """Reserve `rows` consecutive sequence numbers. Returns the first of them."""
        return self._calls.action("reserve", wire.Reserve(rows=rows), dict[str, int])["first_seq"]

    def attach(self, attachment: att.Attachment) -> answers.Attached:
        """Add files to the pending table, in one step. The answer to a repeated attach has `repeated` set."""
        return self._calls.action("attach", attachment, answers.Attached)

    def cancel_ranges(self, ranges: Sequence[tuple[int, int]], reason: str = "") -> answers.RangesCancelled:
        """Cancel the pending messages in these ranges (first_seq, rows) of a bulk job. Safe to repeat.

        The broker cancels some hundred thousand messages per second, so this may take minutes.
        """
        body = wire.CancelRange(ranges=list(ranges), reason=reason)
        return self._calls.action("cancel_range", body, answers.RangesCancelled, LONG_CALL_TIMEOUT_MS)

    def campaigns(self, campaign: str | None = None) -> list[answers.Campaign]:
        """Read one campaign with its ranges, or all campaigns without ranges. Raises NotFound for an unknown id."""
        body = wire.Campaigns(campaign=campaign)
        return self._calls.action("campaigns", body, dict[str, list[answers.Campaign]])["campaigns"]

    def change_campaign(
        self,
        campaign: str,
        change: answers.CampaignChange,
        *,
        rows: int = 0,
        at_ms: int | None = None,
        shift: bool = False,
        groups: Sequence[str] = (),
    ) -> answers.Campaign:
        """Plan, pause, resume or cancel a campaign. Safe to repeat. Returns its state after the change.

        `rows`, `at_ms`, `groups`: of a plan (Campaign.plan). `shift`: a resume makes all messages later by the length
        of the pause. A resume writes all messages again that the pause holds back, so it may take minutes.
        """
        body = wire.ChangeCampaign(
            campaign=campaign, change=change, rows=rows, at_ms=at_ms, shift=shift, groups=list(groups)
        )
        return self._calls.action("campaign", body, answers.Campaign, LONG_CALL_TIMEOUT_MS)

    def drain(self, target: str, *, dry_run: bool = False) -> answers.Drained:
        """Move all pending messages of this group to the group `target`. Returns the progress. Safe to repeat."""
        return self._calls.action("drain", wire.Drain(heir=target, dry_run=dry_run), answers.Drained)

    def starts(self, from_seq: int, to_seq: int) -> list[answers.Start]:
        """List the starts of the broker whose first row is in from_seq <= seq < to_seq, with their times."""
        body = wire.Starts(from_seq=from_seq, to_seq=to_seq)
        return self._calls.action("starts", body, dict[str, list[answers.Start]])["starts"]

    def occurrences(self, from_ms: int, to_ms: int, width_ms: int) -> answers.RecurringCounts:
        """Count the occurrences of recurring schedules due in [from_ms, to_ms) that are no messages yet.

        The counts are by topic and by interval of `width_ms`.
        """
        body = wire.Occurrences(from_ms=from_ms, to_ms=to_ms, width_ms=width_ms)
        return self._calls.action("occurrences", body, answers.RecurringCounts)

    def schedules(self) -> Iterator[answers.RecurringSchedule]:
        """Yield the recurring schedules by name."""
        next_page: str | None = ""
        while next_page is not None:
            body = wire.Schedules(page=next_page)
            page = self._calls.action("schedules", body, answers.RecurringSchedules)
            yield from page.schedules
            next_page = page.next_page

    def selections(self) -> list[dict[str, Any]]:
        """Read the bulk operations: the id, the state and the facts of each, the newest last."""
        return self._calls.action("selections", wire.Selections(), dict[str, list[dict[str, Any]]])[
            "selections"
        ]

    def lease_dispatcher(self, lease_ms: int) -> None:
        """Announce to the broker that a dispatcher sends it due messages for the next `lease_ms`. 0 ends the lease."""
        self._calls.action("dispatcher", wire.DispatcherLease(lease_ms=lease_ms), dict[str, Any])

    def lease_compactor(self, lease_ms: int) -> None:
        """Announce to the broker that this job compacts in its place for the next `lease_ms`."""
        self._calls.action("compactor", wire.Lease(lease_ms=lease_ms), dict[str, Any])

    def release(self, batches: Iterable[pa.RecordBatch]) -> list[answers.ReleaseAnswer]:
        """Send batches of due rows (TABLE_SCHEMA) for release. Returns one answer per batch.

        The stream stays open while `batches` waits before it yields the next batch.
        """
        released: list[answers.ReleaseAnswer] = []
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
                    released.append(msgspec.json.decode(metadata, type=answers.ReleaseAnswer))
        return released

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

        `kinds`, `columns`: None for all. `coalesce_rows`: the broker joins smaller batches up to this number of rows.
        `placed`: True for only rows with a queue position, False for only rows without one, None for both.
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
        """Read {queue: (first kept offset, next offset)} of a topic. Raises NotFound for an unknown topic."""
        body = wire.Queues(topic=topic)
        ranges = self._calls.action("queues", body, dict[str, dict[int, answers.QueueRange]])["queues"]
        return {queue: (offsets.min, offsets.max) for queue, offsets in ranges.items()}

    def read_queue(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield rows begin <= offset < end of a queue, in order, in READ_SCHEMA.

        Raises OutOfRange if the queue is shorter.
        """
        while begin < end:
            rows, count = min(end - begin, PULL_ROWS_MAX), 0
            for batch in self._rows(wire.ReadQueue(topic=topic, queue_id=queue_id, offset=begin, rows=rows)):
                count += batch.num_rows
                yield batch
            if not count:
                raise OutOfRange(f"queue {queue_id} of {topic!r} ends at {begin}, before {end}")
            begin += count

    def _rows(self, ticket: wire.Ticket) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a read that have rows."""
        for batch in self._calls.batches(ticket):
            if batch.num_rows:
                yield batch


def group_statuses(endpoint: str, *, patience_s: float = PATIENCE_S) -> list[tuple[Group, answers.Status]]:
    """Read the groups at an endpoint with the status of each. A single group costs only one call."""
    with Endpoint(endpoint, patience_s=patience_s) as broker:
        status = broker.status()
    groups = groups_of(status, endpoint)
    if len(groups) == 1:
        return [(groups[0], status)]
    statuses = []
    for group in groups:
        with Endpoint(group.endpoint, patience_s=patience_s) as broker:
            statuses.append((group, broker.status()))
    return statuses


def read_groups(endpoint: str) -> list[Group]:
    """Ask a node which groups to read at an endpoint."""
    with Endpoint(endpoint) as broker:
        return groups_of(broker.status(), endpoint)


# ---- a read that resumes after interruptions ------------------------------------------------------------------
# Rows of the log and of queues have numbers and never change. So a reader that remembers the last number can continue
# after a restart of the broker, and yields every row exactly once. It waits for the broker as long as any call does.

READ_TRIES = 3

Read = Callable[[int], Iterator[pa.RecordBatch]]  # position -> the rows from there on, in order
# (batch, its first position) -> the position after the batch.
PositionAfter = Callable[[pa.RecordBatch, int], int]


def retrying_read(
    endpoint: Endpoint, read: Read, position: int, after: PositionAfter
) -> Iterator[pa.RecordBatch]:
    """Yield all batches of `read(position)`. After an interruption, read again from the end of the last batch.

    `after(batch, begin)` computes the position after a batch that begins at `begin`. Raises Unavailable when the broker
    does not come back, or after READ_TRIES retries without a batch between them.
    """
    failures = 0
    while True:
        try:
            for batch in read(position):
                position, failures = after(batch, position), 0
                yield batch
            return
        except Unavailable as error:
            failures += 1
            if failures > READ_TRIES:
                raise
            LOG.warning(
                "read was interrupted broker=%s at_seq=%d try=%d reason=%s",
                endpoint.uri,
                position,
                failures,
                error,
            )
            endpoint.status()  # blocks until the broker is back, or raises


def after_last_seq(batch: pa.RecordBatch, _: int) -> int:
    """Compute the position after a batch of the log, from its column `seq`."""
    return int(batch.column("seq")[-1].as_py()) + 1


def after_rows(batch: pa.RecordBatch, position: int) -> int:
    """Compute the position after a batch of a queue, which has a row at each offset."""
    return position + int(batch.num_rows)


# ---- connections to all groups --------------------------------------------------------------------------------


class Connections:
    """Connections to all groups at an endpoint, opened on first use. Each query asks again which groups exist."""

    def __init__(self, endpoint: str) -> None:
        self._uri = endpoint
        self._opened: dict[str, Endpoint] = {}

    def close(self) -> None:
        """Close all connections. A later use opens new ones."""
        for endpoint in self._opened.values():
            endpoint.close()
        self._opened = {}

    def broker(self, uri: str | None = None) -> Endpoint:
        """Get the connection to `uri`, by default to the endpoint itself. Opens it on first use."""
        uri = uri or self._uri
        if uri not in self._opened:
            self._opened[uri] = Endpoint(uri)
        return self._opened[uri]

    def statuses(self) -> list[tuple[Group, answers.Status]]:
        """Read the current groups with the status of each. A single group costs only one call."""
        status = self.broker().status()
        groups = self._groups_of(status)
        if len(groups) == 1:
            return [(groups[0], status)]
        return [(group, self.broker(group.endpoint).status()) for group in groups]

    def groups(self) -> list[Group]:
        """Read the current groups."""
        return self._groups_of(self.broker().status())

    def _groups_of(self, status: answers.Status) -> list[Group]:
        """List the groups in a status, and close connections to endpoints that no group has any more."""
        groups = groups_of(status, self._uri)
        # The endpoint of a group changes with its nodes.
        for uri in self._opened.keys() - {self._uri, *(group.endpoint for group in groups)}:
            self._opened.pop(uri).close()
        return groups

    def __getstate__(self) -> dict[str, Any]:
        # Spark sends a copy to each task. A task opens its own connections.
        return {**self.__dict__, "_opened": {}}


# ---- leases of running jobs -----------------------------------------------------------------------------------


class Lease:
    """Holds a lease at a broker while `needed()` is true, with its own thread. Use as a context manager."""

    def __init__(
        self,
        endpoint: str,
        job: str,
        grant: Callable[[Endpoint, int], None],
        needed: Callable[[], bool],
        *,
        lease_ms: int,
        renew_s: float,
        ends_when_unneeded: bool = False,
    ) -> None:
        """`grant(endpoint, lease_ms)` renews the lease for `lease_ms`, for example Endpoint.lease_compactor.

        `job`: its name, for log lines. `renew_s`: the interval between two renewals. `ends_when_unneeded`: end the
        lease when `needed()` becomes false, instead of letting it expire.
        """
        self._endpoint, self._job, self._grant, self._needed = endpoint, job, grant, needed
        self._lease_ms, self._renew_s, self._is_returned = lease_ms, renew_s, ends_when_unneeded
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        """Renew the lease while it is needed, until the context manager ends."""
        is_held = False
        while not self._stopped.wait(self._renew_s if is_held else LEASE_CHECK_S):
            is_needed = self._needed()
            if is_needed:
                self._send_lease(self._lease_ms)
            elif is_held and self._is_returned:
                self._send_lease(0)
            is_held = is_needed
        if is_held and self._is_returned:
            self._send_lease(0)

    def _send_lease(self, lease_ms: int) -> None:
        """Renew the lease, or end it with 0. An error is only logged."""
        try:
            with Endpoint(self._endpoint, patience_s=0) as broker:
                self._grant(broker, lease_ms)
        except TimeballError as error:
            # Harmless: after the lease has expired, the broker does the work itself.
            LOG.warning("lease not renewed job=%s reason=%s", self._job, error)


# ---- endpoints and their groups -------------------------------------------------------------------------------

GROUP = "group"  # name of the column and of the option
PLACEHOLDER = "{group}"  # replaced by the group's name in the URI of a table that each group has


class Group(NamedTuple):
    """A group, and the endpoint at which it is read. The name is "" for a broker that is in no cluster."""

    name: str
    endpoint: str


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into its addresses and the group that it is pinned to, which is "" for all groups."""
    addresses, _, group = endpoint.partition("#")
    return addresses, group


def pin_to_group(endpoint: str, group: str) -> str:
    """Pin an endpoint to one group."""
    return f"{split_endpoint(endpoint)[0]}#{group}"


def query_name(job: str, endpoint: str) -> str:
    """Build the name of a job's query. It includes the group if the endpoint is pinned to one."""
    _, group = split_endpoint(endpoint)
    return f"{job}-{group}" if group else job


def cluster_groups(status: Status) -> list[ClusterGroup]:
    """Get all groups of the cluster from a broker's status. Empty for a broker that is in no cluster.

    Raises Unavailable while a new leader has not read the groups yet.
    """
    if status.groups is None:
        raise Unavailable("the broker leads, and has not read yet which other groups there are; try again")
    return status.groups


def endpoint_of(endpoint: str, group: str, groups: Sequence[ClusterGroup]) -> str:
    """Build the endpoint of a group, with the addresses of all its nodes. Raises NotFound for an unknown group."""
    for cluster_group in groups:
        if cluster_group.group == group:
            scheme = endpoint.partition("://")[0]
            return f"{scheme}://{','.join(cluster_group.addresses)}#{group}"
    names = ", ".join(cluster_group.group for cluster_group in groups)
    available = f"there are {names}" if names else "this broker belongs to no cluster; leave the group out"
    raise NotFound(f"no group {group!r}: {available}")


def groups_of(status: Status, endpoint: str) -> list[Group]:
    """List the groups to read at an endpoint. `status`: the status of its broker, whose own group comes first.

    If the endpoint is pinned to a group, only this group is listed. If the cluster has only one group, the group's
    endpoint is the address that the user gave. Raises NotFound for a group that does not exist, and Unavailable.
    """
    addresses, pinned_group = split_endpoint(endpoint)
    groups = cluster_groups(status)
    if pinned_group:
        return [Group(pinned_group, endpoint_of(endpoint, pinned_group, groups))]
    if len(groups) < 2:
        return [Group(status.group, addresses)]
    names = sorted((each.group for each in groups), key=lambda name: (name != status.group, name))
    return [Group(name, endpoint_of(endpoint, name, groups)) for name in names]


def group_table_uri(name: str, uri: str | None, group: str, groups: int) -> str | None:
    """Replace `{group}` in the URI of a table by the name of the group. Returns None for no URI.

    `name`: the option that contains the URI, for the error. `groups`: the number of groups. Raises SetupError if there
    are several groups but no `{group}` in the URI, because the groups would share one table.
    """
    if uri is None:
        return None
    if groups > 1 and PLACEHOLDER not in uri:
        raise SetupError(
            f"{name}={uri}: each of the {groups} groups has a table of its own; write {PLACEHOLDER} in place of "
            "the group's name"
        )
    return uri.replace(PLACEHOLDER, group)
