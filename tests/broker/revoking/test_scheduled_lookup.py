"""The messages that a name identifies, and their state in the log. test_cancel.py tests cancels with them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.broker.on_node import batch, column, on_node
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, World

from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.found_rows import scan
from timeball.broker.revoking.scheduled_lookup import Candidate, LookupResult, Names, Search
from timeball.log import reader as log_reader
from timeball.model import limits
from timeball.model.errors import OutOfRange
from timeball.model.message import Kind, build_rows
from timeball.table.file_keys import FileSet


def look_up(
    world: World, thorough: bool = False, live: FileSet | None = None, **named: object
) -> LookupResult:
    """Search for the messages with these `Names`, in the files `live` (by default all of the table)."""
    live = world.broker.scheduling.hour_log.pending.live if live is None else live
    names = Names(**named)
    search = Search(
        world.broker.log.reader,
        world.broker.log.key_index,
        world.broker.pending_table.file_keys,
        live,
        world.broker.scheduling.outcomes.moved,
        [names],
    )
    search.search()
    missing = search.missing(names, thorough=thorough)
    if missing:
        search.add_rows(scan(world.broker.log.reader, missing))
    return search.result(names)


def bodies(world: World, candidates: list[Candidate]) -> dict[int, bytes]:
    """Read the bodies of these messages, by version."""
    rows = scheduled_lookup.read_scheduled_rows(
        world.broker.log.reader,
        world.broker.pending_table.file_keys,
        world.broker.scheduling.hour_log.pending.live,
        candidates,
    )
    return dict(zip(column(rows, "seq"), column(rows, "body"), strict=True))


def test_too_many_names_in_one_request_are_refused() -> None:
    half = limits.CANCELS_PER_REQUEST_MAX // 2
    Names(ids=["x"] * half, keys=["x"] * (half - 1), seqs=[1]).check()
    with pytest.raises(OutOfRange, match="split it"):
        Names(ids=["x"] * half, keys=["x"] * half, seqs=[1]).check()


@on_node()
async def test_a_caller_gets_only_the_ends_of_its_own_messages(world: World) -> None:
    """A key in another topic may have a million settled messages, which the event loop would visit one by one."""
    for topic in ("mine", "theirs"):
        await world.broker.send(
            batch(3, topic=[topic] * 3, keys=["shared"] * 3, due_ms=[world.clock.wall + HOUR_MS] * 3)
        )
    await world.broker.cancel(keys=["shared"])
    of_all_topics = look_up(world, keys=["shared"])
    of_one_topic = look_up(world, keys=["shared"], topic="mine")
    of_allowed_topics = look_up(world, keys=["shared"], may=lambda topic: topic == "mine")
    assert len(of_all_topics.settled) == 6
    numbers = {candidate.number for candidate in of_one_topic.candidates}
    assert of_one_topic.settled.keys() == of_allowed_topics.settled.keys() == numbers
    assert len(numbers) == 3


@on_node()
async def test_rows_with_large_bodies_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.broker.send(batch(8, keys=["shared"] * 8, due_ms=[world.clock.wall + HOUR_MS] * 8))
    with_rows = look_up(world, keys=["shared"]).candidates
    monkeypatch.setattr(log_reader, "VALUES_BYTES_MAX", 8)
    without_rows = look_up(world, keys=["shared"]).candidates
    assert len(without_rows) == 8 and all(candidate.row is None for candidate in without_rows)
    assert [msgspec.structs.replace(candidate, row=None) for candidate in with_rows] == without_rows


@on_node()
async def test_a_message_in_the_log_and_in_a_file_is_one_candidate(world: World) -> None:
    """Compaction copies a row before retention removes it from the log."""
    [key] = await world.send("a", [FAR_MS])
    await world.compact()
    for lookup in (look_up(world, ids=[key]), look_up(world, seqs=[2])):
        [candidate] = lookup.candidates
        assert (candidate.seq, candidate.in_table, candidate.at_seq) == (2, True, 2)
        assert candidate.accepted_ms == world.clock.wall


@on_node()
async def test_rows_are_read_from_the_log_and_from_files(world: World) -> None:
    ids = [*await world.bulk("a", [FAR_MS, 2 * FAR_MS, FAR_MS + 1], 1), *await world.send("a", [FAR_MS] * 2)]
    candidates = look_up(world, ids=ids).candidates
    assert {candidate.in_table for candidate in candidates} == {True, False}
    assert sorted(bodies(world, candidates).values()) == sorted(world.observed.sent[key].body for key in ids)
    first = candidates[0]
    unknown = Candidate("x", 1 << 40, 1 << 40, first.due_ms, "a", None, None, 0, in_table=True)
    assert bodies(world, [first, unknown]).keys() == {first.seq}
    assert bodies(world, []) == {}


@on_node()
async def test_only_a_thorough_look_up_finds_the_end_of_a_message_without_id(world: World) -> None:
    first = (await world.broker.send(batch(3, delay_ms=[1_000, FAR_MS, FAR_MS]))).first_seq
    await world.broker.cancel(seqs=[first + 1])
    await world.advance(1_000)
    assert look_up(world, seqs=[first, first + 1]).settled == {}
    settled = look_up(world, thorough=True, seqs=[first, first + 1, first + 2]).settled
    assert {seq: end.verdict for seq, end in settled.items()} == {
        first: "released", first + 1: "already_cancelled",
    }  # fmt: skip
    assert settled[first].at_ms == world.clock.wall


@on_node()
async def test_a_released_message_of_a_bulk_job_is_found_by_number_without_its_file(world: World) -> None:
    [key] = await world.bulk("a", [1_000], 1)
    seq = look_up(world, ids=[key]).candidates[0].seq
    await world.advance(1_000)
    lookup = look_up(world, live=FileSet([]), seqs=[seq])
    assert [candidate.seq for candidate in lookup.candidates] == [seq]
    assert lookup.settled[seq].verdict == "released"
    # A reserved number, which no message has yet.
    assert look_up(world, seqs=[await world.broker.reserve(3)]) == LookupResult()


@on_node()
async def test_a_redelivery_is_found_only_by_its_topic_or_number(world: World) -> None:
    """It has the id and the keys of a delivered message, which a cancel of the redelivery would lose."""
    for group in ("billing", "billing_orders"):
        world.broker.tables.groups.ensure(group)
    topics = ["orders", "%RETRY%billing", "%DLQ%billing", "%RETRY%billing_orders"]
    names = {"unique_key": ["x"] * 4, "keys": ["k"] * 4, "topic": topics}
    first = (await world.broker.send(batch(4, due_ms=[world.clock.wall + HOUR_MS] * 4, **names))).first_seq

    def topics_of(**named: object) -> list[str]:
        return [candidate.topic for candidate in look_up(world, **named).candidates]

    assert topics_of(ids=["x"]) == topics_of(keys=["k"]) == ["orders"]
    assert topics_of(ids=["x"], topic=topics[1]) == [topics[1]]
    assert topics_of(seqs=[first + 2]) == [topics[2]]
    await world.compact()
    assert topics_of(ids=["x"]) == ["orders"]


@on_node()
async def test_a_redelivery_with_a_delay_level_is_not_found_by_its_id(world: World) -> None:
    world.broker.tables.groups.ensure("billing")
    levels = {"topic": ["orders", "%RETRY%billing"], "unique_key": ["x", "x"]}
    await world.broker.send(batch(2, delay_level=np.array([5, 5], dtype=np.int32), **levels))
    assert [candidate.topic for candidate in look_up(world, ids=["x"]).candidates] == ["orders"]


@pytest.mark.parametrize("kind", [Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL])
@on_node()
async def test_rows_of_half_messages_are_not_found(world: World, kind: Kind) -> None:
    await world.send("a", [None])
    row = build_rows(1, kind=int(kind), topic="a", unique_key="half", body=b"", store_ms=1, source_seq=1)
    seq, durable = world.broker.log.writer.append(row)
    await durable
    assert look_up(world, ids=["half", "k00000"], seqs=[1, seq]) == LookupResult()
