"""Group commit: requests that arrive during a commit share the next commit.

Reading the log, admitting rows and appending them costs almost the same for one row as for a hundred. So requests are
collected until the previous commit is durable, and then form one batch. There is no timer. A lone request is sent at
the end of the loop's turn, and a thousand requests that arrive meanwhile share one commit.

    put -> (the previous commit is durable, or a batch is full) -> begin -> durable -> answer, or refuse

Three rules apply to the sends of all edges and to the commits of transactions:

    bytes      HELD_BYTES_MAX limits the bytes of all requests that wait or are being written. More raise OverLimit
    batches    a batch has at most BATCH_BYTES_MAX and BATCH_ROWS_MAX. A full batch does not wait for the previous
               commit. A batch with ENOUGH_ROWS gains little by growing. It begins at once if fewer than AHEAD_MAX
               batches are under way, so that the disk works while the loop reads more requests
    refusals   if a whole batch is refused, its requests begin again one by one, so only the bad request is refused

Invariant: each request that was put is answered or refused exactly once, even if the log or the broker fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from timeball.broker.accepting.admission import ParsedSends
from timeball.broker.accepting.appender import Accepted
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable

logger = logging.getLogger(__name__)

BATCH_BYTES_MAX = 32 * 1024 * 1024
BATCH_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
ENOUGH_ROWS = 1_024  # with this many rows, the fixed cost of a batch is a tenth of the cost of its rows
AHEAD_MAX = 2  # batches under way: the batch that the disk writes, and the next batch
# The limit for the bytes of the requests of all edges together that wait or are being written.
HELD_BYTES_MAX = 4 * BATCH_BYTES_MAX
# A larger batch of columns does not share a commit: copying it into a shared batch would cost more.
SMALL_ROWS, SMALL_BYTES = 256, 256 * 1024

T = TypeVar("T")
R = TypeVar("R")

# The result of `begin`, which `answer` receives, and a future that is done when the batch is durable.
BegunBatch = tuple[Any, "asyncio.Future[Any]"]
Accept = Callable[[ParsedSends, Caller], tuple[Accepted, "asyncio.Future[int]"]]


class _Batch(Generic[T]):
    """Requests with the same key that begin together."""

    __slots__ = ("key", "requests", "rows", "size_bytes")

    def __init__(self) -> None:
        self.requests: list[T] = []
        self.rows = self.size_bytes = 0
        self.key: Hashable = None


class Batcher(Generic[T]):
    """Collects requests into batches for one function, `begin`. Belongs to the event loop.

    Consecutive requests with the same key share a batch. A request without a key (None) is a batch of its own. With
    `is_pipelined`, a full batch begins although another is under way. `apart` splits a request into requests that can
    be refused separately.
    """

    def __init__(
        self,
        begin: Callable[[list[T]], BegunBatch],
        answer: Callable[[list[T], Any], None],
        refuse: Callable[[list[T], BaseException], None],
        *,
        rows_max: int | None = None,
        is_pipelined: bool = True,
        apart: Callable[[T], Sequence[T]] = lambda request: (request,),
    ) -> None:
        self._begin_batch, self._answer, self._refuse, self._apart = begin, answer, refuse, apart
        self._rows_max, self._is_pipelined = rows_max, is_pipelined
        self._loop = asyncio.get_running_loop()
        self._full: deque[_Batch[T]] = deque()  # batches that accept no more requests, in order
        self._open: _Batch[T] = _Batch()  # the batch to which `put` adds
        self.held_bytes = 0  # bytes of requests that wait or are under way
        self._under_way = 0  # the number of batches that have begun and are not durable
        self._is_scheduled = False  # `_drain` will be called soon

    def put(self, request: T, rows: int = 1, size_bytes: int = 0, key: Hashable = True) -> None:
        """Add a request of `rows` rows and `size_bytes`. `answer` or `refuse` is called for it later.

        Raises OverLimit if HELD_BYTES_MAX is exceeded.
        """
        held_bytes, batch = self.held_bytes + size_bytes, self._open
        # A lone request of any size is accepted, because its edge has limited its size.
        if held_bytes > HELD_BYTES_MAX and self.held_bytes:
            raise OverLimit(
                f"{self.held_bytes} bytes of messages wait for the disk; send this one again later"
            )
        self.held_bytes = held_bytes
        rows_max = self._rows_max or BATCH_ROWS_MAX
        if batch.requests:
            overflows = batch.rows + rows > rows_max or batch.size_bytes + size_bytes > BATCH_BYTES_MAX
            if overflows or key != batch.key or key is None:
                self._full.append(batch)
                batch = self._open = _Batch()
                # Full batches gain nothing by growing, so they need not wait for the previous commit.
                if overflows and self._is_pipelined:
                    self._drain_full()
        batch.requests.append(request)
        batch.rows += rows
        batch.size_bytes += size_bytes
        batch.key = key
        is_full = key is None or batch.rows >= rows_max or batch.size_bytes >= BATCH_BYTES_MAX
        # Inlined, because every request passes here, and a call would cost as much as the comparisons.
        if self._is_pipelined and (is_full or (batch.rows >= ENOUGH_ROWS and self._under_way < AHEAD_MAX)):
            self._drain()
        elif not (self._is_scheduled or self._under_way):
            self._is_scheduled = True
            # Begin at the end of this turn of the loop, so that requests of other connections share the batch.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Begin all full batches and the open one. Without `is_pipelined` only one, if none is under way."""
        self._is_scheduled = False
        self._drain_full()
        batch = self._open
        if batch.requests and (self._is_pipelined or not self._under_way):
            self._open = _Batch()
            self._begin(batch.requests, batch.size_bytes)

    def _drain_full(self) -> None:
        """Begin the full batches."""
        while self._full and (self._is_pipelined or not self._under_way):
            batch = self._full.popleft()
            self._begin(batch.requests, batch.size_bytes)

    def _begin(self, requests: list[T], size_bytes: int) -> None:
        """Begin a batch of `size_bytes`."""
        try:
            result, durable = self._begin_batch(requests)
        except Exception as error:  # any error: refuse these requests, and continue with the next batch
            self._retry_singly_or_refuse(requests, size_bytes, error)
        else:
            # Count only batches that have begun: a refused batch must not delay other batches.
            self._under_way += 1
            durable.add_done_callback(partial(self._on_batch_end, requests, size_bytes, result))

    def _on_batch_end(
        self, requests: list[T], size_bytes: int, result: Any, durable: asyncio.Future[Any]
    ) -> None:
        """Answer or refuse the requests of a batch that has ended, and begin or schedule the next batch."""
        self._under_way -= 1
        failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
        if failure is not None:
            self._retry_singly_or_refuse(requests, size_bytes, failure)
        else:
            self.held_bytes -= size_bytes
            try:
                self._answer(requests, result)
            except Exception as error:  # no client has an answer yet, and none may wait for ever
                logger.exception("requests not answered requests=%d reason=%s", len(requests), error)
                self._refuse(requests, error)
        if self._is_pipelined and self._open.rows >= ENOUGH_ROWS and self._under_way < AHEAD_MAX:
            self._drain()
        elif (self._open.requests or self._full) and not (self._under_way or self._is_scheduled):
            # Only after the next turn of the loop, which reads the requests that arrived during this work, so that they
            # share the batch. The bottleneck is the loop and not the disk, and a batch costs the loop the same for one
            # row as for fifty.
            self._is_scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._drain)

    def _retry_singly_or_refuse(self, requests: list[T], size_bytes: int, error: BaseException) -> None:
        """Begin the requests of a refused batch again one by one, so that only the bad request is refused.

        A single request is refused. After other errors, such as a stopped log, all requests are refused at once.
        """
        if isinstance(error, RequestError | OverLimit):
            single_requests = [single for request in requests for single in self._apart(request)]
            if len(single_requests) > 1:
                for request in single_requests:
                    self._begin([request], size_bytes)
                    size_bytes = 0  # all bytes stay counted until the first request has ended
                return
        self.held_bytes -= size_bytes
        self._refuse(requests, error)


