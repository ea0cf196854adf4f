"""Real workers of Celery: prefork, threads and solo; kills of workers and brokers; the same script on Redis."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import environment, timeball
from tests.docs_pages import page
from tests.interop.celery_processes import (
    HERE,
    POOLS,
    TIMEBALL,
    Broker,
    ManualBroker,
    Shop,
    in_seconds,
    redis_server,
    shop_of,
)
from tests.node_fixture import eventually
from tests.rounds import rounds

from timeball import Timeball

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("celery")]

KILLS = rounds(6, 40)
TASKS_PER_KILL = 12
PAGE_URL, PAGE_REDIS, PAGE_DATA = "127.0.0.1:7480", "127.0.0.1:6379", "/tmp/shop-data"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker with the system's clock."""
    running = Broker(tmp_path / "data")
    yield running
    running.stop()


@pytest.fixture
def manual_broker(tmp_path: Path) -> Iterator[ManualBroker]:
    """A broker with a manual clock."""
    running = ManualBroker(tmp_path / "data")
    yield running
    running.stop()


# ---- workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
def test_tasks_run_once_and_not_before_their_etas(
    broker: Broker, tmp_path: Path, pool: str, acks_late: bool
) -> None:
    with shop_of(tmp_path, broker.url, task_acks_late=acks_late) as shop:
        shop.worker(*POOLS[pool]).wait_ready()
        etas = {f"eta-{number}": in_seconds(2 + number / 20) for number in range(40)}
        shop.send([f"now-{number}" for number in range(40)])
        shop.send(list(etas), etas=list(etas.values()))
        eventually(lambda: len(shop.ended()) == 80, "all tasks have run")
        shop.workers[0].end()
        assert set(shop.ended().values()) == {1}
        for run in shop.runs():
            if run["name"] in etas:
                assert run["ms"] >= int(etas[run["name"]].timestamp() * 1000)
        with Timeball(broker.endpoint) as ball:
            (state,) = ball.groups("celery")
            assert [(each.lag, each.in_flight) for each in state.topics] == [(0, 0)]


def test_a_child_that_dies_is_replaced_and_its_task_becomes_a_dead_letter(
    manual_broker: ManualBroker, tmp_path: Path
) -> None:
    broker = manual_broker
    with shop_of(tmp_path, broker.url, **TIMEBALL) as shop:
        worker = shop.worker(*POOLS["prefork"])
        worker.wait_ready()
        program = "import celery_shop\ncelery_shop.die.apply_async(['poison'], timeball_id='poison')\n"
        subprocess.run(
            [sys.executable, "-c", program], env=environment(**shop.environment), cwd=HERE, check=True
        )
        with Timeball(broker.endpoint) as ball:
            for count in range(2, 17):  # the second run follows the first at once
                eventually(lambda count=count: len(shop.runs()) == count, f"{count} runs")
                eventually(
                    lambda: [each.state for each in ball.get("poison").groups] == ["waiting"], "a delay"
                )
                # Exactly the delay before the next run. During more time the worker's leases would end.
                broker.wait(timedelta(seconds=min(2 ** (count - 2), 7_200)))
            eventually(lambda: _dead_letters(ball), "a dead letter")
        assert Counter(run["name"] for run in shop.runs()) == {"poison": 17}
        shop.send(["healthy"])
        eventually(lambda: shop.ended()["healthy"] == 1, "the pool works on")
        worker.end()


def _dead_letters(ball: Timeball) -> int:
    """Return the number of dead letters of Celery's group."""
    return len(ball.dead_letters("celery").dead_letters)


def test_a_worker_that_stops_returns_its_tasks_at_once(broker: Broker, tmp_path: Path) -> None:
    with shop_of(tmp_path, broker.url) as shop:  # with leases of 30 s
        first = shop.worker("-P", "solo")
        first.wait_ready()
        shop.send([f"task-{number}" for number in range(6)], seconds=1.0)
        eventually(lambda: shop.runs(), "the first task begins")
        begin_s = time.monotonic()
        first.end()
        shop.worker(*POOLS["threads"]).wait_ready()
        eventually(lambda: len(shop.ended()) == 6, "all tasks have run")
        assert time.monotonic() - begin_s < 25, "before a lease ends"
        assert set(shop.ended().values()) == {1}


