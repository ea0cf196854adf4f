"""The batcher: requests that arrive during a commit share the next commit.

Reading the log, admitting rows and appending them costs almost the same for one row as for a hundred. So requests are
collected until the previous commit is durable, and then form one batch. There is no timer. A lone request is sent at
the end of the loop's turn, and a thousand requests that arrive meanwhile share one commit.

    put -> (the previous commit is durable, or a batch is full) -> begin -> durable -> answer, or refuse

Three rules apply to all edges and to the ends of transactions:

    bytes      there is one limit for the bytes of all requests that wait or are being written; beyond it: OverLimit
    one batch  has at most BATCH_BYTES_MAX and BATCH_ROWS_MAX; a full batch does not wait for the previous commit.
               A batch with ENOUGH_ROWS gains little by growing: it begins within the turn if the disk has no other
               batch ready after the current one, so the disk works while the rest is read
    refused    if a whole batch is refused, its requests begin again one by one, so only the bad one is refused

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

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.small_batch import Sends
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable

logger = logging.getLogger(__name__)

BATCH_BYTES_MAX = 32 * 1024 * 1024
BATCH_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
ENOUGH_ROWS = 1_024  # with this many rows, the fixed cost of a batch is a tenth of the cost of its rows
AHEAD_MAX = 2  # batches under way: one that the disk writes, and one that is ready for it
# Limit for all edges together: the bytes that clients can make the broker hold.
HELD_BYTES_MAX = 4 * BATCH_BYTES_MAX
# A larger batch of columns gains nothing by sharing: copying it beside others would cost more.
SMALL_ROWS, SMALL_BYTES = 256, 256 * 1024

T = TypeVar("T")
R = TypeVar("R")

# The argument of `answer`, and a future that is done when it is durable.
Begun = tuple[Any, "asyncio.Future[Any]"]
Accept = Callable[[Sends, Caller], tuple[Accepted, "asyncio.Future[int]"]]


class _Batch(Generic[T]):
    """Requests with the same key that begin together."""

    __slots__ = ("key", "requests", "rows", "size_bytes")

    def __init__(self) -> None:
        self.requests: list[T] = []
        self.rows = self.size_bytes = 0
        self.key: Hashable = None


class Batcher(Generic[T]):
    """Collects requests for one function `begin`. Belongs to the event loop.

    Neighbouring requests with the same key share a batch. A request without a key (None) is a batch alone, and waits
    for no commit. `is_pipelined` allows a full batch to begin while another is under way. `apart` splits a request into
    the requests that can be refused separately.
    """

    def __init__(
        self,
        begin: Callable[[list[T]], Begun],
        answer: Callable[[list[T], Any], None],
        refuse: Callable[[list[T], BaseException], None],
        *,
        rows_max: int | None = None,
        is_pipelined: bool = True,
        apart: Callable[[T], Sequence[T]] = lambda request: (request,),
    ) -> None:
        self._start, self._answer, self._refuse, self._apart = begin, answer, refuse, apart
        self._rows_max, self._is_pipelined = rows_max, is_pipelined
        self._loop = asyncio.get_running_loop()
        self._full: deque[_Batch[T]] = deque()  # batches that accept no more requests, in order
        self._open: _Batch[T] = _Batch()
        self.held_bytes = 0  # bytes of requests that wait or are under way
        self._under_way = 0  # batches
        self._is_scheduled = False

    def put(self, request: T, rows: int = 1, size_bytes: int = 0, key: Hashable = True) -> None:
        """Add a request. `answer` or `refuse` is called for it later. Raises OverLimit if too many bytes wait."""
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
            # Begin at the end of this turn of the loop, so that requests that other connections sent meanwhile share
            # the batch.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_scheduled = False
        self._drain_full()
        batch = self._open
        if batch.requests and (self._is_pipelined or not self._under_way):
            self._open = _Batch()
            self._begin(batch.requests, batch.size_bytes)

    def _drain_full(self) -> None:
        while self._full and (self._is_pipelined or not self._under_way):
            batch = self._full.popleft()
            self._begin(batch.requests, batch.size_bytes)

    def _begin(self, requests: list[T], size_bytes: int) -> None:
        try:
            begun, durable = self._start(requests)
        except Exception as error:  # any error: refuse these requests, and continue with the next ones
            self._failed(requests, size_bytes, error)
        else:
            # Count only batches that have begun: a refused batch is over and must not delay others.
            self._under_way += 1
            durable.add_done_callback(partial(self._ended, requests, size_bytes, begun))

    def _ended(self, requests: list[T], size_bytes: int, begun: Any, durable: asyncio.Future[Any]) -> None:
        self._under_way -= 1
        failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
        if failure is not None:
            self._failed(requests, size_bytes, failure)
        else:
            self.held_bytes -= size_bytes
            try:
                self._answer(requests, begun)
            except Exception as error:  # nothing was written to the clients yet, and none may wait for ever
                logger.exception("requests not answered requests=%d reason=%s", len(requests), error)
                self._refuse(requests, error)
        if self._is_pipelined and self._open.rows >= ENOUGH_ROWS and self._under_way < AHEAD_MAX:
            self._drain()
        elif (self._open.requests or self._full) and not (self._under_way or self._is_scheduled):
            # Not at once: first read the requests that arrived during this work, so that they share the batch. The loop
            # is the bottleneck, not the disk, and a batch costs the loop the same for one row as for fifty.
            self._is_scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._drain)

    def _failed(self, requests: list[T], size_bytes: int, error: BaseException) -> None:
        # Begin again one by one, so that one bad request does not refuse the others. If the log has stopped, all are
        # refused at once.
        if isinstance(error, RequestError | OverLimit):
            alone = [part for request in requests for part in self._apart(request)]
            if len(alone) > 1:
                for request in alone:
                    self._begin([request], size_bytes)
                    size_bytes = 0  # all bytes stay counted until the first request has ended
                return
        self.held_bytes -= size_bytes
        self._refuse(requests, error)


class AsyncBatcher(Generic[T, R]):
    """A batcher for a coroutine. `handle` returns a result for each request, or an error for that request alone."""

    def __init__(
        self, handle: Callable[[list[T]], Awaitable[Sequence[R | TimeballError]]], rows_max: int
    ) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Future[Sequence[R | TimeballError]]] = set()
        self._batcher: Batcher[tuple[T, asyncio.Future[R]]] = Batcher(
            self._begin, _set_results, _set_error, rows_max=rows_max, is_pipelined=False
        )

    def put(self, request: T, rows: int = 1) -> asyncio.Future[R]:
        """Add a request. The future has its result when its batch has ended. `rows` is its share of `rows_max`."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._batcher.put((request, future), rows)
        return future

    def _begin(self, requests: list[tuple[T, asyncio.Future[R]]]) -> Begun:
        handled = self._handle([request for request, _ in requests])
        # The loop holds only weak references to tasks.
        self._tasks.add(task := asyncio.ensure_future(handled))
        task.add_done_callback(self._tasks.discard)
        return task, task


