"""What moves messages into tables, as a real broker and reports of jobs say it."""

from __future__ import annotations

import msgspec
from tests.broker.on_node import batch, on_node
from tests.crash.world import HOUR_MS, World
from tests.monitoring.test_metrics import samples


async def report(world: World, name: str, **fields: object) -> None:
    files = world.broker.files
    for folder in ("pipeline", "pipeline/status"):
        files.make_dir(folder)
    whole = {"job": name, "state": "running", "updated_ms": world.clock.wall, "started_ms": 1, **fields}
    files.replace(f"pipeline/status/{name}.json", msgspec.json.encode(whole))


@on_node()
async def test_the_brokers_own_compactions(world: World) -> None:
    found = await samples(world)
    assert found["timeball_compaction_lag_seconds",] == found["timeball_compaction_failures_total",] == 0
    await world.broker.send(batch(3, delay_ms=[HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS]))
    await world.advance(5_000)
    assert (await samples(world))["timeball_compaction_lag_seconds",] >= 5
    await world.compact()
    found = await samples(world)
    assert found["timeball_compactions_total", "broker"] == 1
    assert found["timeball_compacted_messages_total", "broker"] == 3
    assert found["timeball_compaction_seconds_count",] == 1
    assert found["timeball_compaction_last_timestamp_seconds", "broker"] == world.clock.wall / 1_000
    assert found["timeball_compaction_lag_seconds",] == 0


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
async def test_a_job_is_behind_by_the_log_as_it_is_now(world: World) -> None:
    await world.broker.send(batch(2))
    last = {
        "epoch": 7,
        "unit": "seq",
        "position": world.broker.log.reader.next_seq,
        "took_ms": 1_500,
        "lag": 9,
    }
    await report(world, "ledger", last=last, epochs=8, rows=70, failures=1)
    found = await samples(world)
    assert (
        found["timeball_pipeline_lag_rows", "ledger"] == found["timeball_pipeline_lag_seconds", "ledger"] == 0
    )
    await world.broker.send(batch(5))
    await world.advance(30_000)
    found = await samples(world)
    assert found["timeball_pipeline_lag_rows", "ledger"] >= 5
    assert found["timeball_pipeline_lag_seconds", "ledger"] >= 30
    assert found["timeball_pipeline_last_batch_seconds", "ledger"] == 1.5
    assert found["timeball_pipeline_batches_total", "ledger"] == 8
    assert found["timeball_pipeline_rows_total", "ledger"] == 70
    assert found["timeball_pipeline_failures_total", "ledger"] == 1
    assert found["timeball_pipeline_job_state", "ledger", "running"] == 1
    assert found["timeball_pipeline_job_heard_timestamp_seconds", "ledger"] == world.clock.wall / 1_000 - 30


@on_node()
async def test_a_job_that_follows_instants_and_one_that_has_just_begun(world: World) -> None:
    last = {"epoch": 1, "unit": "due_ms", "position": world.clock.wall - 4_000, "took_ms": 1, "lag": 0}
    await report(world, "dispatch", last=last)
    await report(world, "archive", state="starting")
    found = await samples(world)
    assert found["timeball_pipeline_lag_seconds", "dispatch"] == 4
    assert ("timeball_pipeline_lag_rows", "dispatch") not in found
    assert found["timeball_pipeline_job_state", "archive", "starting"] == 1
    assert ("timeball_pipeline_lag_rows", "archive") not in found


@on_node()
async def test_reports_of_any_content_break_no_scrape(world: World) -> None:
    await report(world, "one", state=5)
    await report(world, "two", last={"unit": "seq", "position": "x", "took_ms": 1})
    await report(world, "three", last={"unit": "seq", "position": -(1 << 40), "took_ms": -1})
    await report(world, "four", job="x" * 5_000)
    found = await samples(world)
    assert {key[1] for key in found if key[0] == "timeball_pipeline_job_state"} == {"three"}