def test_workers_answer_inspections_from_the_command_line(broker: Broker, tmp_path: Path) -> None:
    with shop_of(tmp_path, broker.url) as shop:
        for _ in range(2):
            shop.worker("-P", "solo").wait_ready()
        assert shop.celery("inspect", "ping", "--timeout", "10").count("pong") == 2
        assert "empty" in shop.celery("inspect", "scheduled", "--timeout", "10")


# ---- kills ----------------------------------------------------------------------------------------------------


def was_interrupted(shop: Shop, name: str, kills_ms: list[int], slack_ms: int) -> bool:
    """Check that there was a kill between each two consecutive begins of the runs of this task.

    A kill up to `slack_ms` before the earlier begin counts, too. `kills_ms` has the times of the kills of processes.
    """
    begins = sorted(run["ms"] for run in shop.runs() if (run["name"], run["what"]) == (name, "begin"))
    return all(
        any(begin - slack_ms <= kill <= later for kill in kills_ms)
        for begin, later in itertools.pairwise(begins)
    )


@pytest.mark.siege
@pytest.mark.parametrize("pool", POOLS)
def test_no_task_is_lost_when_workers_and_the_broker_are_killed(tmp_path: Path, pool: str) -> None:
    """Each task runs to its end. It runs again only if something was killed since its run began."""
    broker, chance = Broker(tmp_path / "data"), random.Random(17)
    kills_ms: list[int] = []
    try:
        with shop_of(tmp_path, broker.url, task_acks_late=True, **TIMEBALL) as shop:
            alive = [shop.worker(*POOLS[pool]) for _ in range(2)]
            for worker in alive:
                worker.wait_ready()
            names: list[str] = []
            for kill in range(KILLS):
                new = [f"{kill}-{number}" for number in range(TASKS_PER_KILL)]
                etas = [in_seconds(chance.uniform(0, 3)) for _ in new]
                shop.send(new, seconds=0.2, etas=etas)
                names += new
                threading.Event().wait(chance.uniform(0.5, 2))
                kills_ms.append(time.time_ns() // 1_000_000)
                if kill % 3 == 2:
                    broker.kill()
                    broker.start()
                else:
                    alive.pop(chance.randrange(2)).kill()
                    alive.append(shop.worker(*POOLS[pool]))
                    alive[-1].wait_ready()
            eventually(lambda: len(shop.ended()) == len(names), "all tasks have run")
            again = [name for name in names if not was_interrupted(shop, name, kills_ms, 1_000)]
            assert not again, f"ran twice without a kill: {again}"
    finally:
        broker.stop()


# ---- beside Redis ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["timeball", "redis"])
def test_only_redis_repeats_a_task_whose_eta_is_beyond_the_visibility_timeout(
    tmp_path: Path, system: str
) -> None:
    """A second worker starts while the first one holds the task, as in a deployment. Redis gives it the task, too."""
    with ExitStack() as stack:
        if system == "redis":
            url = f"redis://127.0.0.1:{stack.enter_context(redis_server(tmp_path))}/0"
            settings: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": 2}}
        else:
            running = Broker(tmp_path / "data")
            stack.callback(running.stop)
            url, settings = running.url, TIMEBALL
        shop = stack.enter_context(shop_of(tmp_path, url, **settings))
        shop.worker("-P", "solo").wait_ready()
        eta = in_seconds(20)
        shop.send(["reminder"], etas=[eta])
        threading.Event().wait(4)  # longer than the visibility timeout
        shop.worker("-P", "solo").wait_ready()
        eventually(lambda: shop.ended()["reminder"], "the reminder")
        threading.Event().wait(3)
        runs = shop.ended()["reminder"]
        assert runs == 1 if system == "timeball" else runs > 1


def test_pending_tasks_are_moved_from_redis(broker: Broker, tmp_path: Path) -> None:
    """Thirteen tasks with an ETA are moved, of which a worker has fetched eight. One without an ETA stays in Redis."""
    with redis_server(tmp_path) as port:
        url, target = f"redis://127.0.0.1:{port}/0", ["--endpoint", broker.endpoint, "--json"]
        with shop_of(tmp_path, url, task_default_queue="mail.high") as old:
            worker = old.worker("-P", "solo")
            worker.wait_ready()
            fetched = [f"fetched-{number}" for number in range(8)]
            old.send(fetched, etas=[in_seconds(60)] * 8)
            eventually(lambda: worker.log().count("received") == 8, "the worker has fetched them")
            refused = timeball("import", "celery", "--from", url, *target)
            assert refused.returncode == 2 and "stop the workers first" in refused.stderr
            worker.kill()  # so they stay in `unacked`
            old.send([f"waits-{number}" for number in range(5)], etas=[in_seconds(60)] * 5)
            old.send(["now"])
            for words in (["--dry-run"], [], []):
                done = timeball("import", "celery", "--from", url, *words, *target)
                assert done.returncode == 0, done.stderr
                moved = json.loads(done.stdout)
                assert moved["moved"] in (0, 13) and moved["left"] == 1
            assert moved["moved"] == 0, "the last import finds no task"
    with (
        Timeball(broker.endpoint) as ball,
        shop_of(tmp_path, broker.url, task_default_queue="mail.high") as new,
    ):
        assert list(ball.topics()) == ["mail%2Ehigh"]
        new.worker("-P", "solo").wait_ready()
        eventually(lambda: len(new.ended()) == 13, "the moved tasks have run")
        assert set(new.ended().values()) == {1} and "now" not in new.ended()


# ---- the page -------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_run_unchanged(broker: Broker, tmp_path: Path) -> None:
    text = page("docs/celery.md")
    commands = [
        line for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]
    assert commands[0] == f"timeball serve --data {PAGE_DATA}"  # its work is done by the fixture `broker`
    for name, code in re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', text, re.M | re.S):
        # The delay of 5 s in the page is 1 s here.
        (tmp_path / name).write_text(code.replace(PAGE_URL, f"127.0.0.1:{broker.port}").replace("=5)", "=1)"))
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        log = stack.enter_context((tmp_path / "log").open("w"))
        place = {"env": environment(), "cwd": tmp_path}

        def run_until_the_end(command: str) -> None:
            """Run one of Celery's programs until the end of the test."""
            words = command.replace("celery", f"{sys.executable} -m celery", 1).split()
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, **place)  # type: ignore[call-overload]
            stack.callback(process.wait)
            stack.callback(process.terminate)

        worker, look, *imports, beat = commands[1:6]
        run_until_the_end(worker)
        placed = subprocess.run(
            [sys.executable, "place_orders.py"], capture_output=True, text=True, check=False, **place  # type: ignore[call-overload]
        )  # fmt: skip
        assert placed.stdout == "cancelled\n", placed.stderr
        eventually(lambda: "close order 17 if unpaid" in (tmp_path / "log").read_text(), "the task")
        shown = subprocess.run(
            look.replace("localhost:7480", f"localhost:{broker.port}"),
            shell=True, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(shown.stdout) == {"messages": []}
        ball = stack.enter_context(Timeball(broker.endpoint))
        for words, outcome in zip(
            imports, ("bakery-bread: would be put, cron 0 4 * * *", "bakery-bread: put"), strict=True
        ):
            done = subprocess.run(
                [sys.executable, "-m", *words.split(), "--endpoint", broker.endpoint],
                capture_output=True, text=True, check=False, **place,  # type: ignore[call-overload]
            )  # fmt: skip
            assert done.returncode == 0 and done.stdout.startswith(outcome), done.stderr
        ball.schedules.delete("bakery-bread")
        run_until_the_end(beat)
        eventually(lambda: len(ball.schedules.all()) == 3, "the schedules that beat stores")
        assert len(commands) == 8
        for move in commands[6:]:
            words = move.replace(PAGE_REDIS, f"127.0.0.1:{redis}").split()[1:]
            done = timeball(*words, "--endpoint", broker.endpoint)
            assert done.returncode == 0 and "0 tasks" in done.stdout, done.stderr
    assert "close order 18" not in (tmp_path / "log").read_text()
