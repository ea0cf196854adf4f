"""The demo's broker: ready when it says so, and gone afterwards, whatever happens in between."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from examples.flights import broker as demo_broker
from examples.flights.broker import Broker, broker_in

from timeball.model.errors import SetupError


def _started_here() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if child.is_running()}


@pytest.mark.parametrize("on_spark", [False, True])
def test_it_serves_for_the_length_of_a_block_and_is_gone_after_it(tmp_path: Path, on_spark: bool) -> None:
    """With its pipeline, which is a process of its own."""
    before = _started_here()
    with broker_in(tmp_path / "d", on_spark=on_spark) as broker:
        with broker.client() as ball:
            assert ball.status()["log"]["durable_seq"] >= 0
        mine = _started_here() - before
        assert mine
    assert not [process for process in mine if process.is_running()]


def test_an_interrupt_while_it_starts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process exists before it is ready: that is when people press Ctrl-C."""

    def interrupted(broker: Broker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "await_ready", interrupted)
    before = _started_here()
    with pytest.raises(KeyboardInterrupt), broker_in(tmp_path / "d"):
        pass
    assert _started_here() <= before


def test_an_interrupt_while_it_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process exists before anybody could stop it."""
    made = []

    def interrupted(broker: Broker, *_: object) -> None:
        made.append(broker._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Broker, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt), broker_in(tmp_path / "d"):
        pass
    with made[0] as process:
        assert process.wait(60) == -signal.SIGKILL


def test_a_broker_that_cannot_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words say more than ours, and its end is the end of waiting for it."""
    monkeypatch.setattr(demo_broker, "READY_S", 3_600.0)
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(SetupError, match=r"holiday\.jpg"), broker_in(tmp_path):
        pass
