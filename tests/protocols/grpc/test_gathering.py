"""Gathering: an answer for each call, one commit for many, and one bad call that harms nobody."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball import limits
from timeball.broker.send_rows import NAMES, Row
from timeball.broker.service import Accepted
from timeball.errors import DiskFailed, InvalidMessage, OverLimit
from timeball.message import Kind
from timeball.protocols.grpc import gathering
from timeball.protocols.grpc.gathering import Gathering


def row(body: bytes = b"x", **fields: object) -> Row:
    given = {"topic": "orders", "body": body, "properties": "", "queue_id": -1, "born_ms": 1, **fields}
    return tuple(given.get(name) for name in NAMES)


def counted(world: World) -> tuple[Gathering, list[int]]:
    """A gathering, and the numbers of rows that it hands over."""
    sizes: list[int] = []

    def accept(batch: pa.RecordBatch) -> tuple[Accepted, asyncio.Future[int]]:
        sizes.append(batch.num_rows)
        return world.broker.send_nowait(batch)

    return Gathering(accept), sizes


async def bodies(world: World) -> list[bytes]:
    shown = world.broker.read_log(1, world.broker.parts.reader.next_seq, [Kind.MESSAGE])
    return [body for rows in shown for body in rows.column("body").to_pylist()]


@on_node()
async def test_calls_that_come_together_share_a_commit(world: World) -> None:
    gathering, sizes = counted(world)
    placed = await asyncio.gather(*(gathering.take([row(b"%d" % n)] * (n % 3 + 1)) for n in range(30)))
    assert len(sizes) == 1 and sizes[0] == sum(n % 3 + 1 for n in range(30))
    assert [len(one.offsets) for one in placed] == [n % 3 + 1 for n in range(30)]
    by_seq = dict(enumerate(await bodies(world), start=placed[0].first_seq))
    assert [by_seq[one.first_seq] for one in placed] == [b"%d" % n for n in range(30)]


@on_node()
async def test_a_refused_call_is_told_alone(world: World) -> None:
    gathering, _ = counted(world)
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    answers = await asyncio.gather(
        gathering.take([row(b"one")]), gathering.take([row(b"half"), bad]), gathering.take([row(b"two")]),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(answers[1], InvalidMessage)
    assert not any(isinstance(answer, BaseException) for answer in answers[::2])
    assert await bodies(world) == [b"one", b"two"]


@on_node()
async def test_what_is_more_than_one_batch_goes_in_several(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, sizes = counted(world)
    monkeypatch.setattr(gathering, "BATCH_ROWS_MAX", 7)
    await asyncio.gather(*(taken.take([row()] * 3) for _ in range(5)))
    assert sizes == [6, 6, 3]
    monkeypatch.setattr(gathering, "BATCH_BYTES_MAX", 10)
    await asyncio.gather(*(taken.take([row(b"x" * 6)]) for _ in range(3)))
    assert sizes[3:] == [1, 1, 1]
    await taken.take([row()] * 9)
    assert sizes[-1] == 9, "a call is never cut"


@on_node()
async def test_who_goes_away_harms_nobody(world: World) -> None:
    gathering, _ = counted(world)
    calls = [asyncio.ensure_future(gathering.take([row(b"%d" % n)])) for n in range(3)]
    calls[1].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert [answers[at].offsets for at in (0, 2)]  # type: ignore[union-attr]
    assert (await gathering.take([row(b"next")])).first_seq > 0


@on_node()
async def test_what_waits_is_bounded_whether_its_callers_stay_or_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "HELD_BYTES_MAX", 10)
    taken, _ = counted(world)
    calls = [asyncio.ensure_future(taken.take([row(b"12345")])) for _ in range(2)]
    await asyncio.sleep(0)
    calls[1].cancel()
    with pytest.raises(OverLimit, match="10 bytes of messages wait"):
        await taken.take([row(b"6")])
    await calls[0]
    await taken.take([row(b"123456")])
    await taken.take([row(b"x" * 11)])  # alone it may be larger: nobody else waits
    assert taken._held_bytes == 0
    bad = row(tag="t" * (limits.TAG_BYTES_MAX + 1))
    with pytest.raises(InvalidMessage):
        await taken.take([bad])
    assert taken._held_bytes == 0


@on_node(failing=True)
async def test_a_disk_that_fails_is_told_to_all(world: World) -> None:
    gathering, _ = counted(world)
    await gathering.take([row()])
    world.files.fail_at(world.files.calls + 1, DiskFailed("broken"))
    answers = await asyncio.gather(*(gathering.take([row()]) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [DiskFailed] * 3
