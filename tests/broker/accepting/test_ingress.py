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


def in_turns(items_max: int = 100) -> Callable[[Callable[[Bakery], Coroutine[Any, Any, None]]], Any]:
    def decorate(test: Callable[[Bakery], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def live() -> None:
            async def main() -> None:
                unheard: list[dict[str, Any]] = []
                asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
                await test(Bakery(items_max))
                assert unheard == []

            run(main())

        live.__name__ = test.__name__
        return live

    return decorate


class Bakery:
    """A handler that runs when the test says so. It refuses orders above 100, and 13 makes the whole turn fail."""

    def __init__(self, items_max: int) -> None:
        self.turns: AsyncBatcher[int, str] = AsyncBatcher(self._bake, items_max)
        self.done: list[list[int]] = []
        self.open = asyncio.Event()
        self.closed_for: Exception | None = None

    async def _bake(self, orders: list[int]) -> list[str | TimeballError]:
        self.done.append(orders)
        await self.open.wait()
        if self.closed_for is not None:
            raise self.closed_for
        if 13 in orders:
            raise NotFound(f"13 of {orders}")
        return [NotFound(str(order)) if order > 100 else f"cake {order}" for order in orders]


@in_turns()
async def test_requests_during_a_batch_share_the_next_batch(bakery: Bakery) -> None:
    first = bakery.turns.put(1)
    await asyncio.sleep(0)
    rest = [bakery.turns.put(n) for n in (2, 3, 4)]
    bakery.open.set()
    assert await asyncio.gather(first, *rest) == ["cake 1", "cake 2", "cake 3", "cake 4"]
    assert bakery.done == [[1], [2, 3, 4]]
    assert await bakery.turns.put(5) == "cake 5"


@in_turns(items_max=2)
async def test_a_batch_has_a_maximum_size(bakery: Bakery) -> None:
    bakery.open.set()
    await asyncio.gather(*[bakery.turns.put(n) for n in range(5)])
    assert bakery.done == [[0, 1], [2, 3], [4]]


@in_turns()
async def test_an_error_of_one_request_does_not_affect_others(bakery: Bakery) -> None:
    bakery.open.set()
    good, bad = await asyncio.gather(*[bakery.turns.put(n) for n in (1, 101)], return_exceptions=True)
    assert good == "cake 1" and isinstance(bad, NotFound)
    assert bakery.done == [[1, 101]]


@in_turns()
async def test_a_refused_batch_is_retried_one_by_one(bakery: Bakery) -> None:
    bakery.open.set()
    outcomes = await asyncio.gather(*[bakery.turns.put(n) for n in (1, 13, 2)], return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["cake 1", "13 of [13]", "cake 2"]


@pytest.mark.parametrize("error", [Unavailable("stopping"), RuntimeError("a bug")], ids=type)
def test_an_internal_error_refuses_all_requests(error: Exception) -> None:
    @in_turns()
    async def live(bakery: Bakery) -> None:
        bakery.open.set()
        bakery.closed_for = error
        outcomes = await asyncio.gather(*[bakery.turns.put(n) for n in (1, 2)], return_exceptions=True)
        assert outcomes == [error] * 2
        assert len(bakery.done) == 1
        bakery.closed_for = None
        assert await bakery.turns.put(3) == "cake 3"

    live()


@in_turns()
async def test_a_cancelled_request_does_not_block_others(bakery: Bakery) -> None:
    gone, stays = bakery.turns.put(1), bakery.turns.put(2)
    await asyncio.sleep(0)
    gone.cancel()
    bakery.open.set()
    assert await stays == "cake 2"


# ---- sends ---------------------------------------------------------------------------------------------------


def row(body: bytes = b"x", **fields: object) -> SendRow:
    given = {"topic": "orders", "body": body, "properties": "", "queue_id": -1, "born_ms": 1, **fields}
    return tuple(given.get(name) for name in SEND_NAMES)


class Calls:
    """An edge whose clients wait for a future each, and the numbers of rows of each batch."""

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
        call = Call(self, rows, count, size_bytes, 0, caller, asyncio.get_running_loop().create_future())
        self.ingress.put(call)
        return call.answer

    def answer(self, pieces: list[Call], accepted: Accepted) -> None:
        for piece in pieces:
            settle(piece.answer, (accepted.first_seq + piece.first_row, piece.count))

    def refuse(self, pieces: list[Call], error: BaseException) -> None:
        for piece in pieces:
            settle(piece.answer, error)


class Call(Piece, gc=False):
    answer: Any


async def bodies(world: World) -> list[bytes]:
    shown = world.broker.read_log(1, world.broker.log.reader.next_seq, [Kind.MESSAGE])
    return [body for rows in shown for body in rows.column("body").to_pylist()]


@on_node()
async def test_concurrent_sends_share_a_commit(world: World) -> None:
    calls = Calls(world)
    placed = await asyncio.gather(*(calls.put([row(b"%d" % n)] * (n % 3 + 1)) for n in range(30)))
    assert len(calls.sizes) == 1 and calls.sizes[0] == sum(n % 3 + 1 for n in range(30))
    assert [count for _, count in placed] == [n % 3 + 1 for n in range(30)]
    by_seq = dict(enumerate(await bodies(world), start=placed[0][0]))
    assert [by_seq[first_seq] for first_seq, _ in placed] == [b"%d" % n for n in range(30)]


@on_node()
async def test_only_the_bad_send_of_a_batch_is_refused(world: World) -> None:
    calls = Calls(world)
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    answers = await asyncio.gather(
        calls.put([row(b"one")]), calls.put([row(b"half"), bad]), calls.put([row(b"two")]),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(answers[1], InvalidMessage)
    assert not any(isinstance(answer, BaseException) for answer in answers[::2])
    assert await bodies(world) == [b"one", b"two"]


@on_node()
async def test_sends_beyond_the_batch_limit_form_several_batches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Calls(world)
    monkeypatch.setattr(ingress, "BATCH_ROWS_MAX", 7)
    await asyncio.gather(*(taken.put([row()] * 3) for _ in range(5)))
    assert taken.sizes == [6, 6, 3]
    monkeypatch.setattr(ingress, "BATCH_BYTES_MAX", 10)
    await asyncio.gather(*(taken.put([row(b"x" * 6)]) for _ in range(3)))
    assert taken.sizes[3:] == [1, 1, 1]
    await taken.put([row()] * 9)
    assert taken.sizes[-1] == 9, "a call is never cut"


@on_node()
async def test_a_disconnected_sender_does_not_affect_others(world: World) -> None:
    calls = Calls(world)
    three = [calls.put([row(b"%d" % n)]) for n in range(3)]
    three[1].cancel()
    answers = await asyncio.gather(*three, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert [answers[at][1] for at in (0, 2)] == [1, 1]  # type: ignore[index]
    assert (await calls.put([row(b"next")]))[0] > 0


@on_node()
async def test_held_bytes_are_limited_even_if_callers_disconnect(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "HELD_BYTES_MAX", 10)
    taken = Calls(world)
    calls = [taken.put([row(b"12345")]) for _ in range(2)]
    calls[1].cancel()
    with pytest.raises(OverLimit, match="10 bytes of messages wait"):
        await taken.put([row(b"6")])
    await calls[0]
    await taken.put([row(b"123456")])
    await taken.put([row(b"x" * 11)])  # a single request may be larger, because it delays no other one
    assert taken.ingress.held_bytes == 0
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    with pytest.raises(InvalidMessage):
        await taken.put([bad])
    assert taken.ingress.held_bytes == 0


@on_node(failing=True)
async def test_a_disk_failure_refuses_all_sends(world: World) -> None:
    calls = Calls(world)
    await calls.put([row()])
    world.files.fail_at(world.files.calls + 1, DiskFailed("broken"))
    answers = await asyncio.gather(*(calls.put([row()]) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [DiskFailed] * 3


SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])
TAGGED = SCHEMA.append(pa.field("tag", pa.string()))


def columns(count: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"topic": "orders", "body": b"x"}] * count, schema)


@on_node()
async def test_small_neighbours_of_one_schema_and_caller_go_together_and_large_ones_alone(
    world: World,
) -> None:
    calls, large, other = Calls(world), ingress.SMALL_ROWS + 1, Caller()
    sent = [columns(1), columns(1), columns(large), columns(1, TAGGED), columns(1), columns(2)]
    answers = [calls.put(batch) for batch in sent]
    answers += [calls.put(columns(3), other), calls.put([row()]), calls.put([row()])]
    found = await asyncio.gather(*answers)
    assert calls.sizes == [2, large, 1, 3, 3, 2]
    at = found[0][0]
    for first_seq, count in found:  # the order of the calls is the order in the log
        assert first_seq == at
        at += count


@on_node()
async def test_rows_of_topics_that_are_decided_about_are_not_refused_with_others(world: World) -> None:
    calls = Calls(world)
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    answers = [calls.put([row()], None), calls.put([row()], None), calls.put([bad]), calls.put([row()])]
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert [isinstance(each, InvalidMessage) for each in found] == [False, False, True, False]
    # The first two share a batch. The others share one that is refused, and are then handled one by one.
    assert calls.sizes == [2, 2, 1, 1]


@on_node()
async def test_sends_during_a_commit_share_the_next_commit(world: World) -> None:
    calls = Calls(world)
    first = calls.put([row()])
    await asyncio.sleep(0)  # begun
    assert calls.sizes == [1]
    rest = [calls.put([row()]) for _ in range(5)]
    await asyncio.gather(first, *rest)
    assert calls.sizes == [1, 5]


@on_node()
async def test_a_batch_with_enough_rows_begins_while_the_disk_is_busy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "ENOUGH_ROWS", 3)
    calls = Calls(world)
    answers = [calls.put([row()] * count) for count in (2, 1, 3, 2, 2, 1)]
    assert calls.sizes == [3, 3], "in the same turn, and beside one that is under way, but not beside two"
    found = await asyncio.gather(*answers)
    assert calls.sizes == [3, 3, 5]
    assert [seq - found[0][0] for seq, _ in found] == [0, 2, 3, 6, 8, 10]


@on_node()
async def test_a_batch_of_several_edges_is_answered_by_each(world: World) -> None:
    one, two = Calls(world), Calls(world)
    two.ingress = one.ingress
    found = await asyncio.gather(one.put([row()]), two.put([row()] * 2), one.put([row()]))
    assert one.sizes == [4]
    assert [seq - found[0][0] for seq, _ in found] == [0, 1, 3]


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
    for at, name in enumerate(SEND_NAMES):
        given = [row[at] for row in rows]
        if name in batch.schema.names:
            assert batch.column(name).type == SEND_COLUMNS[name]
            assert batch.column(name).to_pylist() == given
        else:
            assert given == [None] * len(rows)


def test_a_number_out_of_range_raises_arrow_invalid() -> None:
    row = tuple(
        2**40 if name == "queue_id" else "x" if SEND_COLUMNS[name] == pa.string() else None
        for name in SEND_NAMES
    )
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        batch_of([row])
