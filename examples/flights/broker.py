"""`timeball up` as a child process in a folder of its own, the way a user's supervisor would run it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
from examples.time_limits import limit_s

from timeball import Timeball
from timeball.cli.spark import kill_children_on_failure
from timeball.model.config import StrategyName
from timeball.model.errors import SetupError

READY_S, STOP_S = 60.0, 40.0  # on an idle machine
KEPT_LINES = 20


class Broker:
    """A running `timeball up`. `endpoint` is its Flight address, once `await_ready` has returned.

    `compaction`: what moves scheduled messages out of the log.
    """

    endpoint: str
    http_endpoint: str

    def __init__(self, data: Path, strategy: StrategyName = "hour_log", *, on_spark: bool = False) -> None:
        command = [sys.executable, "-m", "timeball", "up", "--json", "--data", str(data)]
        command += ["--strategy", strategy, "--port", "0", "--name-server-port", "0", "--remoting-port", "0"]
        command += ["--grpc-port", "0", "--http-port", "0"]
        command += [] if on_spark else ["--no-spark"]
        # A broker at work compacts once a minute; nobody wants to watch that.
        command += ["--compact-interval-ms", "3s"]
        # What malloc keeps for each thread would hide what a scheduled message costs: tens of megabytes, at random.
        env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        self.compaction = "Spark's compact" if on_spark else "the broker's own compaction"
        self._events: deque[dict[str, Any]] = deque(maxlen=100)
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._changed = threading.Condition()
        # A session of its own: Ctrl-C reaches the demo, which then ends the broker in order.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=env
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._threads: list[threading.Thread] = []
        self._follow(self._process.stdout, self._note_event)
        self._follow(self._process.stderr, self._note_line)

    def client(self) -> Timeball:
        """Return a client with columns."""
        return Timeball(self.http_endpoint, flight=self.endpoint)

    def pipeline_state(self) -> str:
        """The last thing said about the pipeline (see cli/serve.py, cli/up.py); '' before the first."""
        with self._changed:
            states = [event["state"] for event in self._events if event["event"] == "pipeline"]
        return states[-1] if states else ""

    def last_words(self) -> str:
        """What the process wrote last on stderr, for a message about its end."""
        with self._changed:
            return "\n".join(self._said)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for a process that does not end."""
        self._process.terminate()
        try:
            self._process.wait(limit_s(STOP_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(limit_s(STOP_S))

    def await_ready(self) -> None:
        """Wait for the ready line; SetupError with the broker's own words when it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._process.poll() is not None, limit_s(READY_S))
            if self._events:
                self.endpoint = str(self._events[0]["endpoint"])
                self.http_endpoint = f"http://{self._events[0]['http']}"
                return
        self._process.kill()
        code = self._process.wait()
        raise SetupError(
            f"the demo's broker did not start (code {code}): {self.last_words() or 'it said nothing'}"
        )

    def _follow(self, stream: IO[bytes], note: Callable[[str], None]) -> None:
        def read() -> None:
            with stream:
                for line in stream:
                    with self._changed:
                        note(line.decode(errors="replace").rstrip())
                        self._changed.notify_all()
            self._process.wait()  # its streams close a moment before it has ended
            with self._changed:
                self._changed.notify_all()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _note_event(self, line: str) -> None:
        self._events.append(msgspec.json.decode(line))

    def _note_line(self, line: str) -> None:
        self._said.append(line)


@contextmanager
def broker_in(data: Path, strategy: StrategyName = "hour_log", *, on_spark: bool = False) -> Iterator[Broker]:
    """A broker for the length of a block."""
    with kill_children_on_failure():  # Ctrl-C while the process is made: nobody has a handle on it yet
        broker = Broker(data, strategy, on_spark=on_spark)
    try:
        broker.await_ready()
        yield broker
    finally:
        broker.stop()
