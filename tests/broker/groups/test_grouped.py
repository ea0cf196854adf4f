"""The broker of one group among several: verbs that name messages ask all groups, and are answered from one log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.broker.two_groups import InGroup, Neighbours, groups_of, in_two_groups
from tests.crash.lives import run
from tests.crash.scenarios import FAR_MS

from timeball.broker.revoking.cancel import RecallRefused, encode_handle
from timeball.broker.revoking.group_questions import CancelHere, FindHere, GroupRoute, RecallHere, RouteHere
from timeball.model.access import Access, Principal, parse
from timeball.model.answers import Verdict
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, Unavailable

ACCOUNTS = b"""
[[accounts]]
access_key = "shop"
secret_key = "shop's secret"
topics = { orders = "PUB", looked = "SUB" }
"""


def verdict_words(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.verdict for verdict in verdicts]


def shop() -> Principal:
    """Build a caller with the account of ACCOUNTS."""
    access = Access(parse(ACCOUNTS, "access.toml"))
    return access.authenticate({"authorization": "Bearer shop:shop's secret"}, 0)


@in_two_groups
async def test_messages_of_another_group_can_be_cancelled_rescheduled_and_found(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    (key,) = await two.send("orders", [FAR_MS])
    assert verdict_words(await one.broker.reschedule(ids=[key], delay_ms=2 * FAR_MS)) == ["rescheduled"]
    (place,) = await one.broker.find(key)
    assert (place.state, place.due_ms) == ("waiting", two.clock.wall + 2 * FAR_MS)
    assert verdict_words(await one.broker.cancel(ids=[key, "nothing"])) == ["cancelled", "not_found"]
    assert verdict_words(await two.broker.cancel(ids=[key])) == ["already_cancelled"]
    assert [group for group, _ in neighbours.asked] == ["g2", "g2", "g2", "g1"], (
        "each group is asked once, and passes no question on"
    )


@in_two_groups
async def test_a_cancel_by_key_cancels_messages_in_all_groups(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    for world in (one, two):
        await world.send("orders", [FAR_MS])
    assert verdict_words(await one.broker.cancel(keys=["k00"])) == ["cancelled", "cancelled"]


@in_two_groups
async def test_the_verdict_is_unavailable_if_a_group_does_not_answer(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    (here,) = await one.send("orders", [FAR_MS])
    neighbours.silent.add("g2")
    assert verdict_words(await one.broker.cancel(ids=[here, "nothing"])) == [
        "unavailable",
        "cancelled",
        "unavailable",
    ]
    assert verdict_words(await one.broker.reschedule(ids=["nothing"], delay_ms=1)) == ["unavailable"]
    assert [place.state for place in await one.broker.find(here)] == ["cancelled"]
    with pytest.raises(Unavailable):
        await one.broker.find("nothing")
    neighbours.silent.clear()
    assert verdict_words(await one.broker.cancel(ids=[here, "nothing"])) == ["already_cancelled", "not_found"]


@in_two_groups
async def test_a_cancel_by_number_applies_to_the_asked_group_only(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await one.send("orders", [FAR_MS])
    await two.send("orders", [FAR_MS])
    (number,) = {place.seq for place in await one.broker.find("k00000")}
    neighbours.asked.clear()
    assert verdict_words(await one.broker.cancel(seqs=[number])) == ["cancelled"]
    assert verdict_words(await one.broker.reschedule(seqs=[number], delay_ms=1)) == ["already_cancelled"]
    assert neighbours.asked == []
    assert verdict_words(await two.broker.cancel(seqs=[number])) == ["cancelled"]


@in_two_groups
async def test_a_cancel_before_the_groups_are_known_is_unavailable_and_changes_nothing(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    (key,) = await one.send("orders", [FAR_MS])
    neighbours.are_known = False
    with pytest.raises(Unavailable):
        await one.broker.cancel(ids=[key])
    neighbours.are_known = True
    assert verdict_words(await one.broker.cancel(ids=[key])) == ["cancelled"]


@in_two_groups
async def test_a_reschedule_in_all_groups_with_an_invalid_delay_is_refused(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    with pytest.raises(InvalidDelay):
        await one.broker.reschedule(ids=["x"], delay_ms=-1)


@in_two_groups
async def test_the_refusal_of_another_group_is_that_of_the_request(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    answer = await two.broker.answer(RecallHere(topic="orders", handle="no handle"), shop())
    assert answer.refusal is not None and answer.refusal.code == "not_found"
    (key,) = await two.send("orders", [FAR_MS])
    handle = encode_handle("orders", "g2", two.clock.wall + FAR_MS, key)
    assert await one.broker.recall("orders", handle) == key
    assert await two.broker.recall("orders", handle) == key, "a repeated recall, at the group of the handle"
    unknown = encode_handle("orders", "g2", two.clock.wall + FAR_MS, "unknown")
    with pytest.raises(RecallRefused) as refused:
        await one.broker.recall("orders", unknown)
    assert (refused.value.verdict, refused.value.sentence) == (
        "not_found",
        "no pending message matches the handle",
    )
    with pytest.raises(NotFound):
        await one.broker.recall("none", encode_handle("none", "g2", 1, key))
    with pytest.raises(InvalidMessage):
        await one.broker.recall("orders", "no handle")
    neighbours.silent.add("g2")
    with pytest.raises(Unavailable, match="g2 did not answer"):
        await one.broker.recall("orders", handle)


@in_two_groups
async def test_a_handle_of_no_group_is_refused_as_by_a_broker_alone(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await one.send("orders", [FAR_MS])
    with pytest.raises(InvalidMessage, match="another broker"):
        await one.broker.recall("orders", encode_handle("orders", "elsewhere", 1, "k"))


@in_two_groups
async def test_each_group_checks_the_permission_of_the_caller(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    (own_key,) = await two.send("orders", [FAR_MS])
    two.keys = 1_000
    (other_key,) = await two.send("secrets", [FAR_MS])
    verdicts = await one.broker.cancel(ids=[own_key, other_key], caller=shop())
    assert verdict_words(verdicts) == ["cancelled", "not_found"], (
        "a message that the account may not cancel is not found"
    )
    assert verdict_words(await one.broker.cancel(ids=[other_key])) == ["cancelled"]
    assert (await two.broker.answer(FindHere(id=other_key), shop())).places == []
    answer = await two.broker.answer(RouteHere(topic="secrets"), shop())
    assert answer.refusal is not None and answer.refusal.code == "forbidden"
    accounts = {row.by for row in await one.broker.find(own_key)}
    assert accounts == {"shop"}


@in_two_groups
async def test_routes_name_the_groups_that_have_the_topic(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    assert await one.broker.routes("orders") == {}
    await two.create_topic("orders", 3)
    assert await one.broker.routes("orders") == {"g2": GroupRoute("g2", 3, 3, "", in_order=False)}
    assert await two.broker.routes("orders") == {}
    neighbours.silent.add("g2")
    assert await one.broker.routes("orders") == {"g2": None}


def test_the_only_group_of_a_cluster_answers_as_a_broker_alone() -> None:
    async def life() -> None:
        async with groups_of("g1") as (neighbours, worlds):
            (key,) = await worlds["g1"].send("orders", [FAR_MS])
            verdicts = await worlds["g1"].broker.cancel(ids=[key, key])
            assert verdict_words(verdicts) == ["cancelled", "already_cancelled"]
            answer = await worlds["g1"].broker.answer(CancelHere(ids=[key]), shop())
            assert verdict_words(answer.verdicts) == ["already_cancelled"]
            assert neighbours.asked == []

    run(life())
