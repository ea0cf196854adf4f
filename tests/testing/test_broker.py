"""TestBroker as a test of an application uses it: it moves the clock of a real broker, and reads the messages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.edges.push.receiver import Reply, receiver_of
from tests.rounds import rounds

from timeball import Dead, InvalidDelay, OutOfRange, Retry
from timeball.model.errors import SetupError, not_installed_text
from timeball.testing import ReleasedMessage, TestBroker

START = datetime(2027, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(start=START, push_allow="127.0.0.1") as broker:
        yield broker


def call(broker: TestBroker, method: str, path: str, body: Any = None) -> Any:
    """Call the HTTP API of the broker, and return its JSON answer. Raises HTTPError for a refusal."""
    request = urllib.request.Request(
        broker.endpoint + path,
        None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def bodies(messages: list[ReleasedMessage]) -> list[bytes]:
    return [message.body for message in messages]


def test_a_message_is_released_at_its_due_time_and_not_earlier(broker: TestBroker) -> None:
    begin = broker.clock.now
    broker.client().send("orders", b"close 17", after="40d", keys="17", tag="late", properties={"a": "b"})
    assert broker.clock.advance(timedelta(days=40, milliseconds=-1)) == []
    scheduled = broker.assert_scheduled("orders", key="17", after="1ms")
    (message,) = broker.clock.advance("1ms")
    assert (message.body, message.keys, message.tag, message.properties) == (
        b"close 17", ("17",), "late", {"a": "b"},
    )  # fmt: skip
    assert message.due == scheduled.due == begin + timedelta(days=40) == broker.clock.now
    assert message.id == scheduled.id and broker.pending("orders") == []


def test_messages_are_released_in_the_order_of_their_due_times(broker: TestBroker) -> None:
    client = broker.client()
    for days in (3, 1, 2):
        client.send("order", str(days).encode(), after=f"{days}d")
    assert bodies(broker.clock.advance("7d")) == [b"1", b"2", b"3"]
    assert bodies(broker.released("order")) == [b"1", b"2", b"3"]


def test_a_cancelled_message_is_not_released(broker: TestBroker) -> None:
    client = broker.client()
    client.send("cancelled", b"never", after="1d", keys="k")
    assert len(broker.pending("cancelled", key="k")) == 1
    client.cancel(key="k")
    assert broker.pending("cancelled") == [] and broker.clock.advance("2d") == []


def test_a_handler_runs_at_the_due_time_and_again_after_a_failure(broker: TestBroker) -> None:
    runs: list[tuple[timedelta, int]] = []  # time since the begin, and number of earlier attempts
    begin = broker.clock.now

    def fail_twice(message: ReleasedMessage) -> None:
        runs.append((broker.clock.now - begin, message.attempts))
        if message.attempts < 2:
            raise ValueError("not yet")

    broker.handle("retries", fail_twice, group="retries")
    broker.client().send("retries", b"x", after="1h")
    # `advance` returns a message once, whatever its number of deliveries.
    assert bodies(broker.clock.advance("1d")) == [b"x"]
    hour = timedelta(hours=1)
    assert runs == [(hour, 0), (hour + timedelta(seconds=10), 1), (hour + timedelta(seconds=40), 2)]


def test_an_import_without_the_extra_broker_names_it() -> None:
    program = "import sys; sys.modules['numpy'] = None; import timeball.testing"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.stderr.endswith(f"ModuleNotFoundError: {not_installed_text('numpy', 'broker')}\n")


def test_a_handler_that_raises_retry_runs_later_and_one_that_raises_dead_makes_a_dead_letter(
    broker: TestBroker,
) -> None:
    begin, run_times = broker.clock.now, list[timedelta]()

    def retry_and_give_up(message: ReleasedMessage) -> None:
        """Ask for a retry in the first attempt, and give the message up in the second."""
        run_times.append(broker.clock.now - begin)
        if message.attempts == 0:
            raise Retry("5m")
        raise Dead("no such order")

    broker.handle("retried", retry_and_give_up, group="retriers")
    client = broker.client()
    client.send("retried", b"17", after="1m")
    broker.clock.advance("1d")
    assert run_times == [timedelta(minutes=1), timedelta(minutes=6)]
    (letter,) = client.dead_letters("retriers").dead_letters
    assert (letter.reason, letter.attempts) == ("Dead: no such order", 2)


def test_a_failed_handler_is_logged_and_gets_the_number_of_earlier_attempts(
    broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    def give_up(message: ReleasedMessage) -> None:
        """Fail in the first two attempts, and give the message up in the third."""
        attempts.append(message.attempts)
        if message.attempts == 2:
            raise Dead("no answer")
        raise ConnectionError("the bank does not answer")

    broker.handle("counting", give_up, group="counters")
    broker.client().send("counting", b"17", after="1m")
    broker.clock.advance("1d")
    assert attempts == [0, 1, 2]
    failures = [record for record in caplog.records if record.name == "timeball.testing.broker"]
    assert [record.exc_info is not None for record in failures] == [True, True], "Dead is no failure"
    assert "topic=counting attempts=0" in failures[0].getMessage()


def test_an_advance_releases_the_messages_that_a_handler_schedules_on_the_way(broker: TestBroker) -> None:
    client = broker.client()

    def send_again(message: ReleasedMessage) -> None:
        client.send("daily", message.body, after="1d")

    broker.handle("daily", send_again, group="daily")
    client.send("daily", b"run", after="1d")
    released = broker.clock.advance("30d")
    assert [message.due - released[0].due for message in released] == [
        timedelta(days=day) for day in range(30)
    ]
    client.cancel(broker.assert_scheduled("daily").id or "")


def test_a_lease_ends_when_the_clock_has_advanced_by_its_time(broker: TestBroker) -> None:
    client = broker.client()
    client.send("leases", b"x", after="1s")
    broker.clock.advance("1s")
    receive = "/v1/topics/leases/receive?group=g&lease=10m"
    (first,) = call(broker, "POST", receive)["messages"]
    broker.clock.advance("9m")
    assert call(broker, "POST", receive)["messages"] == []
    broker.clock.advance("1m")
    (second,) = call(broker, "POST", receive)["messages"]
    assert (first["body"], first["attempt"], second["body"], second["attempt"]) == ("x", 1, "x", 2)


def test_an_advance_runs_a_push_and_its_retry(broker: TestBroker) -> None:
    replies = iter([Reply(500), Reply()])
    with receiver_of(lambda _: next(replies)) as receiver:
        subscription = {"topic": "pushed", "group": "pushed", "url": receiver.url}
        call(broker, "PUT", "/v1/subscriptions/pushed", subscription)
        broker.client().send("pushed", b"x", after="40d")
        broker.clock.advance("39d")
        assert receiver.requests == []
        broker.clock.advance("2d")
        assert [request.body for request in receiver.requests] == [b"x", b"x"]
        assert [request.headers["timeball-attempt"] for request in receiver.requests] == ["1", "2"]
        call(broker, "DELETE", "/v1/subscriptions/pushed")


def test_pushes_are_made_at_their_due_times_although_the_filter_skips_messages_between_them(
    broker: TestBroker,
) -> None:
    with receiver_of(lambda _: Reply()) as receiver:
        subscription = {"topic": "filtered", "group": "filtered", "url": receiver.url, "filter": "red"}
        call(broker, "PUT", "/v1/subscriptions/filtered", subscription)
        begin_ms, client = broker.clock.now_ms, broker.client()
        for minute in range(1, 11):
            client.send("filtered", f"{minute}", after=f"{minute}m", tag="red" if minute % 2 else "blue")
        broker.clock.advance("1h")
        pushed = [
            (int(request.body), int(request.headers["webhook-timestamp"])) for request in receiver.requests
        ]
        assert pushed == [(minute, (begin_ms + minute * 60_000) // 1_000) for minute in (1, 3, 5, 7, 9)]
        call(broker, "DELETE", "/v1/subscriptions/filtered")


def trace_of_daily_runs(days: int) -> list[object]:
    """Run a daily job that schedules its next run, beside messages that are due together. Each fifth attempt fails.

    Returns each attempt with its time, and then each released message.
    """
    trace: list[object] = []
    with TestBroker(start=START) as broker:
        client = broker.client()

        def run(message: ReleasedMessage) -> None:
            """Trace an attempt. Fail each fifth, and else schedule the next run and send a mail."""
            trace.append((broker.clock.now_ms, message.topic, message.id, message.attempts))
            if len(trace) % 5 == 0:
                raise ConnectionError("the bank does not answer")
            if message.topic == "jobs":
                client.send("jobs", b"next", after="1d", message_id=f"run-{len(trace)}")
                client.send("mails", b"done", message_id=f"mail-{len(trace)}")

        for topic in ("jobs", "mails"):
            broker.handle(topic, run)
        client.send("jobs", b"first", after="1d", message_id="run-0")
        for number in range(2 * days):
            client.send("others", b"x", after=f"{1 + number % days}d", message_id=f"other-{number}")
        released = broker.clock.advance(f"{days}d")
        trace += [(message.due_ms, message.topic, message.id, message.body) for message in released]
    return trace


def test_two_runs_with_handlers_give_the_same_trace() -> None:
    trace = trace_of_daily_runs(10)
    assert len(trace) > 40 and trace == trace_of_daily_runs(10)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(900)
def test_many_runs_give_the_same_trace() -> None:
    trace = trace_of_daily_runs(20)
    for _ in range(rounds(9, 99)):
        assert trace_of_daily_runs(20) == trace


def test_a_handler_gets_a_visible_message_before_the_clock_moves(broker: TestBroker) -> None:
    begin = broker.clock.now
    run_times: list[datetime] = []
    broker.handle("visible", lambda message: run_times.append(broker.clock.now), group="visible")
    broker.client().send("visible", b"x")
    assert broker.clock.advance("1d") == []
    assert run_times == [begin]


def test_a_handler_can_advance_the_clock_beyond_the_end_of_the_outer_advance(broker: TestBroker) -> None:
    begin, runs = broker.clock.now, list[tuple[bytes, timedelta]]()

    def take_two_hours(message: ReleasedMessage) -> None:
        runs.append((message.body, broker.clock.now - begin))
        broker.clock.advance("2h")

    broker.handle("long-jobs", take_two_hours)
    for hour in (1, 2):
        broker.client().send("long-jobs", str(hour).encode(), after=f"{hour}h")
    assert bodies(broker.clock.advance("90m")) == [b"1", b"2"]
    assert runs == [(b"1", timedelta(hours=1)), (b"2", timedelta(hours=2))]
    assert broker.clock.now - begin == timedelta(hours=4), "the second handler began at 2 h and took 2 h"


def test_the_clock_moves_only_forward(broker: TestBroker) -> None:
    with pytest.raises(OutOfRange, match="advance to a time from then on"):
        broker.clock.advance_to(broker.clock.now - timedelta(seconds=2))
    with pytest.raises(InvalidDelay):
        broker.clock.advance("-1d")
    before = broker.clock.now
    broker.clock.advance_to(before + timedelta(hours=1))
    assert broker.clock.now == before + timedelta(hours=1)


def test_a_failed_assertion_lists_the_pending_messages(broker: TestBroker) -> None:
    broker.client().send("listed", b"x", after="1d", keys="k")
    with pytest.raises(AssertionError, match=r"0 messages .*key 'other'.*pending are: none"):
        broker.assert_scheduled("listed", key="other")
    with pytest.raises(AssertionError, match=r"0 messages .*due .*\n  .*, keys k"):
        broker.assert_scheduled("listed", after="2d")
    broker.clock.advance("1d")  # releases the message, which later tests would find


def test_a_restarted_broker_continues_at_the_time_of_its_stop(tmp_path: Path) -> None:
    with TestBroker(start=START, data=tmp_path / "data") as broker:
        broker.client().send("kept", b"x", after="400d")
        broker.client().send("kept", b"first", after="300d")
        broker.clock.advance("300d")
        stop_time = broker.clock.now
    with TestBroker(start=START, data=tmp_path / "data") as broker:
        assert broker.clock.now >= stop_time
        assert bodies(broker.clock.advance("100d")) == [b"x"]


def test_a_clock_can_begin_in_1970() -> None:
    with TestBroker(start="1970-01-01T00:00:00Z") as broker:
        assert broker.clock.now_ms == 0


@pytest.mark.parametrize("settings", [{"no_setting": 1}, {"durability": "none"}, {"host": "192.0.2.1"}])
def test_a_start_that_fails_leaves_no_thread_and_no_folder(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = set(threading.enumerate())
    broker = TestBroker(**settings)
    with pytest.raises(Exception):  # noqa: B017 - an error of the settings or of the system
        broker.start()
    # No thread is new. Threads of earlier tests may have ended.
    assert set(threading.enumerate()) <= threads and list(tmp_path.iterdir()) == []


def test_calls_to_a_broker_that_does_not_run_and_a_second_start_are_refused() -> None:
    broker = TestBroker()
    for operation in (
        broker.client,
        broker.pending,
        lambda: broker.clock.now,
        lambda: broker.clock.advance("1h"),
    ):
        with pytest.raises(SetupError, match="does not run"):
            operation()
    with broker, pytest.raises(SetupError, match="runs already"):
        broker.start()
    with pytest.raises(SetupError, match="does not run"):
        broker.clock.advance_to("2100-01-01T00:00:00Z")


def test_each_interface_has_a_port(broker: TestBroker) -> None:
    assert sorted(broker.ports) == ["flight", "grpc", "http", "name_server", "remoting"]
    assert min(broker.ports.values()) > 0


async def send_async(broker: TestBroker) -> None:
    """Send a message by the broker's asynchronous client."""
    async with broker.async_client() as client:
        await client.send("awaited", b"x", after="1m")


def test_an_asyncio_client_sends_to_the_broker(broker: TestBroker) -> None:
    asyncio.run(send_async(broker))
    assert bodies(broker.clock.advance("1m")) == [b"x"]
