"""A stock client in a process of its own, which takes requests and returns answers as JSON lines.

The programs for the remoting protocol understand these requests (optional fields in brackets):

    producer         name, group [transactions]
    send             producer, topic, body [tag keys level properties timer timer_value queue_id]
    send_batch       producer, messages
    send_transaction producer, topic, body, properties: local and check are COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW
    recall           producer, topic, handle
    consumer         name, group, topic, expression or sql [fail orderly broadcast max_reconsume_times server_rebalance
                     work_ms (Java)]
    lite_consumer    name, group, topic, expression
    pull             group, topic, expression [broker queue_id offset]
    query_key, view, offsets    producer, topic, key or message_id or at_ms
    stop             name

and those for gRPC these (with `tls`, `access_key`, `secret_key`, `endpoint` for a producer, a simple and a push
consumer):

    producer         name, topic [transactions]
    send             producer, topic, body [tag keys properties message_group due_ms]
    send_transaction producer, topic, body, properties; local and the property check are COMMIT, ROLLBACK or UNKNOWN
    recall           producer, topic, handle
    simple           name, group, topic, wait_s [expression sql]
    receive          consumer, count, invisible_s: messages, each with its number
    ack, change      consumer, number [invisible_s]
    push             name, group, topic [expression sql fail hold work_ms]
    stop             name

A consumer reports each delivery. The first `fail` deliveries of each body fail. With `hold`, the listener never
returns. With `work_ms`, it takes this time for each delivery, and reports its end.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import bounds

Json = dict[str, Any]

# Clients look for topics and brokers every 30 s, and one that has lost its broker looks several times.
BOUND_S = max(bounds.BOUND_S, 200)


class ClientError(Exception):
    """The stock client raised an error. `code` is that of the broker's answer, None without an answer."""

    def __init__(self, error: Json) -> None:
        super().__init__(f"{error['type']}: {error['text']}")
        self.type, self.code, self.text = error["type"], error.get("code"), error["text"]


class Driver:
    """The process of one client. Any thread may make requests."""

    def __init__(self, command: list[str], address: str, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            # The clients write their logs to HOME, those in Java to user.home.
            ["env", f"HOME={home}", f"JAVA_TOOL_OPTIONS=-Duser.home={home}", *command, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
        )
        self._ids = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())
        self._answers: dict[int, Json] = {}
        self._events: list[Json] = []
        self._errors: deque[str] = deque(maxlen=60)
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()
        try:
            self.wait_until(lambda: self._events, "the client's program is ready")
        except BaseException:  # the caller has no driver to close
            self.close()
            raise

    def call(self, op: str, **request: Any) -> Any:
        """Make a request, and return the client's result. Raise ClientError with the client's error."""
        number = next(self._ids)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "op": op, **request}) + "\n")
        self._process.stdin.flush()
        self.wait_until(lambda: number in self._answers, f"an answer to {op} {request}")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer.get("result")

    def deliveries(self, consumer: str, *, done: bool | None = None) -> list[Json]:
        """Return the deliveries to a consumer so far, in order. With `done`, only those that succeeded, or failed."""
        with self._changed:
            events = [e for e in self._events if e["event"] == "message" and e["consumer"] == consumer]
        return [e["message"] for e in events if done is None or e["done"] == done]

    def work(self, consumer: str) -> list[tuple[str, int]]:
        """Return the steps of a consumer with `work_ms` in order: the body, and 1 for its begin or -1 for its end."""
        with self._changed:
            events = [e for e in self._events if e.get("consumer") == consumer]
        return [(e["body"], -1) if e["event"] == "end" else (e["message"]["body"], 1) for e in events]

    def wait_deliveries(self, consumer: str, count: int, *, done: bool | None = None) -> list[Json]:
        """Wait for at least `count` deliveries, and return all of them so far as `deliveries` does."""
        self.wait_until(
            lambda: len(self.deliveries(consumer, done=done)) >= count,
            lambda: f"{count} messages for {consumer}, not {self.deliveries(consumer)}",
        )
        return self.deliveries(consumer, done=done)

    def wait_checks(self, count: int) -> list[Json]:
        """Wait until the broker has checked `count` transactions, and return their half messages."""

        def checks() -> list[Json]:
            return [e["message"] for e in self._events if e["event"] == "check"]

        self.wait_until(lambda: len(checks()) >= count, f"{count} checks of transactions")
        return checks()

    def close(self) -> None:
        """Kill the client, and wait until its output is read."""
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._process.kill()
        self._process.wait(BOUND_S)
        for thread in self._threads:
            thread.join(BOUND_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            try:
                stream.close()
            except BrokenPipeError:  # a request whose answer is no longer awaited
                pass

    def wait_until(self, condition: Callable[[], object], text: str | Callable[[], str]) -> None:
        """Wait for a condition, which is checked after each answer or event of the client.

        Raise AssertionError with `text` and the client's last errors if the client has ended, or after BOUND_S.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._process.poll() is not None, BOUND_S)
            if condition():
                return
        errors = "\n".join(self._errors)
        raise AssertionError(f"did not happen: {text() if callable(text) else text}\n{errors}")

    def _read(self) -> None:
        """Take each line of the client as an answer or as an event, until it ends. Runs in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self._events.append(message)
                self._changed.notify_all()
        self._process.wait()
        with self._changed:
            self._changed.notify_all()

    def _read_errors(self) -> None:
        """Keep the last lines of the error output for error texts. Runs in a thread."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())


@contextmanager
def driving(command: list[str], address: str, home: Path) -> Iterator[Driver]:
    """Run a client during a block. `address` is that of the broker or of the name server."""
    driver = Driver(command, address, home)
    try:
        yield driver
    finally:
        driver.close()
