"""A run with one failing disk call: a request is refused or the broker ends, and a restart loses no message.

A scenario runs until a step meets the error. If the node continues, so does the scenario, like a client whose request
was refused. If the node fails, it is stopped in order, as `serve` stops one. Then the disk is repaired, the node
restarted, and all becomes due. For calls of the Delta table's library the process has no descriptors or no space left.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
from tests.crash.checker import Fault
from tests.crash.lives import end_of_days, run
from tests.crash.scenarios import SCENARIOS, SETTINGS
from tests.crash.world import CutFiles, Unheard, World
from tests.starving import no_descriptors, no_room

from timeball.cli.output import ExitCode, explain
from timeball.io.clock import ManualClock
from timeball.model.errors import DiskFailed, OverLimit, SetupError, TimeballError

ERRORS: dict[str, Callable[[], TimeballError]] = {
    "EIO": lambda: DiskFailed("the disk of this test failed: Input/output error (errno 5)"),
    "EMFILE": lambda: DiskFailed("opening of this test failed: Too many open files (errno 24)"),
    "ENOSPC": lambda: OverLimit("disk full while this test writes"),
}
STEP_S = 3  # many times the length of a step
IN_DELTA: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "EMFILE in Delta": no_descriptors,
    "EFBIG in Delta": no_room,
}


@dataclass(frozen=True)
class Injected:
    """The call that fails, its error, and whether all later calls fail, too."""

    scenario: str
    error: str
    call: int
    forever: bool


class FailingFiles(CutFiles):
    """Fails also for the Delta table's library: from one of its uses of the folder until `relieve`."""

    fails_in_delta: Callable[[], AbstractContextManager[None]] | None = None
    external_calls = 0
    fail_at_external = 0  # the use of the folder at which the failures begin, from 1

    def __init__(self) -> None:
        super().__init__()
        self._starving = ExitStack()

    def external(self, name: str) -> str:
        """Return the path of a folder for the library, and begin its failures at the chosen use."""
        path = super().external(name)
        self.external_calls += 1
        if self.fails_in_delta is not None and self.external_calls == self.fail_at_external:
            self._starving.enter_context(self.fails_in_delta())
        return path

    def relieve(self) -> None:
        """Let the library's calls work again."""
        self._starving.close()


def calls_of(scenario: str) -> tuple[int, int]:
    """Run a scenario without errors. Return the number of disk calls and of the library's uses of the folder."""
    files = FailingFiles()
    _live(files, World(files, ManualClock(), **SETTINGS.get(scenario, {})), scenario)
    return files.calls, files.external_calls


def drawn(count: int, seed: int, scenarios: list[str]) -> list[Injected]:
    """Draw `count` injections over all scenarios, errors and calls."""
    rng = np.random.default_rng(seed)
    lengths = {name: calls_of(name) for name in scenarios}
    injections = []
    for number in range(count):
        scenario = scenarios[number % len(scenarios)]
        error = str(rng.choice([*ERRORS, *IN_DELTA]))
        calls = lengths[scenario][error in IN_DELTA]
        injections.append(Injected(scenario, error, 1 + int(rng.integers(calls)), bool(rng.integers(2))))
    return injections


@dataclass(frozen=True)
class Life:
    """A run with an error: the error that ended it, and the contradictions after the next start."""

    injected: Injected
    ended_by: BaseException | None
    faults: list[Fault]


def lived(injected: Injected, spoil: Callable[[CutFiles], None] = lambda files: None) -> Life:
    """Run a scenario with an error, restart on the repaired disk, let all become due, and compare.

    `spoil` is for controls: it damages the disk before the restart, which the comparison must notice.
    """
    files, settings = FailingFiles(), SETTINGS.get(injected.scenario, {})
    world = World(files, ManualClock(), **settings)
    if injected.error in IN_DELTA:
        files.fails_in_delta, files.fail_at_external = IN_DELTA[injected.error], injected.call
    else:
        files.fail_at(injected.call, ERRORS[injected.error](), forever=injected.forever)
    ended_by = _live(files, world, injected.scenario)
    files.heal()
    spoil(files)
    faults = run(end_of_days(World(files, world.clock, world.observed, **settings)))
    # A start without room ends with a SetupError that names the option to change.
    is_start_without_room = isinstance(ended_by, SetupError) and "no room" in str(ended_by)
    if ended_by is not None and explain(ended_by)[1] != ExitCode.STORAGE and not is_start_without_room:
        faults.append(Fault("code", f"{ended_by!r} ends the process with {explain(ended_by)[1]!r}"))
    return Life(injected, ended_by, faults)


def _live(files: FailingFiles, world: World, scenario: str) -> BaseException | None:
    """Run the scenario and stop the node. Return the error that ended it, or None if the scenario ran to its end."""

    async def main() -> BaseException | None:
        try:
            return await steps()
        finally:
            await world.abandon()
            files.relieve()

    async def steps() -> BaseException | None:
        for step in SCENARIOS[scenario]:
            try:
                async with asyncio.timeout(STEP_S):
                    await step(world)
            except TimeoutError:  # due messages are not settled while the disk is full
                break
            except Exception as error:
                files.relieve()
                ended_by = world.failure or (None if _is_up(world) else error)
                if ended_by is not None or _is_fault_in_timeball(error):
                    await _stop(world)
                    return ended_by or error
        if world.node is not None:
            failure = world.failure
            await _stop(world)
            return failure
        return None

    return run(main())


def _is_up(world: World) -> bool:
    """Check whether the node has started and not ended."""
    return (
        world.node is not None and hasattr(world.node, "maintenance") and bool(world.node.maintenance._tasks)
    )


def _is_fault_in_timeball(error: Exception) -> bool:
    """Check whether Timeball itself raised an error of a wrong type.

    The scenario may raise other errors, where a step needs the result of a step that was refused.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return not isinstance(error, TimeballError) and "/src/timeball/" in frames[-1].filename


async def _stop(world: World) -> None:
    """Stop the node if it runs. A TimeballError of the stop is ignored: `serve` reports the first error only."""
    if _is_up(world):
        try:
            await world.stop()
        except Exception as error:
            if not isinstance(error, TimeballError):
                raise Unheard(repr(error)) from error
