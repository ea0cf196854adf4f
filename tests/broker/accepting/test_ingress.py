"""The batcher: simultaneous requests share a commit, in order, and each request gets its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.crash.lives import run
from tests.crash.world import World

from timeball.broker.accepting import ingress
from timeball.broker.accepting.admission import batch_of
from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import AsyncBatcher, Ingress, Piece, settle
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import DiskFailed, InvalidMessage, NotFound, OverLimit, TimeballError, Unavailable
from timeball.model.message import SEND_COLUMNS, SEND_NAMES, Kind, SendBatch, SendRow


def with_recorder(
    items_max: int = 100,
) -> Callable[[Callable[[BatchRecorder], Coroutine[Any, Any, None]]], Any]:
    """Convert a coroutine to a test that gets a recorder, and fails if the event loop has seen an error."""

    def decorate(test: Callable[[BatchRecorder], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def live() -> None:
            async def main() -> None:
                loop_errors: list[dict[str, Any]] = []
                asyncio.get_running_loop().set_exception_handler(
                    lambda _, context: loop_errors.append(context)
                )
                await test(BatchRecorder(items_max))
                assert loop_errors == []

            run(main())

        live.__name__ = test.__name__
        return live

    return decorate


class BatchRecorder:
    """A handler of batches of numbers. It ends a batch when `may_end` is set.

    It refuses numbers above 100, and a batch with the number 13 as a whole.
    """

    def __init__(self, items_max: int) -> None:
        self.batcher: AsyncBatcher[int, str] = AsyncBatcher(self._handle, items_max)
        self.batches: list[list[int]] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def _handle(self, numbers: list[int]) -> list[str | TimeballError]:
        self.batches.append(numbers)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        if 13 in numbers:
            raise NotFound(f"13 of {numbers}")
        return [NotFound(str(number)) if number > 100 else f"done {number}" for number in numbers]


@with_recorder()
async def test_requests_during_a_batch_share_the_next_batch(recorder: BatchRecorder) -> None:
    first = recorder.batcher.put(1)
    await asyncio.sleep(0)
    later = [recorder.batcher.put(n) for n in (2, 3, 4)]
    recorder.may_end.set()
    assert await asyncio.gather(first, *later) == ["done 1", "done 2", "done 3", "done 4"]
    assert recorder.batches == [[1], [2, 3, 4]]
    assert await recorder.batcher.put(5) == "done 5"


@with_recorder(items_max=2)
async def test_a_batch_has_a_maximum_size(recorder: BatchRecorder) -> None:
    recorder.may_end.set()
    await asyncio.gather(*[recorder.batcher.put(n) for n in range(5)])
    assert recorder.batches == [[0, 1], [2, 3], [4]]


@with_recorder()
async def test_an_error_of_one_request_does_not_affect_others(recorder: BatchRecorder) -> None:
    recorder.may_end.set()
    good, bad = await asyncio.gather(*[recorder.batcher.put(n) for n in (1, 101)], return_exceptions=True)
    assert good == "done 1" and isinstance(bad, NotFound)
    assert recorder.batches == [[1, 101]]


@with_recorder()
async def test_a_refused_batch_is_retried_one_by_one(recorder: BatchRecorder) -> None:
    recorder.may_end.set()
    outcomes = await asyncio.gather(*[recorder.batcher.put(n) for n in (1, 13, 2)], return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["done 1", "13 of [13]", "done 2"]


@pytest.mark.parametrize("error", [Unavailable("stopping"), RuntimeError("a bug")], ids=type)
def test_an_internal_error_refuses_all_requests(error: Exception) -> None:
    @with_recorder()
    async def live(recorder: BatchRecorder) -> None:
        recorder.may_end.set()
        recorder.error = error
        outcomes = await asyncio.gather(*[recorder.batcher.put(n) for n in (1, 2)], return_exceptions=True)
        assert outcomes == [error] * 2
        assert len(recorder.batches) == 1
        recorder.error = None
        assert await recorder.batcher.put(3) == "done 3"

    live()


@with_recorder()
async def test_a_cancelled_request_does_not_block_others(recorder: BatchRecorder) -> None:
    cancelled, other = recorder.batcher.put(1), recorder.batcher.put(2)
    await asyncio.sleep(0)
    cancelled.cancel()
    recorder.may_end.set()
    assert await other == "done 2"


# ---- sends ---------------------------------------------------------------------------------------------------


def row(body: bytes = b"x", **fields: object) -> SendRow:
    """Build a row of a send, with null in all other fields."""
    values = {"topic": "orders", "body": body, "properties": "", "queue_id": -1, "born_ms": 1, **fields}
    return tuple(values.get(name) for name in SEND_NAMES)


class Edge:
    """An edge each of whose sends returns a future. `sizes` contains the number of rows of each batch."""

    def __init__(self, world: World) -> None:
        self.sizes: list[int] = []
        self.ingress = Ingress(self._accept)
        self._world = world

    def _accept(self, batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]]:
        self.sizes.append(len(batch))
        return self._world.broker.appender.send(batch, caller)

    def put(
        self, rows: list[SendRow] | pa.RecordBatch, caller: Caller | None = ANONYMOUS
    ) -> asyncio.Future[Any]:
        count = len(rows)
        size_bytes = rows.nbytes if isinstance(rows, pa.RecordBatch) else sum(len(row[1]) for row in rows)
        piece = SentPiece(
            self, rows, count, size_bytes, 0, caller, asyncio.get_running_loop().create_future()
        )
        self.ingress.put(piece)
        return piece.answer

    def answer(self, pieces: list[SentPiece], accepted: Accepted) -> None:
        for piece in pieces:
            settle(piece.answer, (accepted.first_seq + piece.first_row, piece.count))

    def refuse(self, pieces: list[SentPiece], error: BaseException) -> None:
        for piece in pieces:
            settle(piece.answer, error)


class SentPiece(Piece, gc=False):
    """A piece with the future of its answer."""

    answer: Any


async def bodies(world: World) -> list[bytes]:
    """List the bodies of the visible messages in the log, in its order."""
    batches = world.broker.read_log(1, world.broker.log.reader.next_seq, [Kind.MESSAGE])
    return [body for rows in batches for body in rows.column("body").to_pylist()]


@on_node()
async def test_concurrent_sends_share_a_commit(world: World) -> None:
    edge = Edge(world)
    placed = await asyncio.gather(*(edge.put([row(b"%d" % n)] * (n % 3 + 1)) for n in range(30)))
    assert len(edge.sizes) == 1 and edge.sizes[0] == sum(n % 3 + 1 for n in range(30))
    assert [count for _, count in placed] == [n % 3 + 1 for n in range(30)]
    by_seq = dict(enumerate(await bodies(world), start=placed[0][0]))
    assert [by_seq[first_seq] for first_seq, _ in placed] == [b"%d" % n for n in range(30)]


@on_node()
async def test_only_the_bad_send_of_a_batch_is_refused(world: World) -> None:
    edge = Edge(world)
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    answers = await asyncio.gather(
        edge.put([row(b"one")]), edge.put([row(b"half"), bad]), edge.put([row(b"two")]),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(answers[1], InvalidMessage)
    assert not any(isinstance(answer, BaseException) for answer in answers[::2])
    assert await bodies(world) == [b"one", b"two"]


@on_node()
async def test_sends_beyond_the_batch_limit_form_several_batches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = Edge(world)
    monkeypatch.setattr(ingress, "BATCH_ROWS_MAX", 7)
    await asyncio.gather(*(edge.put([row()] * 3) for _ in range(5)))
    assert edge.sizes == [6, 6, 3]
    monkeypatch.setattr(ingress, "BATCH_BYTES_MAX", 10)
    await asyncio.gather(*(edge.put([row(b"x" * 6)]) for _ in range(3)))
    assert edge.sizes[3:] == [1, 1, 1]
    await edge.put([row()] * 9)
    assert edge.sizes[-1] == 9, "a single send is never split"


@on_node()
async def test_a_disconnected_sender_does_not_affect_others(world: World) -> None:
    edge = Edge(world)
    answers_under_way = [edge.put([row(b"%d" % n)]) for n in range(3)]
    answers_under_way[1].cancel()
    answers = await asyncio.gather(*answers_under_way, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert [answers[index][1] for index in (0, 2)] == [1, 1]  # type: ignore[index]
    assert (await edge.put([row(b"next")]))[0] > 0


@on_node()
async def test_held_bytes_are_limited_even_if_callers_disconnect(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "HELD_BYTES_MAX", 10)
    edge = Edge(world)
    answers = [edge.put([row(b"12345")]) for _ in range(2)]
    answers[1].cancel()
    with pytest.raises(OverLimit, match="10 bytes of messages wait"):
        await edge.put([row(b"6")])
    await answers[0]
    await edge.put([row(b"123456")])
    await edge.put([row(b"x" * 11)])  # a single request may be larger, because it delays no other request
    assert edge.ingress.held_bytes == 0
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    with pytest.raises(InvalidMessage):
        await edge.put([bad])
    assert edge.ingress.held_bytes == 0


@on_node(failing=True)
async def test_a_disk_failure_refuses_all_sends(world: World) -> None:
    edge = Edge(world)
    await edge.put([row()])
    world.files.fail_at(world.files.calls + 1, DiskFailed("broken"))
    answers = await asyncio.gather(*(edge.put([row()]) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [DiskFailed] * 3


SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])
TAGGED = SCHEMA.append(pa.field("tag", pa.string()))


def columns(count: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Build a send in columns, of equal rows."""
    return pa.RecordBatch.from_pylist([{"topic": "orders", "body": b"x"}] * count, schema)