class AsyncBatcher(Generic[T, R]):
    """A batcher for a coroutine, `handle`, one batch at a time. It returns a result or an error for each request."""

    def __init__(
        self, handle: Callable[[list[T]], Awaitable[Sequence[R | TimeballError]]], rows_max: int
    ) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Future[Sequence[R | TimeballError]]] = set()
        self._batcher: Batcher[tuple[T, asyncio.Future[R]]] = Batcher(
            self._begin, _set_results, _set_error, rows_max=rows_max, is_pipelined=False
        )

    def put(self, request: T, rows: int = 1) -> asyncio.Future[R]:
        """Add a request that counts as `rows` of `rows_max`.

        The future receives the result or the error of the request when its batch has ended.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._batcher.put((request, future), rows)
        return future

    def _begin(self, requests: list[tuple[T, asyncio.Future[R]]]) -> BegunBatch:
        """Call `handle` for a batch, as a task. The task is both the result and the end of the batch."""
        work = self._handle([request for request, _ in requests])
        # Stored, because the loop holds only weak references to tasks.
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)
        return task, task


def _set_results(
    requests: list[tuple[T, asyncio.Future[R]]], task: asyncio.Task[Sequence[R | TimeballError]]
) -> None:
    """Give each request the result or the error that `handle` has returned for it."""
    for (_, future), result in zip(requests, task.result(), strict=True):
        settle(future, result)


def _set_error(requests: list[tuple[T, asyncio.Future[R]]], error: BaseException) -> None:
    """Give all requests of a batch the same error."""
    for _, future in requests:
        settle(future, error)


def settle(future: asyncio.Future[R], result: R | BaseException) -> None:
    """Set a future's result or error, unless its caller has cancelled it."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


