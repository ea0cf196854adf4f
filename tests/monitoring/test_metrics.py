"""Metrics of a real broker, read by Prometheus' own parser and compared with docs/metrics.md."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.broker.on_node import batch, on_node
from tests.crash.world import HOUR_MS, World

from timeball import __version__
from timeball.broker.accepting.delivery import Lateness
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.rates import GROUPS_AT_ONCE, Stat
from timeball.io.clock import BOUNDS_NS, Durations, ManualClock
from timeball.model.access import ANONYMOUS, Access, Caller, Verb, parse
from timeball.model.errors import Forbidden
from timeball.model.limits import DAY_MS
from timeball.monitoring import metrics
from timeball.monitoring.figures import PeerFigures, ReplicaFigures
from timeball.monitoring.metrics import OTHERS, ROLES, durations, histogram, replica_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


async def samples(world: World, caller: Caller = ANONYMOUS) -> dict[tuple[str, ...], float]:
    """Read every sample, by its name and the values of its labels, with Prometheus' parser."""
    assert world.node is not None
    text = (await world.node.metrics.text(caller)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@on_node()
async def test_a_due_time_in_the_past_does_not_count_as_lateness(world: World) -> None:
    await world.broker.send(batch(1, due_ms=[world.clock.wall - DAY_MS]))
    await world.until(lambda: world.broker.lateness.released == 1, "it is released")
    values = await samples(world)
    assert values["timeball_release_lateness_seconds_bucket", "0.0"] == 1
    assert values["timeball_release_lateness_seconds_sum",] == 0


@on_node()
async def test_metrics_count_sends_releases_cancels_pending_messages_and_commits(world: World) -> None:
    broker = world.broker
    await broker.send(batch(3, unique_key=["a", "b", "c"], delay_ms=[None, HOUR_MS // 2, 30 * HOUR_MS]))
    await broker.send(batch(2, unique_key=["d", "e"], delay_ms=[2_000, 3 * HOUR_MS]))
    await broker.cancel(ids=["b"])
    await broker.reschedule(ids=["e"], delay_ms=4 * HOUR_MS)
    await world.advance(3_000)
    await broker.commit_offsets("readers", "orders", {0: 0, 1: 0})
    values = await samples(world)
    assert values["timeball_accepted_messages_total", "orders"] == 2  # one at once, one released
    assert values["timeball_released_messages_total", "orders"] == 1
    assert values["timeball_cancelled_messages_total", "orders"] == 1
    assert values["timeball_rescheduled_messages_total", "orders"] == 1
    assert values["timeball_release_lateness_seconds_count",] == 1
    assert values["timeball_release_lateness_seconds_bucket", "+Inf"] == 1
    assert values["timeball_waiting_messages",] == 2
    assert values["timeball_schedule_rows", "tail"] + values["timeball_schedule_rows", "near"] >= 2
    assert values["timeball_due_messages", "1h"] <= values["timeball_due_messages", "1d"]
    assert values["timeball_due_messages", "1d"] >= 1
    assert values["timeball_group_lag_messages", "readers", "orders"] == 2
    commits = values["timeball_log_commits_total",]
    assert commits >= 4 and values["timeball_log_sync_seconds_count",] == commits
    assert values["timeball_log_commit_seconds_sum",] >= values["timeball_log_sync_seconds_sum",]
    assert values["timeball_log_stopped",] == values["timeball_disk_full",] == 0
    assert values["timeball_build_info", world.settings.durability, world.settings.strategy, __version__] == 1


@on_node()
async def test_metrics_count_messages_in_flight_and_in_retry(world: World) -> None:
    consuming, in_flight = world.broker.consuming, "timeball_group_in_flight_messages"
    await world.broker.send(batch(3))
    received = await consuming.receive(ReceiveRequest("g", "orders"), 0)
    assert (await samples(world))[in_flight, "g", "orders"] == 3
    consuming.acknowledge_now(received.receipts[:1])
    assert (await samples(world))[in_flight, "g", "orders"] == 2
    await consuming.nack(received.receipts[1], 5_000)
    values, retries = await samples(world), ("timeball_group_retry_messages", "g", "orders")
    assert (values[in_flight, "g", "orders"], values[retries]) == (1, 1)
    assert values["timeball_waiting_messages",] == 0, (
        "a redelivery is no message that a producer has scheduled"
    )
    assert values["timeball_schedule_rows", "tail"] + values["timeball_schedule_rows", "near"] == 1
    await world.advance(5_000)
    await consuming.receive(ReceiveRequest("g", "orders"), 1_000)
    values = await samples(world)
    assert (values[in_flight, "g", "orders"], values.get(retries, 0)) == (2, 0)


@on_node()
async def test_dead_letters_are_counted_by_group_and_topic(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=0))
    consuming, dead_letters = world.broker.consuming, "timeball_dead_letters_total"
    await world.broker.send(batch(3))
    received = await consuming.receive(ReceiveRequest("g", "orders"), 0)
    assert await consuming.dead_letter(received.receipts[0])
    assert (await samples(world))[dead_letters, "g", "orders"] == 1
    await world.advance(61_000)  # the leases of the other two end after their only attempt
    consuming.wake()
    await world.until(lambda: world.broker.rates.totals(Stat.DEAD_NUMS) == {"orders@g": 3}, "all are dead")
    values = await samples(world)
    assert values[dead_letters, "g", "orders"] == 3
    assert ("timeball_accepted_messages_total", "%DLQ%g") not in values


@on_node()
async def test_a_pipeline_that_compacts_is_shown_while_its_lease_runs(world: World) -> None:
    assert (await samples(world))["timeball_pipeline_compacts",] == 0
    world.broker.mover.lease(60_000)
    assert (await samples(world))["timeball_pipeline_compacts",] == 1
    await world.advance(61_000)
    assert (await samples(world))["timeball_pipeline_compacts",] == 0


@on_node()
async def test_topics_beyond_the_limit_of_series_are_summed_up_in_one_series(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SERIES_MAX", 2)
    for topic, rows in (("a", 5), ("b", 4), ("c", 2), ("d", 1)):
        await world.broker.send(batch(rows, topic=[topic] * rows))
        await world.broker.commit_offsets("readers", topic, {0: 0, 1: 0})
    values = await samples(world)
    name = "timeball_accepted_messages_total"
    assert {key[1]: value for key, value in values.items() if key[0] == name} == {"a": 5, "b": 4, OTHERS: 3}
    name = "timeball_group_lag_messages"
    assert [value for key, value in values.items() if key[0] == name] == [5, 4, 3]


ACCESS = b"""
[[accounts]]
access_key = "reader"
secret_key = "secret-of-reader"
topics = { c = "SUB" }
"""


@on_node()
async def test_the_counter_of_the_others_never_falls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SERIES_MAX", 2)
    name, delete = "timeball_accepted_messages_total", world.broker.administration.delete_topic
    reader = Access(parse(ACCESS, "access.toml")).named("reader")
    for topic, rows in (("a", 5), ("b", 4), ("c", 2), ("d", 1)):
        await world.broker.send(batch(rows, topic=[topic] * rows))
    assert (await samples(world))[name, OTHERS] == 3
    assert (await samples(world, reader))[name, OTHERS] == 10, "it may not look at a, b and d"
    await delete("d", ANONYMOUS)
    assert (await samples(world))[name, OTHERS] == 3
    await world.broker.send(batch(1, topic=["c"]))
    assert (await samples(world))[name, OTHERS] == 4
    await delete("a", ANONYMOUS)  # now b and c are shown
    assert (await samples(world))[name, OTHERS] == 4
    assert (await samples(world, reader))[name, OTHERS] == 10
    await delete("b", ANONYMOUS)
    await delete("c", ANONYMOUS)
    values = await samples(world)
    assert {key[1]: value for key, value in values.items() if key[0] == name} == {OTHERS: 4}


class CountingCaller(Caller):
    """An account that may look at every topic. Counts the checks of its rights."""

    __slots__ = ("checks",)

    def __init__(self) -> None:
        self.checks = 0

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        self.checks += 1
        if verb is Verb.ADMIN:
            raise Forbidden("no administrator")


@on_node()
async def test_a_reading_yields_to_the_event_loop_after_each_share_of_topics(world: World) -> None:
    for number in range(1_000):
        world.broker.tables.topics.ensure(f"topic-{number}", 1)
    assert world.node is not None
    caller, most_checks = CountingCaller(), 0
    reading = asyncio.ensure_future(world.node.metrics.text(caller))
    while not reading.done():
        checks_before = caller.checks
        await asyncio.sleep(0)
        most_checks = max(most_checks, caller.checks - checks_before)
    assert f'timeball_accepted_messages_total{{topic="{OTHERS}"}} 0.0' in reading.result().decode()
    assert most_checks < 2 * GROUPS_AT_ONCE and caller.checks < 1_100, "once for each topic"


@on_node(strategy="timer_wheel")
async def test_pending_messages_of_another_strategy_are_counted(world: World) -> None:
    await world.broker.send(batch(2, delay_ms=[HOUR_MS, 2 * HOUR_MS]))
    values = await samples(world)
    assert values["timeball_waiting_messages",] == 2


@on_node()
async def test_docs_metrics_names_each_metric_of_a_broker_and_no_other(world: World) -> None:
    assert world.node is not None
    names_on_page = set(re.findall(r"^\| `(timeball_\w+)", PAGE, re.M))
    # The metrics of a replica (tested below), and of a table in an object store.
    not_of_this_broker = ("timeball_cluster_", "timeball_store_")
    names_on_page = {name for name in names_on_page if not name.startswith(not_of_this_broker)}
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE timeball_")}
    assert names_on_page == families


def test_the_bounds_of_histograms_ascend() -> None:
    for bounds in (BOUNDS_NS, Lateness.BOUNDS):
        assert list(bounds) == sorted(set(bounds))


def replica_samples(figures: ReplicaFigures) -> dict[tuple[str, str], float]:
    """Read the samples of a replica, by the name without its prefix and the label for the node or the role, or ""."""
    values = {}
    for metric in replica_metrics(figures):
        for sample in metric.samples:
            label = sample.labels.get("node", sample.labels.get("role", ""))
            values[sample.name.removeprefix("timeball_cluster_"), label] = sample.value
    return values


def test_a_leader_has_metrics_of_its_replicas() -> None:
    peers = {"b": PeerFigures("b/1", 90, 250.0), "c": PeerFigures("c/1", 100)}
    values = replica_samples(
        ReplicaFigures(
            "g1", "a/1", "leader", "a", epoch=4, promised=4, log_seq=100, committed_seq=95, peers=peers
        )
    )
    assert values["role", "leader"] == 1 and sum(values["role", role] for role in ROLES) == 1
    assert (values["epoch", ""], values["has_leader", ""], values["commit_lag_rows", ""]) == (4, 1, 5)
    assert (values["replica_lag_rows", "b"], values["replica_lag_rows", "c"]) == (10, 0)
    assert values["clock_offset_seconds", "b"] == 0.25 and ("clock_offset_seconds", "c") not in values


def test_a_follower_has_its_apply_lag_and_no_replicas() -> None:
    values = replica_samples(
        ReplicaFigures(
            "g1", "b/1", "follower", "", promised=4, log_seq=100, committed_seq=120, applied_seq=70
        )
    )
    assert (values["apply_lag_rows", ""], values["commit_lag_rows", ""], values["has_leader", ""]) == (
        30,
        0,
        0,
    )
    assert not any(name == "replica_lag_rows" for name, _ in values)


def test_docs_metrics_names_each_metric_of_a_replica_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    peers = {"b": PeerFigures("b/1", 90, 250.0)}
    metrics = {
        metric.name for metric in replica_metrics(ReplicaFigures("g1", "a/1", "leader", "a", peers=peers))
    }
    assert set(re.findall(r"^\| `(timeball_cluster_\w+)", page, re.M)) == metrics


def test_each_bucket_counts_all_values_up_to_its_bound() -> None:
    family = histogram("h", "text", [0.1, 1.0], [2, 0, 1], 7.5)
    samples = {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
    assert samples == {
        ("h_bucket", "0.1"): 2, ("h_bucket", "1.0"): 2, ("h_bucket", "+Inf"): 3, ("h_count",): 3, ("h_sum",): 7.5,
    }  # fmt: skip


def test_a_histogram_of_durations_is_in_seconds() -> None:
    values = Durations(ManualClock())
    values.add(BOUNDS_NS[0])
    family = durations("d", "text", values)
    samples = {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}
    assert samples["d_bucket", str(BOUNDS_NS[0] / 1e9)] == 1
    assert samples["d_sum",] == BOUNDS_NS[0] / 1e9


async def report(world: World, name: str, **fields: object) -> None:
    """Write the report of a job as its process would."""
    files = world.broker.files
    for folder in ("pipeline", "pipeline/status"):
        files.make_dir(folder)
    document = {"job": name, "state": "running", "updated_ms": world.clock.wall, "started_ms": 1, **fields}
    files.replace(f"pipeline/status/{name}.json", msgspec.json.encode(document))


@on_node()
async def test_compactions_of_the_broker_are_counted(world: World) -> None:
    values = await samples(world)
    assert values["timeball_compaction_lag_seconds",] == values["timeball_compaction_failures_total",] == 0
    await world.broker.send(batch(3, delay_ms=[HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS]))
    await world.advance(5_000)
    assert (await samples(world))["timeball_compaction_lag_seconds",] >= 5
    await world.compact()
    values = await samples(world)
    assert values["timeball_compactions_total", "broker"] == 1
    assert values["timeball_compacted_messages_total", "broker"] == 3
    assert values["timeball_compaction_seconds_count",] == 1
    assert values["timeball_compaction_last_timestamp_seconds", "broker"] == world.clock.wall / 1_000
    assert values["timeball_compaction_lag_seconds",] == 0


@on_node()
async def test_a_compaction_that_fails_is_counted(world: World) -> None:
    await world.broker.send(batch(1, delay_ms=[HOUR_MS]))
    world.broker.mover.has_unfinished_attach = True
    try:
        await world.broker.mover.compact()
    except Exception:
        pass
    world.broker.mover.has_unfinished_attach = False
    assert (await samples(world))["timeball_compaction_failures_total",] == 1


@on_node()
async def test_the_lag_of_a_job_grows_with_the_log_after_its_last_report(world: World) -> None:
    await world.broker.send(batch(2))
    last = {
        "epoch": 7,
        "unit": "seq",
        "position": world.broker.log.reader.next_seq,
        "took_ms": 1_500,
        "lag": 9,
    }
    await report(world, "ledger", last=last, epochs=8, rows=70, failures=1)
    values = await samples(world)
    assert (
        values["timeball_pipeline_lag_rows", "ledger"]
        == values["timeball_pipeline_lag_seconds", "ledger"]
        == 0
    )
    await world.broker.send(batch(5))
    await world.advance(30_000)
    values = await samples(world)
    assert values["timeball_pipeline_lag_rows", "ledger"] >= 5
    assert values["timeball_pipeline_lag_seconds", "ledger"] >= 30
    assert values["timeball_pipeline_last_batch_seconds", "ledger"] == 1.5
    assert values["timeball_pipeline_batches_total", "ledger"] == 8
    assert values["timeball_pipeline_rows_total", "ledger"] == 70
    assert values["timeball_pipeline_failures_total", "ledger"] == 1
    assert values["timeball_pipeline_job_state", "ledger", "running"] == 1
    assert values["timeball_pipeline_job_heard_timestamp_seconds", "ledger"] == world.clock.wall / 1_000 - 30


@on_node()
async def test_a_job_that_follows_due_times_and_one_that_is_starting_have_no_lag_in_rows(
    world: World,
) -> None:
    last = {"epoch": 1, "unit": "due_ms", "position": world.clock.wall - 4_000, "took_ms": 1, "lag": 0}
    await report(world, "dispatch", last=last)
    await report(world, "archive", state="starting")
    values = await samples(world)
    assert values["timeball_pipeline_lag_seconds", "dispatch"] == 4
    assert ("timeball_pipeline_lag_rows", "dispatch") not in values
    assert values["timeball_pipeline_job_state", "archive", "starting"] == 1
    assert ("timeball_pipeline_lag_rows", "archive") not in values


@on_node()
async def test_malformed_reports_of_jobs_are_left_out(world: World) -> None:
    await report(world, "one", state=5)
    await report(world, "two", last={"unit": "seq", "position": "x", "took_ms": 1})
    await report(world, "three", last={"unit": "seq", "position": -(1 << 40), "took_ms": -1})
    await report(world, "four", job="x" * 5_000)
    values = await samples(world)
    assert {key[1] for key in values if key[0] == "timeball_pipeline_job_state"} == {"three"}
