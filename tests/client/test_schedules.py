"""`ball.schedules`, blocking and awaitable, against a real broker."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from tests.client.awaited import Dial
from tests.node_fixture import RunningNode

from timeball import AsyncTimeball, InvalidDelay, NotFound, RequestError, Timeball
from timeball.client.async_timeball import AsyncSchedules
from timeball.client.schedules import Schedules

BOTH_CLIENTS = True


RULE = {"cron": "0 9 * * 1", "zone": "Europe/Berlin"}


def test_a_schedule_is_put_read_paused_run_and_deleted(node: RunningNode, dial: Dial) -> None:
    with dial(node.http_endpoint) as ball:
        schedules = ball.schedules
        created = schedules.put(
            "client", RULE, topic="orders", body=b"\xff", tag="t", keys=["k"], properties={"p": "1"},
            catch_up="none", catch_up_within="1h",
        )  # fmt: skip
        assert (created.outcome, created.state, created.base64, created.tag) == (
            "created",
            "active",
            b"\xff",
            "t",
        )
        assert created.next is not None and created.next.local.endswith("T09:00:00")
        assert (created.keys, created.properties) == (["k"], {"p": "1"})
        assert (created.catch_up, created.catch_up_within) == ("none", "1h")
        assert ball.get(created.next.id).state == "waiting"
        with_overlap = schedules.put("client", RULE, topic="orders", body="x", overlap="skip", group="makers")
        assert (with_overlap.overlap, with_overlap.group) == ("skip", "makers")
        replaced = schedules.put("client", RULE, topic="orders", body="text")
        assert (replaced.overlap, replaced.group) == ("allow", "")
        assert (replaced.outcome, replaced.body) == ("replaced", "text")
        assert schedules.get("client").next == created.next
        assert [schedule.name for schedule in schedules.all("orders")] == ["client"] and schedules.all(
            "others"
        ) == []
        assert schedules.pause("client").state == "paused" and schedules.resume("client").state == "active"
        assert ball.get(schedules.run("client")).state == "visible"
        assert {run.state for run in schedules.history("client")} == {"unknown"}
        schedules.delete("client")
        with pytest.raises(NotFound):
            schedules.get("client")


def test_a_wrong_time_is_refused_with_the_name_of_its_argument(node: RunningNode) -> None:
    with Timeball(node.http_endpoint) as ball:
        with pytest.raises(InvalidDelay, match=r"^after='soon'"):
            ball.schedules.preview({"every": "1h"}, after="soon")
        with pytest.raises(InvalidDelay, match=r"^start='soon'"):
            ball.selections.cancel(start="soon")
        with pytest.raises(InvalidDelay, match=r"^to='soon'"):
            ball.selections.cancel(to="soon")
        with pytest.raises(InvalidDelay, match=r"^expires_at='soon'"):
            ball.send("orders", "x", after="1h", expires_at="soon")


def test_a_preview_computes_the_times_of_a_rule_and_refuses_a_wrong_one(
    node: RunningNode, dial: Dial
) -> None:
    with dial(node.http_endpoint) as ball:
        times = ball.schedules.preview({"every": "90m"}, count=2, after="2030-01-01T00:00:00Z")
        assert [time.due_ms % 86_400_000 // 60_000 for time in times] == [90, 180], "minutes after midnight"
        with pytest.raises(InvalidDelay):
            ball.schedules.preview({"every": "soon"})


def test_all_pages_of_schedules_are_read(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, dial: Dial
) -> None:
    monkeypatch.setattr("timeball.edges.http.handlers.schedules.PAGE_ROWS", 2)
    with dial(node.http_endpoint) as ball:
        for name in ("p1", "p2", "p3", "p4", "p5"):
            ball.schedules.put(name, RULE, topic="pages", body="x")
        assert [schedule.name for schedule in ball.schedules.all("pages")] == ["p1", "p2", "p3", "p4", "p5"]


def test_schedules_are_refused_without_an_address_of_http(node: RunningNode) -> None:
    with Timeball(node.endpoint) as ball, pytest.raises(RequestError, match="http://"):
        _ = ball.schedules


def test_asyncschedules_has_all_methods_of_schedules_as_coroutines(node: RunningNode) -> None:
    names = {name for name in dir(Schedules) if not name.startswith("_")}
    assert names == {name for name in dir(AsyncSchedules) if not name.startswith("_")}
    assert all(inspect.iscoroutinefunction(getattr(AsyncSchedules, name)) for name in names)

    async def main() -> None:
        async with AsyncTimeball(node.http_endpoint) as ball:
            schedule = await ball.schedules.put("awaited", RULE, topic="orders", body="x")
            assert (await ball.schedules.get("awaited")).next == schedule.next
            await ball.schedules.delete("awaited")

    asyncio.run(main())
