"""The batcher: requests that come while a commit is under way share the next one.

To read the log, to admit rows and to append them costs nearly the same for one row as for a hundred. So requests are
gathered until the commit before them is durable, and then go as one batch. There is no timer: a lone request goes at
the end of the loop's turn, and a thousand that come meanwhile share one commit.

    put -> (the commit before is durable, or a batch is full) -> begin -> durable -> answer, or refuse

Three rules hold for every edge and for the ends of transactions:

    bytes      all requests together, waiting or on their way to the disk, have one bound; beyond it: OverLimit
    one batch  has at most BATCH_BYTES_MAX and BATCH_ROWS_MAX, and a full one does not wait for the commit before it.
               One with ENOUGH_ROWS gains little by growing: it begins within the turn when the disk has nothing to do
               behind what it does now, so that the disk works while the rest is read
    refused    a batch that is refused whole is begun again request by request, so that only the one at fault is told

Invariant: each request that was put is answered or refused, once, even if the log or the broker fails.
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

from timeball import limits
from timeball.access import ANONYMOUS, Caller
from timeball.broker.appender import Accepted
from timeball.broker.few_sends import Sends
from timeball.errors import OverLimit, RequestError, TimeballError, Unavailable

logger = logging.getLogger(__name__)

BATCH_BYTES_MAX = 32 * 1024 * 1024
BATCH_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
ENOUGH_ROWS = 1_024  # what a batch costs however few its rows is a tenth of the rest then
AHEAD_MAX = 2  # batches under way: one that the disk is at, and one that is ready for it
HELD_BYTES_MAX = 4 * BATCH_BYTES_MAX  # of all edges together: what clients may make the broker hold
# A batch of columns with more than this carries its own cost: to copy it beside others would be a loss.
SMALL_ROWS, SMALL_BYTES = 256, 256 * 1024

T = TypeVar("T")
R = TypeVar("R")

Begun = tuple[Any, "asyncio.Future[Any]"]  # what `answer` is given, and when it is durable
Accept = Callable[[Sends, Caller], tuple[Accepted, "asyncio.Future[int]"]]


class _Batch(Generic[T]):
    """Requests of one key that go together."""

    __slots__ = ("key", "requests", "rows", "size_bytes")

    def __init__(self) -> None:
        self.requests: list[T] = []
        self.rows = self.size_bytes = 0
        self.key: Hashable = None


class Batcher(Generic[T]):
    """Requests on their way to one `begin`. Belongs to the event loop.

    Requests share a batch with their neighbours of the same key; one without a key goes alone, and waits for no commit.
    `is_pipelined`: whether a full batch may begin while another is under way. `apart`: the requests that one is
    made of, where each of them is to be refused for itself.
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
        self._full: deque[_Batch[T]] = deque()  # batches that take no more requests, in order
        self._open: _Batch[T] = _Batch()
        self.held_bytes = 0  # of what waits, and of what is under way
        self._under_way = 0  # batches
        self._is_scheduled = False

    def put(self, request: T, rows: int = 1, size_bytes: int = 0, key: Hashable = True) -> None:
        """Add a request; raises OverLimit when too many bytes wait. It is answered by `answer` or `refuse`."""
        held_bytes, batch = self.held_bytes + size_bytes, self._open
        # A lone request of any size passes: its edge has bounded it.
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
                # Full batches need not wait for the commit before them: they gain nothing by growing.
                if overflows and self._is_pipelined:
                    self._drain_full()
        batch.requests.append(request)
        batch.rows += rows
        batch.size_bytes += size_bytes
        batch.key = key
        is_full = key is None or batch.rows >= rows_max or batch.size_bytes >= BATCH_BYTES_MAX
        # Not asked by a method: each request passes here, and a call costs as much as the comparisons.
        if self._is_pipelined and (is_full or (batch.rows >= ENOUGH_ROWS and self._under_way < AHEAD_MAX)):
            self._drain()
        elif not (self._is_scheduled or self._under_way):
            self._is_scheduled = True
            # At the end of this turn of the loop: what other connections have sent meanwhile comes along.
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
        except Exception as error:  # of any kind: these are told, and the next get their turn
            self._failed(requests, size_bytes, error)
        else:
            # Counted only when it has begun: a batch that was refused is over, and holds up none.
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
            except Exception as error:  # nothing has been written to them yet, and none may wait for ever
                logger.exception("requests not answered requests=%d reason=%s", len(requests), error)
                self._refuse(requests, error)
        if self._is_pipelined and self._open.rows >= ENOUGH_ROWS and self._under_way < AHEAD_MAX:
            self._drain()
        elif (self._open.requests or self._full) and not (self._under_way or self._is_scheduled):
            # Not at once: what has arrived while we were at it is read first, and comes along. The loop is what
            # there is too little of, not the disk, and a batch costs it the same for one row as for fifty.
            self._is_scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._drain)

    def _failed(self, requests: list[T], size_bytes: int, error: BaseException) -> None:
        # Begun again one by one: the fault of one must not refuse the others. A log that has stopped refuses all at
        # once.
        if isinstance(error, RequestError | OverLimit):
            alone = [part for request in requests for part in self._apart(request)]
            if len(alone) > 1:
                for request in alone:
                    self._begin([request], size_bytes)
                    size_bytes = 0  # they stay counted until the first of these has ended
                return
        self.held_bytes -= size_bytes
        self._refuse(requests, error)