@on_node()
async def test_consecutive_small_sends_with_the_same_schema_and_caller_share_a_batch(
    world: World,
) -> None:
    edge, large, other = Edge(world), ingress.SMALL_ROWS + 1, Caller()
    sent = [columns(1), columns(1), columns(large), columns(1, TAGGED), columns(1), columns(2)]
    answers = [edge.put(batch) for batch in sent]
    answers += [edge.put(columns(3), other), edge.put([row()]), edge.put([row()])]
    outcomes = await asyncio.gather(*answers)
    assert edge.sizes == [2, large, 1, 3, 3, 2]
    next_seq = outcomes[0][0]
    for first_seq, count in outcomes:  # the order of the calls is the order in the log
        assert first_seq == next_seq
        next_seq += count


@on_node()
async def test_sends_without_a_caller_share_no_batch_with_sends_of_a_caller(world: World) -> None:
    edge = Edge(world)
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    answers = [edge.put([row()], None), edge.put([row()], None), edge.put([bad]), edge.put([row()])]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert [isinstance(each, InvalidMessage) for each in outcomes] == [False, False, True, False]
    # The first two share a batch. The others share one that is refused, and are then handled one by one.
    assert edge.sizes == [2, 2, 1, 1]


@on_node()
async def test_sends_during_a_commit_share_the_next_commit(world: World) -> None:
    edge = Edge(world)
    first = edge.put([row()])
    await asyncio.sleep(0)  # the first commit has begun
    assert edge.sizes == [1]
    later = [edge.put([row()]) for _ in range(5)]
    await asyncio.gather(first, *later)
    assert edge.sizes == [1, 5]


