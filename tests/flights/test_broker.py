"""The broker of the demo: it serves in its block, and leaves no process, also after an interrupt."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from examples.flights import broker as demo_broker
from examples.flights.broker import Broker, broker_in

from timeball.model.errors import SetupError


def running_children() -> set[psutil.Process]:
    """The running processes that this process has started, also indirectly."""
    return {child for child in psutil.Process().children(recursive=True) if child.is_running()}


@pytest.mark.parametrize("on_spark", [False, True])
def test_a_broker_serves_within_its_block_and_has_no_process_after_it(tmp_path: Path, on_spark: bool) -> None:
    """With `on_spark`, the pipeline is another process."""
    before = running_children()
    with broker_in(tmp_path / "d", on_spark=on_spark) as broker:
        with broker.client() as ball:
            assert ball.status()["log"]["durable_seq"] >= 0
        started = running_children() - before
        assert started
    assert not [process for process in started if process.is_running()]


def test_an_interrupt_while_the_broker_becomes_ready_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exists before it is ready, and a user may press Ctrl-C in this time."""

    def interrupt(broker: Broker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "await_ready", interrupt)
    before = running_children()
    with pytest.raises(KeyboardInterrupt), broker_in(tmp_path / "d"):
        pass
    assert running_children() <= before


def test_an_interrupt_in_the_constructor_kills_the_process_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exists before the program has an object that could stop it."""
    processes = []

    def interrupt(broker: Broker, *_: object) -> None:
        processes.append(broker._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "_follow", interrupt)
    with pytest.raises(KeyboardInterrupt), broker_in(tmp_path / "d"):
        pass
    with processes[0] as process:
        assert process.wait(60) == -signal.SIGKILL


def test_the_error_of_a_broker_that_cannot_start_quotes_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends with the process, and not only after READY_S."""
    monkeypatch.setattr(demo_broker, "READY_S", 3_600.0)
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(SetupError, match=r"holiday\.jpg"), broker_in(tmp_path):
        pass