# ---- sends --------------------------------------------------------------------------------------------------


class Edge(Protocol):
    """The side of a protocol edge that answers the clients whose messages it has put."""

    def answer(self, pieces: list[Any], accepted: Accepted) -> None:
        """Answer the clients. The first row of a piece has the number `accepted.first_seq + piece.first_row`."""

    def refuse(self, pieces: list[Any], error: BaseException) -> None:
        """Report the error to the clients of these pieces."""


class Piece(msgspec.Struct, gc=False):
    """The messages of one request. They stay together in one batch, so all of them are in the log or none is."""

    edge: Edge
    rows: Any  # a list of SendRows or a batch of SEND_COLUMNS; subclasses have other types
    count: int
    size_bytes: int
    first_row: int  # the index of its first row in the shared batch; set when the batch begins
    caller: Any  # a Caller, for whom the policy checks the topics. None: the edge has made this check

    def join(self, pieces: Sequence[Piece]) -> ParsedSends:
        """Concatenate the rows of these pieces, which are not columns. `self` is the first of them."""
        return self.rows if len(pieces) == 1 else [row for piece in pieces for row in piece.rows]

    def apart(self) -> Sequence[Piece]:
        """Split the piece into pieces that can be refused separately."""
        return (self,)


class Ingress:
    """Collects the sends of all edges into batches for one function, `accept`. Belongs to the event loop."""

    def __init__(self, accept: Accept) -> None:
        self.accept = accept
        self._batcher: Batcher[Piece] = Batcher(
            self._begin, answer, refuse, apart=lambda piece: piece.apart()
        )

    @property
    def held_bytes(self) -> int:
        """The bytes of the sends that wait or are being written."""
        return self._batcher.held_bytes

    def put(self, piece: Piece) -> None:
        """Add a piece. Its edge receives the outcome later. Raises OverLimit if too many bytes wait."""
        caller = piece.caller
        # Requests of one caller share a batch and its policy check. Requests that were checked already have another
        # key, because a refused topic would refuse them too. Columns can be joined only if they have the same schema.
        key: Hashable = True if caller is None else (caller,)
        if isinstance(piece.rows, pa.RecordBatch):
            is_small = piece.count <= SMALL_ROWS and piece.size_bytes <= SMALL_BYTES
            key = (piece.rows.schema, caller) if is_small else None
        self._batcher.put(piece, piece.count, piece.size_bytes, key)

    def _begin(self, pieces: list[Piece]) -> BegunBatch:
        return self.accept(joined(pieces), pieces[0].caller or ANONYMOUS)


def joined(pieces: list[Piece]) -> ParsedSends:
    """Concatenate the rows of pieces, and set the `first_row` of each piece."""
    first_row, first = 0, pieces[0]
    for piece in pieces:
        piece.first_row = first_row
        first_row += piece.count
    if isinstance(first.rows, pa.RecordBatch):
        return first.rows if len(pieces) == 1 else pa.concat_batches([piece.rows for piece in pieces])
    return first.join(pieces)


def answer(pieces: list[Piece], accepted: Accepted) -> None:
    """Let the edges of these pieces answer their clients."""
    for edge, edge_pieces in _group_by_edge(pieces):
        try:
            edge.answer(edge_pieces, accepted)
        except Exception as error:  # an error of one edge must not affect other edges
            logger.exception("sends not answered sends=%d reason=%s", len(edge_pieces), error)
            edge.refuse(edge_pieces, error)


def refuse(pieces: list[Piece], error: BaseException) -> None:
    """Let the edges of these pieces report the error to their clients."""
    for edge, edge_pieces in _group_by_edge(pieces):
        edge.refuse(edge_pieces, error)


def _group_by_edge(pieces: list[Piece]) -> list[tuple[Edge, list[Piece]]]:
    """Group pieces by edge, in their order."""
    first = pieces[0].edge
    if all(piece.edge is first for piece in pieces):  # the usual case
        return [(first, pieces)]
    by_edge: dict[int, tuple[Edge, list[Piece]]] = {}
    for piece in pieces:
        by_edge.setdefault(id(piece.edge), (piece.edge, []))[1].append(piece)
    return list(by_edge.values())
