"""celery beat stores its entries in a broker whose clock the test moves. Workers run the occurrences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import Service
from celery.contrib.testing.worker import start_worker
from celery.schedules import crontab
from tests.node_fixture import eventually

from timeball import Timeball
from timeball.client.celery import Control
from timeball.client.celery.schedulers import TimeballScheduler
from timeball.model.errors import RequestError
from timeball.testing import TestBroker

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:celery"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning:celery"),
]
CLASS = "timeball.client.celery.schedulers:TimeballScheduler"


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


class Shop:
    """An application with a schedule, and the ids and arguments with which its task has run."""

    def __init__(self, broker: TestBroker, beat_schedule: dict[str, Any]) -> None:
        self.ran: list[tuple[str, str]] = []
        url = broker.endpoint.replace("http", "timeball", 1)
        self.app = Celery("shop", broker=url, control=Control, set_as_current=False)
        self.app.conf.update(
            beat_schedule=beat_schedule,
            broker_connection_retry_on_startup=True,
            result_expires=None,  # else Celery adds an entry for the cleanup of results
            worker_hijack_root_logger=False,
        )

        @self.app.task(shared=False, name="shop.report", bind=True)
        def report(task: Any, kind: str) -> None:
            self.ran.append((task.request.id, kind))

        self.app.finalize()

    def beat(self) -> TimeballScheduler:
        """Start beat and run its first tick, which stores the entries. Closes the scheduler if the tick raises."""
        service = Service(self.app, scheduler_cls=CLASS)
        assert isinstance(service.scheduler, TimeballScheduler)
        try:
            service.scheduler.tick()
        except BaseException:
            service.scheduler.close()
            raise
        return service.scheduler

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Run a worker of the application in a thread."""
        with start_worker(self.app, pool="solo", perform_ping_check=False, loglevel="WARNING"):
            yield


def entry(schedule: Any = 60.0, kind: str = "daily", **more: Any) -> dict[str, Any]:
    """An entry of `beat_schedule` for the task shop.report."""
    return {"task": "shop.report", "schedule": schedule, "args": [kind], **more}


def names(ball: Timeball) -> list[str]:
    """The names of all schedules of the broker."""
    return [schedule.name for schedule in ball.schedules.all()]


def test_each_occurrence_and_each_run_by_hand_is_a_task_with_its_own_id(broker: TestBroker) -> None:
    shop = Shop(broker, {"report": entry(crontab(minute=0, hour="*/6"))})
    shop.beat().close()  # the broker sends the tasks, without beat
    with shop.worker():
        for number in range(1, 5):
            broker.clock.advance("6h")
            eventually(lambda number=number: len(dict(shop.ran)) == number, "the occurrence has run")
        assert {kind for _, kind in shop.ran} == {"daily"}
        with broker.client() as ball:
            assert ball.schedules.get("shop-report").runs == 4
            ball.schedules.run("shop-report")
            eventually(lambda: len(dict(shop.ran)) == 5, "the run by hand has run")


