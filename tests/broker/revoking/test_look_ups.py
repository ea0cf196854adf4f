"""Simultaneous look-ups share a search, and each caller gets the results for its own names only."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import on_node
from tests.crash.scenarios import FAR_MS
from tests.crash.world import World

from timeball.broker.revoking.scheduled_lookup import Names, Search
from timeball.model.errors import Corrupt, TimeballError
from timeball.table.key_index import TableKeys


def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of callers of each search."""
    counts, init = list[int](), Search.__init__

    def counted(self: Search, *args: object) -> None:
        counts.append(len(args[-1]))  # type: ignore[arg-type]
        init(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "__init__", counted)
    return counts


async def look_up_together(world: World, names: list[Names]) -> list[list[tuple[str, int]]]:
    """Look up all names at the same time. Return the (subject, number) pairs that each look-up finds."""
    lookups = await asyncio.gather(*map(world.broker.look_ups.look_up, names))
    return [
        sorted((candidate.subject, candidate.number) for candidate in lookup.candidates) for lookup in lookups
    ]


def test_simultaneous_look_ups_share_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = searches(monkeypatch)

    @on_node()
    async def work(world: World) -> None:
        file_ids = await world.bulk("a", [FAR_MS, FAR_MS + 1], 1)
        log_ids = await world.send("b", [FAR_MS, FAR_MS])
        names = [
            *(Names(ids=[message_id]) for message_id in (*file_ids, *log_ids)),
            Names(keys=[file_ids[0]]),  # an id of another caller is no key
            Names(ids=[log_ids[1], "unknown", file_ids[1]]),
            Names(ids=[file_ids[0], log_ids[0]], topic="a"),
            Names(ids=[file_ids[0], log_ids[0]], may=lambda topic: topic == "b"),
        ]
        alone = [(await look_up_together(world, [caller_names]))[0] for caller_names in names]
        numbers = [number for [(_, number)] in alone[:4]]
        assert len(set(numbers)) == 4
        assert alone[4:] == [
            [],
            sorted([(log_ids[1], numbers[3]), (file_ids[1], numbers[1])]),
            [(file_ids[0], numbers[0])],
            [(log_ids[0], numbers[2])],
        ]
        by_number = [Names(seqs=[number]) for number in numbers]
        counts.clear()
        by_number_results = [[(str(number), number)] for number in numbers]
        assert await look_up_together(world, names + by_number) == alone + by_number_results
        assert sum(counts) == 12 and len(counts) <= 2, "8 and 4 callers, in at most two searches"

    work()


def test_a_large_request_does_not_share_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = searches(monkeypatch)

    @on_node()
    async def work(world: World) -> None:
        large = Names(ids=[f"none-{n}" for n in range(9_999)])
        assert await look_up_together(world, [large, Names(ids=["x", "y"]), large]) == [[], [], []]
        assert counts == [1, 1, 1]

    work()


def test_a_file_that_cannot_be_read_fails_only_the_look_ups_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @on_node()
    async def work(world: World) -> None:
        [file_id] = await world.bulk("a", [FAR_MS], 1)
        [log_id] = await world.send("b", [FAR_MS])
        find_keys = TableKeys.find_keys

        def find_in_damaged_file(self: TableKeys, live: object, hashes: object) -> object:
            rows = find_keys(self, live, hashes)  # type: ignore[arg-type]
            if rows:
                raise Corrupt("a page of it does not match its checksum; restore this file from a copy")
            return rows

        monkeypatch.setattr(TableKeys, "find_keys", find_in_damaged_file)
        look_up = world.broker.look_ups.look_up
        answers = await asyncio.gather(
            *(look_up(Names(ids=[message_id])) for message_id in (log_id, file_id, "none", log_id)),
            return_exceptions=True,
        )
        assert [isinstance(answer, TimeballError) for answer in answers] == [False, True, False, False]
        assert isinstance(answers[1], Corrupt)
        monkeypatch.setattr(TableKeys, "find_keys", find_keys)
        assert len((await look_up(Names(ids=[file_id]))).candidates) == 1

    work()


@on_node()
async def test_simultaneous_cancels_of_one_message_cancel_it_once(world: World) -> None:
    [filed] = await world.bulk("a", [FAR_MS], 1)
    verdicts = await asyncio.gather(*(world.broker.cancel(ids=[filed]) for _ in range(5)))
    assert sorted(verdict.verdict for [verdict] in verdicts) == [*["already_cancelled"] * 4, "cancelled"]