def _set_results(
    requests: list[tuple[T, asyncio.Future[R]]], task: asyncio.Task[Sequence[R | TimeballError]]
) -> None:
    for (_, future), result in zip(requests, task.result(), strict=True):
        settle(future, result)


def _set_error(requests: list[tuple[T, asyncio.Future[R]]], error: BaseException) -> None:
    for _, future in requests:
        settle(future, error)


def settle(future: asyncio.Future[R], result: R | BaseException) -> None:
    """Set a future's result or error. Ignores a future that is done, because its caller has gone away."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


# ---- sends --------------------------------------------------------------------------------------------------


class Edge(Protocol):
    """The edge that has put pieces, and that answers their clients."""

    def answer(self, pieces: list[Any], accepted: Accepted) -> None:
        """Answer the clients. The rows of each piece begin at number `accepted.first_seq + piece.first_row`."""

    def refuse(self, pieces: list[Any], error: BaseException) -> None:
        """Report the error to the clients of these pieces."""


class Piece(msgspec.Struct, gc=False):
    """The messages of one request. They stay together in one batch, so all of them are in the log or none is.

    `rows` is a list of SendRows or a batch of SEND_COLUMNS. The policy checks their topics for `caller`. None means
    that it has checked them already.
    """

    edge: Edge
    rows: Any
    count: int
    size_bytes: int
    first_row: int  # position of its first row in the shared batch; set when the batch begins
    caller: Any

    def join(self, pieces: Sequence[Piece]) -> Sends:
        """Concatenate the rows of these pieces. `self` is the first of them."""
        return self.rows if len(pieces) == 1 else [row for piece in pieces for row in piece.rows]

    def apart(self) -> Sequence[Piece]:
        """Split the piece into pieces that can be refused separately."""
        return (self,)


class Ingress:
    """Collects the sends of all edges for one function, `accept`. Belongs to the event loop."""

    def __init__(self, accept: Accept) -> None:
        self.accept = accept
        self._batcher: Batcher[Piece] = Batcher(
            self._begin, answer, refuse, apart=lambda piece: piece.apart()
        )

    @property
    def held_bytes(self) -> int:
        """The bytes that wait or are being written."""
        return self._batcher.held_bytes

    def put(self, piece: Piece) -> None:
        """Add a piece. Its edge receives the outcome later. Raises OverLimit."""
        caller = piece.caller
        # Requests of one caller share one policy check. They do not share it with requests that were checked already,
        # since a refused topic would also refuse those. Only columns of one schema can be joined.
        key: Hashable = True if caller is None else (caller,)
        if isinstance(piece.rows, pa.RecordBatch):
            is_small = piece.count <= SMALL_ROWS and piece.size_bytes <= SMALL_BYTES
            key = (piece.rows.schema, caller) if is_small else None
        self._batcher.put(piece, piece.count, piece.size_bytes, key)

    def _begin(self, pieces: list[Piece]) -> Begun:
        return self.accept(joined(pieces), pieces[0].caller or ANONYMOUS)


def joined(pieces: list[Piece]) -> Sends:
    """Concatenate the rows of pieces, and set `first_row` of each, by which its edge finds its rows."""
    at, first = 0, pieces[0]
    for piece in pieces:
        piece.first_row = at
        at += piece.count
    if isinstance(first.rows, pa.RecordBatch):
        return first.rows if len(pieces) == 1 else pa.concat_batches([piece.rows for piece in pieces])
    return first.join(pieces)


def answer(pieces: list[Piece], accepted: Accepted) -> None:
    """Let the edges of these pieces answer their clients."""
    for edge, mine in _by_edge(pieces):
        try:
            edge.answer(mine, accepted)
        except Exception as error:  # an error of one edge must not affect the others
            logger.exception("sends not answered sends=%d reason=%s", len(mine), error)
            edge.refuse(mine, error)


def refuse(pieces: list[Piece], error: BaseException) -> None:
    """Let the edges of these pieces report the error to their clients."""
    for edge, mine in _by_edge(pieces):
        edge.refuse(mine, error)


def _by_edge(pieces: list[Piece]) -> list[tuple[Edge, list[Piece]]]:
    first = pieces[0].edge
    if all(piece.edge is first for piece in pieces):
        return [(first, pieces)]
    found: dict[int, tuple[Edge, list[Piece]]] = {}
    for piece in pieces:
        found.setdefault(id(piece.edge), (piece.edge, []))[1].append(piece)
    return list(found.values())