def test_several_beats_at_once_store_each_schedule_once(broker: TestBroker) -> None:
    entries = {"report": entry(), "weekly": entry(crontab(day_of_week="mon"), "weekly")}
    shops = [Shop(broker, entries) for _ in range(3)]
    threads = [threading.Thread(target=lambda shop=shop: shop.beat().close()) for shop in shops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with broker.client() as ball:
        before = ball.schedules.all()
        assert names(ball) == ["shop-report", "shop-weekly"] and len(broker.pending("celery")) == 2
        Shop(broker, entries).beat().close()
        assert ball.schedules.all() == before, "another start changes no schedule"


def test_a_beat_deletes_schedules_of_removed_entries_and_no_others(broker: TestBroker) -> None:
    with broker.client() as ball:
        ball.schedules.put("by-hand", {"every": "1m"}, topic="celery", body="x")
        Shop(broker, {"report": entry(), "old": entry()}).beat().close()
        bakery = Shop(broker, {"report": entry()})
        bakery.app.main = "bakery"
        bakery.beat().close()
        assert names(ball) == ["bakery-report", "by-hand", "shop-old", "shop-report"]
        Shop(broker, {"report": entry(kind="weekly")}).beat().close()
        assert names(ball) == ["bakery-report", "by-hand", "shop-report"]
        assert len(broker.pending("celery")) == 3


def test_a_running_beat_stores_changed_entries_at_its_next_tick(broker: TestBroker) -> None:
    beat = Shop(broker, {"report": entry()}).beat()
    with broker.client() as ball:
        beat.add(name="more", **entry(30.0))
        assert beat.tick() == beat.max_interval and names(ball) == ["shop-more", "shop-report"]
        ball.schedules.delete("shop-more")
        assert beat.tick() == beat.max_interval and names(ball) == ["shop-report"], (
            "beat stores nothing, because its entries have not changed"
        )
        del beat.schedule["report"]
        beat.tick()
        assert names(ball) == ["shop-more"], (
            "a changed entry makes beat store all of its entries, and delete the other"
        )
    beat.close()


def test_an_entry_with_the_name_of_a_foreign_schedule_is_refused_and_nothing_stored(
    broker: TestBroker,
) -> None:
    with broker.client() as ball:
        ball.schedules.put("shop-report", {"every": "1m"}, topic="mine", body="x")
        with pytest.raises(RequestError, match="entry 'report': there is a schedule 'shop-report'"):
            Shop(broker, {"another": entry(), "report": entry()}).beat()
        assert names(ball) == ["shop-report"], "nothing was stored"
        assert ball.schedules.get("shop-report").topic == "mine"


def test_if_an_entry_is_refused_no_entry_is_stored(broker: TestBroker) -> None:
    with pytest.raises(RequestError, match=r"entry 'wrong': an interval of 0\.1 s"):
        Shop(broker, {"fine": entry(), "wrong": entry(0.1)}).beat()
    with broker.client() as ball:
        assert names(ball) == []


def test_a_beat_tries_again_if_no_broker_answers(broker: TestBroker) -> None:
    beat = Shop(broker, {"report": entry()}).beat()
    beat.add(name="more", **entry(30.0))
    broker.stop()
    assert beat.tick() == 1.0, "seconds until beat tries again"
    beat.close()


# ---- differences from celery beat (docs/celery.md) ------------------------------------------------------------


def test_a_paused_entry_stays_paused(broker: TestBroker) -> None:
    shop = Shop(broker, {"report": entry()})
    shop.beat().close()
    with broker.client() as ball:
        ball.schedules.pause("shop-report")
        shop.beat().close()
        assert ball.schedules.get("shop-report").state == "paused" and broker.pending("celery") == []


def test_an_interval_counts_from_1970(broker: TestBroker) -> None:
    Shop(broker, {"report": entry(90.0)}).beat().close()
    (pending,) = broker.pending("celery")
    assert pending.due.timestamp() % 90 == 0 and pending.due - broker.clock.now <= timedelta(seconds=90)


def test_of_several_missed_times_only_the_last_is_delivered(broker: TestBroker) -> None:
    shop = Shop(broker, {"report": entry(timedelta(hours=1))})
    shop.beat().close()
    with broker.client() as ball:
        ball.schedules.pause("shop-report")  # in the place of a broker that is down
        broker.clock.advance("5h")
        ball.schedules.resume("shop-report")
    with shop.worker():
        broker.clock.advance("1s")
        eventually(lambda: shop.ran, "the occurrence of the last missed time has run")
        shop.app.send_task("shop.report", ["end"])
        eventually(lambda: shop.ran[-1][1] == "end", "the task after the occurrence has run")
        assert [kind for _, kind in shop.ran] == ["daily", "end"]


def test_an_occurrence_whose_expiry_has_passed_by_the_workers_clock_does_not_run() -> None:
    """The expiry counts from the broker's time in 2020, so by the worker's clock it has passed."""
    with TestBroker(start="2020-01-01T00:00:00Z") as broker:
        shop = Shop(broker, {"short": entry(crontab(), "short", options={"expires": 30})})
        shop.beat().close()
        with shop.worker():
            broker.clock.advance("1m")
            shop.app.send_task("shop.report", ["end"])
            eventually(lambda: shop.ran, "the task after the occurrence has run")
            assert [kind for _, kind in shop.ran] == ["end"]


def test_a_changed_entry_keeps_its_pending_occurrence() -> None:
    with TestBroker(start="2026-03-02T10:00:00Z") as broker:
        daily = crontab(minute=0, hour=4)
        Shop(broker, {"report": entry(daily)}).beat().close()
        (before,) = broker.pending("celery")
        broker.clock.advance("1h")
        Shop(broker, {"report": entry(daily, "weekly")}).beat().close()
        (after,) = broker.pending("celery")
        assert after == before


def test_after_a_cancelled_occurrence_the_next_one_is_pending(broker: TestBroker) -> None:
    Shop(broker, {"report": entry()}).beat().close()
    (pending,) = broker.pending("celery")
    assert pending.id == f"shop-report.{pending.due_ms}"
    with broker.client() as ball:
        assert ball.cancel(pending.id).verdict == "cancelled"
    (next_pending,) = broker.pending("celery")
    assert next_pending.due - pending.due == timedelta(minutes=1)