@on_node()
async def test_a_batch_with_enough_rows_begins_while_the_disk_is_busy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "ENOUGH_ROWS", 3)
    edge = Edge(world)
    answers = [edge.put([row()] * count) for count in (2, 1, 3, 2, 2, 1)]
    assert edge.sizes == [3, 3], (
        "the second batch begins while the first is being written, a third one does not"
    )
    outcomes = await asyncio.gather(*answers)
    assert edge.sizes == [3, 3, 5]
    assert [seq - outcomes[0][0] for seq, _ in outcomes] == [0, 2, 3, 6, 8, 10]


@on_node()
async def test_sends_of_several_edges_share_a_batch_and_each_edge_answers_its_own(world: World) -> None:
    first, second = Edge(world), Edge(world)
    second.ingress = first.ingress
    outcomes = await asyncio.gather(first.put([row()]), second.put([row()] * 2), first.put([row()]))
    assert first.sizes == [4]
    assert [seq - outcomes[0][0] for seq, _ in outcomes] == [0, 1, 3]


NUMBER = st.one_of(st.none(), st.integers(0, 2**31 - 1))
TEXT = st.one_of(st.none(), st.text(max_size=3))


def values_of(name: str) -> st.SearchStrategy[Any]:
    if name == "body":
        return st.binary(max_size=3)
    return NUMBER if pa.types.is_integer(SEND_COLUMNS[name]) else TEXT


ROWS = st.lists(st.tuples(*(values_of(name) for name in SEND_NAMES)), min_size=1, max_size=5)


@given(rows=ROWS)
def test_rows_converted_to_columns_keep_their_values(rows: list[SendRow]) -> None:
    batch = batch_of(rows)
    assert batch.num_rows == len(rows)
    for index, name in enumerate(SEND_NAMES):
        values = [row[index] for row in rows]
        if name in batch.schema.names:
            assert batch.column(name).type == SEND_COLUMNS[name]
            assert batch.column(name).to_pylist() == values
        else:
            assert values == [None] * len(rows)


def test_a_number_out_of_range_raises_arrow_invalid() -> None:
    row = tuple(
        2**40 if name == "queue_id" else "x" if SEND_COLUMNS[name] == pa.string() else None
        for name in SEND_NAMES
    )
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        batch_of([row])
