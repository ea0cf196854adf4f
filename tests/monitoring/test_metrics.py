"""Metrics: what a real broker says, read by Prometheus' own parser, and what docs/metrics.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.broker.on_node import batch, on_node
from tests.crash.world import HOUR_MS, World

from timeball import __version__
from timeball.broker.accepting.delivery import Lateness
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.rates import Stat
from timeball.io.clock import BOUNDS_NS
from timeball.model.access import ANONYMOUS
from timeball.model.limits import DAY_MS
from timeball.monitoring import metrics
from timeball.monitoring.metrics import OTHERS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


async def samples(world: World) -> dict[tuple[str, ...], float]:
    """Every sample by name and the values of its labels, as Prometheus reads them."""
    assert world.node is not None
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@on_node()
async def test_a_due_time_in_the_past_pages_no_operator(world: World) -> None:
    await world.broker.send(batch(1, due_ms=[world.clock.wall - DAY_MS]))
    await world.until(lambda: world.broker.lateness.released == 1, "it is released")
    found = await samples(world)
    assert found["timeball_release_lateness_seconds_bucket", "0.0"] == 1
    assert found["timeball_release_lateness_seconds_sum",] == 0


@on_node()
async def test_what_a_broker_did_and_holds(world: World) -> None:
    broker = world.broker
    await broker.send(batch(3, unique_key=["a", "b", "c"], delay_ms=[None, HOUR_MS // 2, 30 * HOUR_MS]))
    await broker.send(batch(2, unique_key=["d", "e"], delay_ms=[2_000, 3 * HOUR_MS]))
    await broker.cancel(ids=["b"])
    await broker.reschedule(ids=["e"], delay_ms=4 * HOUR_MS)
    await world.advance(3_000)
    await broker.commit_offsets("readers", "orders", {0: 0, 1: 0})
    found = await samples(world)
    assert found["timeball_accepted_messages_total", "orders"] == 2  # one at once, one released
    assert found["timeball_released_messages_total", "orders"] == 1
    assert found["timeball_cancelled_messages_total", "orders"] == 1
    assert found["timeball_rescheduled_messages_total", "orders"] == 1
    assert found["timeball_release_lateness_seconds_count",] == 1
    assert found["timeball_release_lateness_seconds_bucket", "+Inf"] == 1
    assert found["timeball_waiting_messages",] == 2
    assert found["timeball_schedule_rows", "tail"] + found["timeball_schedule_rows", "near"] >= 2
    assert found["timeball_due_messages", "1h"] <= found["timeball_due_messages", "1d"]
    assert found["timeball_due_messages", "1d"] >= 1
    assert found["timeball_group_lag_messages", "readers", "orders"] == 2
    commits = found["timeball_log_commits_total",]
    assert commits >= 4 and found["timeball_log_sync_seconds_count",] == commits
    assert found["timeball_log_commit_seconds_sum",] >= found["timeball_log_sync_seconds_sum",]
    assert found["timeball_log_stopped",] == found["timeball_disk_full",] == 0
    assert found["timeball_build_info", world.settings.durability, world.settings.strategy, __version__] == 1


@on_node()
async def test_what_consumers_have_in_flight(world: World) -> None:
    consuming, in_flight = world.broker.consuming, "timeball_group_in_flight_messages"
    await world.broker.send(batch(3))
    received = await consuming.receive(ReceiveRequest("g", "orders"), 0)
    assert (await samples(world))[in_flight, "g", "orders"] == 3
    consuming.acknowledge_now(received.receipts[:1])
    assert (await samples(world))[in_flight, "g", "orders"] == 2
    await consuming.nack(received.receipts[1], 5_000)
    found, retries = await samples(world), ("timeball_group_retry_messages", "g", "orders")
    assert (found[in_flight, "g", "orders"], found[retries]) == (1, 1)
    assert found["timeball_waiting_messages",] == 0, (
        "a redelivery is no message that a producer has scheduled"
    )
    assert found["timeball_schedule_rows", "tail"] + found["timeball_schedule_rows", "near"] == 1
    await world.advance(5_000)
    await consuming.receive(ReceiveRequest("g", "orders"), 1_000)
    found = await samples(world)
    assert (found[in_flight, "g", "orders"], found.get(retries, 0)) == (2, 0)


@on_node()
async def test_dead_letters_are_counted_by_group_and_topic(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=0))
    consuming, dead = world.broker.consuming, "timeball_dead_letters_total"
    await world.broker.send(batch(3))
    received = await consuming.receive(ReceiveRequest("g", "orders"), 0)
    assert await consuming.dead_letter(received.receipts[0])
    assert (await samples(world))[dead, "g", "orders"] == 1
    await world.advance(61_000)  # the leases of the others end, after the only attempt
    consuming.wake()
    await world.until(lambda: world.broker.rates.totals(Stat.DEAD_NUMS) == {"orders@g": 3}, "all are dead")
    found = await samples(world)
    assert found[dead, "g", "orders"] == 3
    assert ("timeball_accepted_messages_total", "%DLQ%g") not in found


@on_node()
async def test_a_pipeline_that_compacts_is_seen(world: World) -> None:
    assert (await samples(world))["timeball_pipeline_compacts",] == 0
    world.broker.mover.lease(60_000)
    assert (await samples(world))["timeball_pipeline_compacts",] == 1
    await world.advance(61_000)
    assert (await samples(world))["timeball_pipeline_compacts",] == 0


@on_node()
async def test_more_topics_than_are_shown_are_one_series(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SERIES_MAX", 2)
    for topic, rows in (("a", 5), ("b", 4), ("c", 2), ("d", 1)):
        await world.broker.send(batch(rows, topic=[topic] * rows))
        await world.broker.commit_offsets("readers", topic, {0: 0, 1: 0})
    found = await samples(world)
    name = "timeball_accepted_messages_total"
    assert {key[1]: value for key, value in found.items() if key[0] == name} == {"a": 5, "b": 4, OTHERS: 3}
    name = "timeball_group_lag_messages"
    assert [value for key, value in found.items() if key[0] == name] == [5, 4, 3]


@on_node(strategy="timer_wheel")
async def test_another_strategy_says_what_waits(world: World) -> None:
    await world.broker.send(batch(2, delay_ms=[HOUR_MS, 2 * HOUR_MS]))
    found = await samples(world)
    assert found["timeball_waiting_messages",] == 2


@on_node()
async def test_the_page_names_every_metric_and_no_other(world: World) -> None:
    assert world.node is not None
    named = set(re.findall(r"^\| `(timeball_\w+)", PAGE, re.M))
    # Those of a replica come with a cluster alone (test_replica_figures.py), of a store with a table in one.
    elsewhere = ("timeball_cluster_", "timeball_store_")
    named = {name for name in named if not name.startswith(elsewhere)}
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE timeball_")}
    assert named == families


def test_bounds_ascend() -> None:
    for bounds in (BOUNDS_NS, Lateness.BOUNDS):
        assert list(bounds) == sorted(set(bounds))