class AsyncBatcher(Generic[T, R]):
    """A batcher over a coroutine: `handle` gives each request its result, or an error that is its alone."""

    def __init__(
        self, handle: Callable[[list[T]], Awaitable[Sequence[R | TimeballError]]], rows_max: int
    ) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Future[Sequence[R | TimeballError]]] = set()
        self._batcher: Batcher[tuple[T, asyncio.Future[R]]] = Batcher(
            self._begin, _set_results, _set_error, rows_max=rows_max, is_pipelined=False
        )

    def put(self, request: T, rows: int = 1) -> asyncio.Future[R]:
        """Return the request's result, when its batch has ended. `rows`: how much of a batch it takes up."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._batcher.put((request, future), rows)
        return future

    def _begin(self, requests: list[tuple[T, asyncio.Future[R]]]) -> Begun:
        handled = self._handle([request for request, _ in requests])
        self._tasks.add(task := asyncio.ensure_future(handled))  # the loop itself keeps no task alive
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
    """Set a future's result or error; one whose caller has gone away stays as it is."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


# ---- sends --------------------------------------------------------------------------------------------------


class Edge(Protocol):
    """The edge that has put pieces, and that tells their clients."""

    def answer(self, pieces: list[Any], accepted: Accepted) -> None:
        """Say where the pieces stand: each from `accepted.first_seq + piece.first_row` on."""

    def refuse(self, pieces: list[Any], error: BaseException) -> None:
        """Say why they were not taken."""


class Piece(msgspec.Struct, gc=False):
    """The messages of one request: they stand side by side in one batch, so all of them are in the log or none is.

    `rows` are SendRows, or a batch of SEND_COLUMNS; the policy decides about their topics for `caller`. None: it has
    decided about them.
    """

    edge: Edge
    rows: Any
    count: int
    size_bytes: int
    first_row: int  # within the batch that it shares; set when that begins
    caller: Any

    def join(self, pieces: Sequence[Piece]) -> Sends:
        """Return the rows of these pieces, of which this is the first."""
        return self.rows if len(pieces) == 1 else [row for piece in pieces for row in piece.rows]

    def apart(self) -> Sequence[Piece]:
        """Return the pieces that this one is made of: each is refused for itself."""
        return (self,)


class Ingress:
    """The sends of all edges on their way to one verb, `accept`. Belongs to the event loop."""

    def __init__(self, accept: Accept) -> None:
        self.accept = accept
        self._batcher: Batcher[Piece] = Batcher(
            self._begin, answer, refuse, apart=lambda piece: piece.apart()
        )

    @property
    def held_bytes(self) -> int:
        """Return the bytes that wait, or are on their way to the disk."""
        return self._batcher.held_bytes

    def put(self, piece: Piece) -> None:
        """Add a piece; raises OverLimit. Its edge is told the outcome."""
        caller = piece.caller
        # Requests of one caller share a decision of the policy, but none with those that it has decided about: it would
        # refuse them all for the topic of one. Only columns of one schema can be joined.
        key: Hashable = True if caller is None else (caller,)
        if isinstance(piece.rows, pa.RecordBatch):
            is_small = piece.count <= SMALL_ROWS and piece.size_bytes <= SMALL_BYTES
            key = (piece.rows.schema, caller) if is_small else None
        self._batcher.put(piece, piece.count, piece.size_bytes, key)

    def _begin(self, pieces: list[Piece]) -> Begun:
        return self.accept(joined(pieces), pieces[0].caller or ANONYMOUS)


def joined(pieces: list[Piece]) -> Sends:
    """Return the rows of pieces side by side: each edge finds its own by where its first one stands."""
    at, first = 0, pieces[0]
    for piece in pieces:
        piece.first_row = at
        at += piece.count
    if isinstance(first.rows, pa.RecordBatch):
        return first.rows if len(pieces) == 1 else pa.concat_batches([piece.rows for piece in pieces])
    return first.join(pieces)


def answer(pieces: list[Piece], accepted: Accepted) -> None:
    """Have the edges of these pieces answer their clients."""
    for edge, mine in _by_edge(pieces):
        try:
            edge.answer(mine, accepted)
        except Exception as error:  # of this edge alone
            logger.exception("sends not answered sends=%d reason=%s", len(mine), error)
            edge.refuse(mine, error)


def refuse(pieces: list[Piece], error: BaseException) -> None:
    """Have the edges of these pieces tell their clients why they were not taken."""
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
