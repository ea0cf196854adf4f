"""Commands as processes, as a shell or a supervisor runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bounds import BOUND_S

from timeball import Timeball

SRC = Path(__file__).resolve().parents[2] / "src"
COMMAND = [sys.executable, "-m", "timeball"]


def environment(**more: str) -> dict[str, str]:
    """Build the environment of a command: this process's, without Timeball's variables, and with free ports."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBALL_")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(SRC), inherited.get("PYTHONPATH", "")]),
        "COLUMNS": "100",
        # Many brokers run at a time, so none listens on RocketMQ's own ports.
        "TIMEBALL_NAME_SERVER_PORT": "0",
        "TIMEBALL_REMOTING_PORT": "0",
        "TIMEBALL_GRPC_PORT": "0",
        "TIMEBALL_HTTP_PORT": "0",
        **more,
    }


def timeball(*arguments: str, text: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. `text` is its stdin, and `more` is added to its environment."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=environment(**more),
        check=False,
    )


class Running:
    """A running command: its JSON lines so far, and its end."""

    def __init__(self, *arguments: str, command: list[str] | None = None, **more: str) -> None:
        """Start a command. `command`: the program to run in place of `timeball` and its arguments."""
        self._process = subprocess.Popen(
            command or [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**more),
            start_new_session=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def wait_line(self, **wanted: object) -> dict[str, Any]:
        """Return the first line that has these entries. Fails if the process ends or the time is up before."""

        def find() -> dict[str, Any] | None:
            return next((line for line in self.lines if wanted.items() <= line.items()), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._has_ended(), BOUND_S)
            found = find()
        assert found is not None, f"no line with {wanted}: {self.lines} {self.errors}"
        return found

    def wait_end(self) -> int:
        """Wait until the process ends by itself. Returns the exit code."""
        self._process.wait(BOUND_S)
        return self.end()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            return self._process.wait(BOUND_S)
        finally:
            self._process.kill()
            for thread in self._threads:
                thread.join(10)
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()

    def _has_ended(self) -> bool:
        return not self._threads[0].is_alive()  # the thread reads stdout to its end

    def _read(self) -> None:
        """Read the JSON lines of stdout, and wake `wait_line` after each line and at the end. Runs in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _read_errors(self) -> None:
        """Read the lines of stderr. Runs in a thread."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors.append(line.rstrip())


@contextmanager
def running(*arguments: str, command: list[str] | None = None, **more: str) -> Iterator[Running]:
    """Run a command during a block, and end it after the block."""
    process = Running(*arguments, command=command, **more)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def serving(data: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Run a broker during a block. Yields its ready line."""
    with running("serve", "--json", "--port", "0", "--data", str(data), *options) as server:
        yield server.wait_line(event="ready")


def http_endpoint_of(ready: Mapping[str, Any]) -> str:
    """Return the HTTP address in a broker's ready line."""
    scheme = "https" if ready["endpoint"].startswith("grpc+tls") else "http"
    return f"{scheme}://{ready['http']}"


def client_of(ready: Mapping[str, Any]) -> Timeball:
    """Connect a client with columns to the broker that has printed this ready line."""
    return Timeball(http_endpoint_of(ready), flight=ready["endpoint"])
