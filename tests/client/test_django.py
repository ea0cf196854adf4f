"""The backend of Django's Tasks framework against a real broker, whose clock the test moves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from tests.bounds import BOUND_S
from tests.cli.processes import environment
from tests.client.cutting_proxy import cutting_proxy
from tests.client.django_project import shop
from tests.client.django_settings import tasks
from tests.node_fixture import RunningNode, eventually

from timeball import Conflict, Timeball
from timeball.client.django.backend import CLIENTS, TimeballBackend
from timeball.client.django.tasks_api import (
    BaseTaskBackend,
    TaskResultDoesNotExist,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from timeball.client.django.worker import make_workers
from timeball.testing import TestBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


NUMBERS = count(1)


@pytest.fixture(autouse=True)
def configured(broker: TestBroker) -> Iterator[None]:
    """Settings for each test, with its own prefix of topics, and with results in the default cache."""
    shop.RUNS.clear()
    with override_settings(TASKS=tasks(broker.endpoint, prefix=f"t{next(NUMBERS)}-", results="default")):
        yield


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    """Close the clients, which the backends of all threads share."""
    yield
    while CLIENTS:
        CLIENTS.popitem()[1].close()


def backend() -> TimeballBackend:
    """The default backend of the current settings, in this thread."""
    default: TimeballBackend = task_backends["default"]
    return default


@contextmanager
def working(queue: str = "default") -> Iterator[None]:
    """Run a worker of the queue with two threads."""
    (worker,) = make_workers(backend(), [queue], 2, 0, "60s")
    with worker:
        yield


def status_of(result: Any) -> str:
    """The current status of a result, which is refreshed."""
    result.refresh()
    return str(result.status)


def wait_for(result: Any, status: str) -> None:
    eventually(lambda: status_of(result) == status, status)


@contextmanager
def recorded_signals() -> Iterator[list[tuple[str, str, str]]]:
    """The signals of this block in a list, django_signal with its name, the id of its result and its status."""
    recorded: list[tuple[str, str, str]] = []

    def receiver(name: str) -> Any:
        """Return a receiver of one signal."""

        def record(task_result: Any, **_: Any) -> None:
            recorded.append((name, task_result.id, str(task_result.status)))

        return record

    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {name: receiver(name) for name in signals}
    for name, django_signal in signals.items():
        django_signal.connect(receivers[name])
    try:
        yield recorded
    finally:
        for name, django_signal in signals.items():
            django_signal.disconnect(receivers[name])


# ---- enqueue ------------------------------------------------------------------------------------------------


def test_a_task_runs_at_its_run_after_and_not_earlier(broker: TestBroker) -> None:
    run_after = broker.clock.now + timedelta(days=40)
    with working():
        result = shop.note.using(run_after=run_after).enqueue("close", order=17)
        assert result.enqueued_at == broker.clock.now
        broker.assert_scheduled(backend().topic("default"), at=run_after)
        broker.clock.advance("39d")
        assert status_of(result) == "READY" and shop.RUNS == []
        broker.clock.advance("1d")
        wait_for(result, "SUCCESSFUL")
    assert shop.RUNS == [("close", {"order": 17})]
    assert result.return_value == ["close"] and result.attempts == 1 and result.is_finished
    # A run_after is kept to the millisecond.
    assert abs(backend().get_result(result.id).task.run_after - run_after) < timedelta(milliseconds=1)


def test_a_task_without_run_after_runs_at_once_by_a_worker_of_its_queue() -> None:
    result = shop.note.using(queue_name="mail").enqueue(1, 2.5, None, [{"a": "ü"}], big=10**30)
    with working("default"), working("mail"):
        wait_for(result, "SUCCESSFUL")
    assert shop.RUNS == [(1, 2.5, None, [{"a": "ü"}], {"big": 10**30})]
    stored = shop.note.get_result(result.id)
    assert (stored.args, stored.task.queue_name) == ([1, 2.5, None, [{"a": "ü"}]], "mail")
    assert stored.enqueued_at == result.enqueued_at
    assert stored.started_at <= stored.finished_at and len(stored.worker_ids) == 1


def test_a_coroutine_task_is_sent_and_run() -> None:
    async def send() -> Any:
        return await shop.note_async.aenqueue("later")

    result = asyncio.run(send())
    with working():
        wait_for(result, "SUCCESSFUL")
    assert result.return_value == "LATER" and shop.RUNS == ["later"]

    async def read() -> Any:
        return (await shop.note_async.aget_result(result.id)).return_value

    assert asyncio.run(read()) == "LATER"


def test_a_task_with_a_priority_is_refused() -> None:
    with pytest.raises(Exception, match="priority") as caught:
        shop.note.using(priority=5)
    assert type(caught.value).__name__ in ("InvalidTask", "InvalidTaskError")


def test_a_run_after_without_a_zone_is_in_the_zone_of_the_project(broker: TestBroker) -> None:
    with override_settings(USE_TZ=False), timezone.override(ZoneInfo("Asia/Tokyo")):
        wall = (broker.clock.now + timedelta(days=1, hours=9)).replace(tzinfo=None, microsecond=0)
        result = shop.note.using(run_after=wall).enqueue()
        assert backend().get_result(result.id).task.run_after == wall
        assert result.enqueued_at.tzinfo is None
    broker.assert_scheduled(backend().topic("default"), at=(wall - timedelta(hours=9)).replace(tzinfo=UTC))
    assert backend().ball.cancel(result.id).verdict == "cancelled"


def test_a_task_is_sent_when_its_transaction_is_committed_and_not_after_a_rollback() -> None:
    with recorded_signals() as signals:
        with transaction.atomic():
            result = shop.note.enqueue("committed")
            assert result.enqueued_at is None and signals == []
            with pytest.raises(TaskResultDoesNotExist):
                backend().get_result(result.id)
        assert result.enqueued_at is not None
        assert signals == [("enqueued", result.id, "READY")]
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            result = shop.note.enqueue("rolled back")
            raise ZeroDivisionError
        with pytest.raises(TaskResultDoesNotExist):
            backend().get_result(result.id)


def test_without_enqueue_on_commit_a_task_is_sent_although_its_transaction_is_rolled_back(
    broker: TestBroker,
) -> None:
    with override_settings(TASKS=tasks(broker.endpoint, prefix="own-", enqueue_on_commit=False)):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            result = shop.note.enqueue("sent")
            raise ZeroDivisionError
        assert result.enqueued_at is not None
        assert backend().get_result(result.id).status == "READY"


def test_an_enqueue_whose_answer_is_lost_makes_one_task(broker: TestBroker) -> None:
    with (
        cutting_proxy(broker.endpoint) as proxy,
        override_settings(TASKS=tasks(proxy.endpoint, prefix="cut-")),
    ):
        shop.note.enqueue("first")  # connects, for which the proxy must pass answers
        proxy.hold()
        ids: list[str] = []
        thread = threading.Thread(target=lambda: ids.append(shop.note.enqueue("once").id))
        thread.start()
        with Timeball(broker.endpoint) as ball:
            eventually(
                lambda: sum(queue.max for queue in ball.queues("cut-default").values()) == 2,
                "the broker has the task",
            )
            proxy.cut()
            thread.join(BOUND_S)
            assert len(ids) == 1
            bodies = [
                json.loads(message.body)["args"]
                for message in ball.consume("cut-default", "g", until_idle="0.1s")
            ]
    assert sorted(bodies) == [["first"], ["once"]]


def test_an_enqueue_repeated_under_its_id_makes_one_task(broker: TestBroker) -> None:
    run_after = broker.clock.now + timedelta(days=1)
    task = shop.note.using(run_after=run_after)
    first = backend().enqueue(task, [7], {}, result_id="order-7")
    second = backend().enqueue(task, [7], {}, result_id="order-7")
    assert first.id == second.id == broker.assert_scheduled(backend().topic("default"), at=run_after).id
    with pytest.raises(Conflict):
        backend().enqueue(task, [8], {}, result_id="order-7")
    assert backend().ball.cancel("order-7").verdict == "cancelled"
    with pytest.raises(TaskResultDoesNotExist):
        task.get_result("order-7")


# ---- attempts -----------------------------------------------------------------------------------------------


def test_a_task_that_fails_runs_again_by_the_retry_policy(broker: TestBroker) -> None:
    with recorded_signals() as signals, working():
        result = shop.fail.enqueue(2)
        eventually(lambda: backend().get_result(result.id).errors, "the first attempt")
        wait_for(result, "READY")
        assert [error.exception_class for error in result.errors] == [ValueError]
        assert "attempt 1" in result.errors[0].traceback and result.finished_at is None
        broker.clock.advance("10s")
        eventually(lambda: len(backend().get_result(result.id).errors) == 2, "the second attempt")
        wait_for(result, "READY")
        broker.clock.advance("30s")
        wait_for(result, "SUCCESSFUL")
    assert result.return_value == 3 and result.attempts == 3 and len(result.errors) == 2
    # The worker may start the task before `enqueue` has returned in this thread.
    status_changes = [(name, status) for name, _, status in signals]
    assert status_changes.count(("enqueued", "READY")) == 1
    status_changes.remove(("enqueued", "READY"))
    assert status_changes == [*[("started", "RUNNING")] * 3, ("finished", "SUCCESSFUL")]


def test_after_its_last_failed_attempt_a_task_is_a_dead_letter(broker: TestBroker) -> None:
    with (
        override_settings(TASKS=tasks(broker.endpoint, max_attempts=2, prefix="dead-", results="default")),
        recorded_signals() as signals,
        working(),
    ):
        result = shop.fail.enqueue(99)
        eventually(lambda: backend().get_result(result.id).errors, "the first attempt")
        wait_for(result, "READY")
        broker.clock.advance("10s")
        wait_for(result, "FAILED")
        assert len(result.errors) == 2 and result.finished_at is not None
        assert signals[-1] == ("finished", result.id, "FAILED")
        (letter,) = backend().ball.dead_letters("dead-default").dead_letters
        assert (letter.id, letter.reason) == (result.id, "Dead: ValueError: attempt 2")
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value


def test_a_task_that_raises_dead_fails_at_once_and_one_that_raises_retry_runs_later(
    broker: TestBroker,
) -> None:
    with working():
        dead, retried = shop.give_up.enqueue(), shop.ask_again.enqueue()
        wait_for(dead, "FAILED")
        eventually(lambda: backend().get_result(retried.id).errors, "the first attempt")
        broker.clock.advance("59m")
        wait_for(retried, "READY")
        broker.clock.advance("1m")
        eventually(lambda: len(backend().get_result(retried.id).errors) == 2, "the second attempt")
    assert backend().ball.get(retried.id).groups[0].attempts >= 2


def test_a_worker_survives_a_task_that_exits_or_is_cancelled() -> None:
    with working():
        for name in ("SystemExit", "CancelledError"):
            result = shop.leave.enqueue(name)
            eventually(lambda result=result: backend().get_result(result.id).errors, "the attempt has failed")
            wait_for(result, "READY")
            assert result.errors[0].exception_class.__name__ == name
        wait_for(shop.note.enqueue("after them"), "SUCCESSFUL")


def test_a_task_is_not_repeated_if_its_result_or_its_signals_fail(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("out of order")

    monkeypatch.setattr(LocMemCache, "set", refuse)
    for django_signal in (task_started, task_finished):
        django_signal.connect(refuse)
    try:
        options = {"max_attempts": 1, "prefix": "refused-", "results": "default"}
        with override_settings(TASKS=tasks(broker.endpoint, **options)), working():
            done, failed = shop.note.enqueue("once"), shop.fail.enqueue(99)
            wait_for(done, "SUCCESSFUL")
            wait_for(failed, "FAILED")
    finally:
        for django_signal in (task_started, task_finished):
            django_signal.disconnect(refuse)
    assert shop.RUNS == [("once", {})]
    (letter,) = broker.client().dead_letters("refused-default").dead_letters
    assert letter.reason == "Dead: ValueError: attempt 1"
    assert f"result not stored id={done.id}" in caplog.text


def test_a_task_runs_once_although_the_cache_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("out of order")

    with monkeypatch.context() as patch:
        for method in ("get", "set"):
            patch.setattr(LocMemCache, method, refuse)
        with working():
            result = shop.note.enqueue("once")
            wait_for(result, "SUCCESSFUL")
        assert shop.RUNS == [("once", {})] and result.attempts == 1
        # The status above came from the broker.
        with pytest.raises(ValueError, match="cannot be read"):
            _ = result.return_value
    assert f"result not read id={result.id}" in caplog.text


@pytest.mark.parametrize("results", [None, "default"])
def test_a_task_whose_return_value_is_not_json_fails_and_is_not_repeated(
    broker: TestBroker, results: str | None
) -> None:
    prefix = f"values-{results}-"
    with (
        override_settings(TASKS=tasks(broker.endpoint, prefix=prefix, results=results)),
        recorded_signals() as signals,
        working(),
    ):
        result = shop.note_set.enqueue("once")
        wait_for(result, "FAILED")
        (letter,) = backend().ball.dead_letters(f"{prefix}default").dead_letters
        eventually(lambda: signals[-1] == ("finished", result.id, "FAILED"), "the signal is sent")
    assert shop.RUNS == ["once"] and letter.attempts == 1
    assert letter.reason == "Dead: the return value is not JSON: TypeError: Unsupported type: <class 'set'>"
    assert ["TypeError" in error.traceback for error in result.errors] == ([True] if results else [])


def test_the_status_of_a_task_is_running_while_it_runs(broker: TestBroker) -> None:
    shop.HOLDING.clear()
    shop.MAY_END.clear()
    with working():
        result = shop.hold.enqueue()
        assert shop.HOLDING.wait(BOUND_S)
        assert status_of(result) == "RUNNING"
        with pytest.raises(ValueError, match="not finished"):
            _ = result.return_value
        shop.MAY_END.set()
        wait_for(result, "SUCCESSFUL")


def test_a_message_that_names_no_task_runs_nothing(
    broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ["tests.client.django_shop.no_task", "os.system", "tests.client.django_shop.gone"]
    bodies = [json.dumps({"task": path, "args": ["true"], "kwargs": {}}) for path in paths]
    ball = backend().ball
    ids = [ball.send(backend().topic("mail"), body).id for body in [*bodies, "no JSON", "{}"]]
    with working("mail"):
        for message_id in ids:
            eventually(
                lambda message_id=message_id: has_failed_attempt(ball, message_id), "the attempt has failed"
            )
    assert shop.RUNS == [] and "is no task" in caplog.text
    for message_id in ids[:2]:
        with pytest.raises(ValueError, match="is no task"):
            backend().get_result(message_id)


def has_failed_attempt(ball: Timeball, message_id: str) -> bool:
    """Whether the message waits for its next delivery after a failed attempt."""
    return any(place.attempts and place.state == "waiting" for place in ball.get(message_id).groups)


# ---- results ------------------------------------------------------------------------------------------------


def test_without_a_cache_a_result_has_its_status_but_no_return_value(broker: TestBroker) -> None:
    with override_settings(TASKS=tasks(broker.endpoint)), working():
        result = shop.note.enqueue("x")
        wait_for(result, "SUCCESSFUL")
        assert result.started_at is None and result.attempts == 1
        with pytest.raises(ValueError, match="not stored"):
            _ = result.return_value


def test_an_unknown_id_and_a_message_that_is_no_task_have_no_result(broker: TestBroker) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        backend().get_result("unknown")
    other = broker.client().send("other-topic", b"{}").id
    with pytest.raises(TaskResultDoesNotExist):
        backend().get_result(other)
    large = shop.note.enqueue("x" * 70_000)  # the broker returns only the beginning of so long a body
    with pytest.raises(TaskResultDoesNotExist):
        large.refresh()


# ---- checks -------------------------------------------------------------------------------------------------

BACKEND = "timeball.client.django.backend.TimeballBackend"
OTHER_BACKEND = BaseTaskBackend.__module__.removesuffix("base") + "dummy.DummyBackend"


@pytest.mark.parametrize(
    ("changed_settings", "ids"),
    [
        ({}, []),
        ({"OPTIONS": {"endpont": "http://h:1"}}, ["timeball.E001"]),
        ({"OPTIONS": {"endpoint": 5}}, ["timeball.E001"]),
        ({"OPTIONS": {"endpoint": "http:/h"}}, ["timeball.E001"]),
        ({"OPTIONS": {"access_key": "a"}}, ["timeball.E001"]),
        ({"OPTIONS": {"max_attempts": 0}}, ["timeball.E001"]),
        ({"QUEUES": ["fine", "with.dot", "x" * 114, "y" * 113]}, ["timeball.E002"] * 2),
        ({"OPTIONS": {"results": "nowhere"}}, ["timeball.E004"]),
        ({"OPTIONS": {"results": "default"}}, ["timeball.W001"]),
    ],
)
def test_check_reports_a_wrong_configuration_by_its_id(
    changed_settings: dict[str, Any], ids: list[str]
) -> None:
    with override_settings(
        TASKS={"default": {"BACKEND": BACKEND, "QUEUES": ["default"], **changed_settings}}
    ):
        assert [message.id for message in checks.run_checks()] == ids


def test_check_reports_a_missing_database_and_a_missing_application(monkeypatch: pytest.MonkeyPatch) -> None:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND}}), monkeypatch.context() as patch:
        patch.setitem(settings.DATABASES, "default", {"ENGINE": "django.db.backends.dummy"})
        assert [message.id for message in backend().check()] == ["timeball.E003"]
    with override_settings(TASKS={"default": {"BACKEND": BACKEND}}):
        other_apps = [app.name for app in apps.get_app_configs() if app.name != "timeball.client.django"]
        with override_settings(INSTALLED_APPS=other_apps):
            assert [message.id for message in backend().check()] == ["timeball.W002"]


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"endpont": "http://h:1"}}}):
        with pytest.raises(ImproperlyConfigured, match=r"TASKS\['default'\].*did you mean 'endpoint'"):
            shop.note.enqueue()


# ---- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "setting", "text"),
    [
        (["--threads", "0"], {}, "threads=0"),
        (["--lease", "soon"], {}, "soon"),
        (["--queue", "mial"], {"QUEUES": ["mail"]}, r"QUEUES'\] has no 'mial': did you mean 'mail'"),
        (["--backend", "other"], {}, r"TASKS\['other'\].*doesn't exist"),
        ([], {"QUEUES": []}, "name those to work on"),
        ([], {"BACKEND": OTHER_BACKEND}, "is no TimeballBackend"),
    ],
)
def test_the_command_refuses_wrong_arguments_and_settings_with_the_reason(
    arguments: list[str], setting: dict[str, Any], text: str
) -> None:
    with (
        override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {}, **setting}}),
        pytest.raises(CommandError, match=text),
    ):
        call_command("timeball_worker", *arguments)


@contextmanager
def worker_process(endpoint: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group. The worker works when the block begins, and is killed when the block ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "django", "timeball_worker", *options],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(
            DJANGO_SETTINGS_MODULE="tests.client.django_settings", SHOP_ENDPOINT=endpoint, PYTHONUNBUFFERED="1",
            PYTHONPATH=os.pathsep.join(sys.path),
        ),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and "working on" in process.stdout.readline()
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


NOT_DURING_TEST = datetime(2035, 1, 1, tzinfo=UTC)


def bodies(ball: Timeball, topic: str) -> Iterator[str]:
    """The bodies of the messages of a topic as they arrive, without an end."""
    for message in ball.consume(topic, "observers"):
        yield message.body.decode()


def test_the_command_runs_tasks_and_finishes_the_running_one_after_sigterm(node: RunningNode) -> None:
    with (
        override_settings(TASKS=tasks(node.http_endpoint)),
        Timeball(node.http_endpoint) as ball,
        worker_process(node.http_endpoint, "--threads", "2") as process,
    ):
        shop.forward.using(queue_name="mail").enqueue("forwarded", "a")
        shop.forward.enqueue("forwarded", "b")
        words = bodies(ball, "forwarded")
        assert {next(words), next(words)} == {"a", "b"}
        running = shop.begin_and_end.enqueue("forwarded")
        waiting = shop.note.using(run_after=NOT_DURING_TEST).enqueue()
        assert next(words) == "begun"
        process.send_signal(signal.SIGTERM)
        ball.send("forwarded-go", "x")
        assert next(words) == "ended"
        words.close()
        assert process.wait(BOUND_S) == 0
        assert (status_of(running), status_of(waiting)) == ("SUCCESSFUL", "READY")


@pytest.mark.slow
def test_all_tasks_run_although_their_workers_are_killed(node: RunningNode) -> None:
    """Processes end in the middle of every tenth task, and twice all of them at once with kill -9."""
    words = [str(number) for number in range(200)]
    with override_settings(TASKS=tasks(node.http_endpoint)), Timeball(node.http_endpoint) as ball:
        for word in words:
            shop.forward_or_die.enqueue("survived", word)
        counts: Counter[str] = Counter()
        arriving_words = bodies(ball, "survived")
        for kill_at in (60, 130, None):
            options = ("--processes=2", "--threads=2", "--lease=2s", "--queue=default")
            with worker_process(node.http_endpoint, *options):
                while len(counts) < (kill_at or len(words)):
                    counts[next(arriving_words)] += 1
        arriving_words.close()
        assert ball.dead_letters("django-default").dead_letters == []
    assert set(counts) == set(words)
