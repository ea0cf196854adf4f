"""The supervisor: a child that ends is started again, one that cannot run is given up, none is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.bounds import BOUND_S

from timeball.cli.exit_codes import ExitCode
from timeball.cli.subprocesses import Supervisor, no_child_left_behind
from timeball.clock import ManualClock


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def _until_said(said: list[str], state: str, count: int = 1) -> None:
    async with asyncio.timeout(BOUND_S):
        while said.count(state) < count:
            await asyncio.sleep(0.005)


def test_a_child_that_ends_is_started_again_after_a_pause(tmp_path: Path) -> None:
    """And says with which code it ended."""
    said: list[str] = []
    sentences: list[str] = []

    def say(state: str, sentence: str) -> None:
        said.append(state)
        sentences.append(sentence)

    async def scenario() -> None:
        supervisor = Supervisor(_python("raise SystemExit(70)"), say, ManualClock())
        running = asyncio.create_task(supervisor.run())
        await _until_said(said, "started", 2)
        await supervisor.stop()
        await running

    asyncio.run(scenario())
    assert said[:3] == ["started", "ended", "started"]
    assert said[-1] == "stopped"
    assert "ended with code 70" in sentences[1] and "next start in 1 s" in sentences[1]


def test_a_child_that_cannot_run_here_is_given_up() -> None:
    """Set-up is not mended by another start."""
    said: list[str] = []
    command = _python(f"raise SystemExit({int(ExitCode.SETUP)})")
    supervisor = Supervisor(command, lambda *both: said.extend(both), alone="stays by itself")
    asyncio.run(asyncio.wait_for(supervisor.run(), BOUND_S))
    assert said[::2] == ["started", "given_up"]
    assert said[-1] == "the pipeline cannot run here; the broker stays by itself"


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.SETUP])
def test_every_other_end_is_followed_by_another_start(code: ExitCode) -> None:
    """Also a request that the broker refuses today, and a fault of ours."""
    said: list[str] = []

    async def scenario() -> None:
        command = _python(f"raise SystemExit({int(code)})")
        supervisor = Supervisor(command, lambda state, _: said.append(state))
        running = asyncio.create_task(supervisor.run())
        await _until_said(said, "ended")
        await supervisor.stop()
        await running

    asyncio.run(scenario())
    assert said == ["started", "ended", "stopped"]


def test_stopping_ends_the_child(tmp_path: Path) -> None:
    """By SIGTERM, which it hears."""
    said: list[str] = []
    mark = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "signal.pause()\n"
    )

    others = set(psutil.Process().children())

    async def scenario() -> psutil.Process:
        supervisor = Supervisor(_python(code), lambda state, _: said.append(state))
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(BOUND_S):
            while not mark.exists():
                await asyncio.sleep(0.005)
        [child] = set(psutil.Process().children()) - others
        await supervisor.stop()
        await running
        return child

    child = asyncio.run(scenario())
    assert said == ["started", "stopped"]
    assert not child.is_running()


def test_a_stop_in_the_pause_between_two_starts_does_not_wait_for_its_end() -> None:
    """Nor does it start another child."""
    said: list[str] = []

    async def scenario() -> None:
        supervisor = Supervisor(_python(""), lambda state, _: said.append(state))
        running = asyncio.create_task(supervisor.run())
        await _until_said(said, "ended")
        await supervisor.stop()
        await asyncio.wait_for(running, BOUND_S)

    asyncio.run(scenario())
    assert said == ["started", "ended", "stopped"]


def test_an_interrupt_ends_what_was_started_and_nothing_else() -> None:
    """With its children; a process from before the block goes on."""
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with pytest.raises(KeyboardInterrupt), no_child_left_behind():
                java = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
                raise KeyboardInterrupt
            # Its own child may have been ended a moment earlier, and the shell have gone by itself: both will do.
            java.wait(60)
            assert psutil.pid_exists(other.pid) and other.poll() is None
        finally:
            other.kill()
