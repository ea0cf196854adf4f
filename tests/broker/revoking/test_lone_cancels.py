"""Cancels of one id each that arrive together: they share a look-up and a commit, and each has its own verdict."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.scenarios import FAR_MS
from tests.crash.world import World

from timeball.broker.registry.selections import SelectionFacts
from timeball.broker.revoking import cancel
from timeball.broker.revoking.scheduled_lookup import LookUps, Search
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Corrupt
from timeball.table.key_index import TableKeys


async def cancel_each(world: World, *ids: str, topic: str | None = None) -> list[list[str]]:
    """Cancel each id by a request of its own, all of them at once. Returns the verdicts of each request."""
    requests = (world.broker.cancel(ids=[message_id], topic=topic) for message_id in ids)
    answers = await asyncio.gather(*requests)
    subjects = [{verdict.subject for verdict in answer} for answer in answers]
    assert subjects == [{message_id} for message_id in ids]
    return [[verdict.verdict for verdict in answer] for answer in answers]


def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of ids of each search."""
    counts, init = list[int](), Search.__init__

    def counted(self: Search, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        counts.append(len(self._ids))

    monkeypatch.setattr(Search, "__init__", counted)
    return counts


def test_cancels_that_arrive_together_share_a_look_up_and_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = searches(monkeypatch)

    @on_node()
    async def work(world: World) -> None:
        ids = await world.send("a", [FAR_MS] * 20)
        commits = world.broker.log.writer.statistics.commits
        assert await cancel_each(world, *ids, "unknown") == [["cancelled"]] * 20 + [["not_found"]]
        assert counts == [21]
        assert world.broker.log.writer.statistics.commits == commits + 1
        assert await cancel_each(world, *ids) == [["already_cancelled"]] * 20

    work()


@on_node()
async def test_of_two_simultaneous_cancels_of_an_id_one_cancels_it(world: World) -> None:
    first, second = await world.send("a", [FAR_MS] * 2)
    verdicts = await cancel_each(world, first, second, first)
    assert verdicts[1] == ["cancelled"]
    assert sorted([verdicts[0], verdicts[2]]) == [["already_cancelled"], ["cancelled"]]


@on_node()
async def test_cancels_that_share_a_look_up_respect_their_own_topic_and_permissions(world: World) -> None:
    (in_a,), (in_b,) = await world.send("a", [FAR_MS]), await world.send("b", [FAR_MS])
    of_topic_a, of_topic_b, only_b_allowed = await asyncio.gather(
        cancel_each(world, in_a, in_b, topic="a"), cancel_each(world, in_b, topic="b"),
        world.broker.lone_cancels.put(in_a, None, ANONYMOUS, lambda topic: topic == "b"),
    )  # fmt: skip
    assert (of_topic_a, of_topic_b) == ([["cancelled"], ["not_found"]], [["cancelled"]])
    assert only_b_allowed is not None and [verdict.verdict for verdict in only_b_allowed] == ["not_found"]


def test_a_cancel_of_many_messages_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "SLICE_ROWS", 3)

    @on_node()
    async def work(world: World) -> None:
        (one,) = await world.send("a", [FAR_MS])
        await world.broker.send(batch(5, unique_key=["many"] * 5, delay_ms=[FAR_MS] * 5))
        assert await world.broker.lone_cancels.put("many", None, ANONYMOUS, None) is None
        assert await cancel_each(world, "many", one) == [["cancelled"] * 5, ["cancelled"]]

    work()


def test_a_search_that_fails_refuses_only_its_own_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_node()
    async def work(world: World) -> None:
        ids = await world.send("a", [FAR_MS] * 2)
        find_keys = TableKeys.find_keys

        def broken(self: TableKeys, files: object, hashes: object) -> object:
            if len(hashes) > 1:  # type: ignore[arg-type]
                raise Corrupt("a file")
            return find_keys(self, files, hashes)  # type: ignore[arg-type]

        monkeypatch.setattr(TableKeys, "find_keys", broken)
        assert await cancel_each(world, *ids) == [["cancelled"]] * 2

    work()


def test_a_condition_that_cannot_be_read_refuses_only_its_own_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_node()
    async def work(world: World) -> None:
        (covered,) = await world.send("a", [FAR_MS])
        await world.broker.selections.select(
            SelectionFacts(seq=0, at_ms=0, topics=["a"], where="x IS NULL"), ANONYMOUS
        )

        def broken(self: LookUps, candidates: object) -> object:
            raise Corrupt("a file")

        monkeypatch.setattr(LookUps, "_read_conditions", broken)
        (after,) = await world.send("b", [FAR_MS])
        verdicts = await asyncio.gather(
            *(world.broker.cancel(ids=[message_id]) for message_id in (covered, after)),
            return_exceptions=True,
        )
        assert isinstance(verdicts[0], Corrupt)
        assert not isinstance(verdicts[1], BaseException) and verdicts[1][0].verdict == "cancelled"

    work()
