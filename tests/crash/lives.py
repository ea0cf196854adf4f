"""Run a scenario up to a power cut, and list the contradictions. The tests of this folder share it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tests.crash.checker import Fault, Observed, check
from tests.crash.scenarios import SCENARIOS, SETTINGS
from tests.crash.world import BOUND_S, HOUR_MS, CutFiles, Unheard, World
from tests.crash_files import CrashFiles, PowerCut, Survival

from timeball.io.clock import ManualClock

AFTER_MS = 12 * HOUR_MS  # all scheduled messages of all scenarios are due by then

T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """The state after a power cut, or after a whole scenario: the disk, the answers to clients, and the time."""

    scenario: str
    files: CrashFiles
    observed: Observed
    clock: ManualClock
    at: str  # the number and the name of the last disk call, for reports
    settings: dict[str, Any]

    def world(self, files: CrashFiles) -> World:
        """Return a machine on the disk `files`, with copies of the observer and the clock."""
        return World(files, replace(self.clock), copy.deepcopy(self.observed), **self.settings)


def run(main: Awaitable[T]) -> T:
    """Run on a new event loop and return the result. Logging is off, because crashes log many expected lines."""
    logging.disable(logging.CRITICAL)
    try:
        with asyncio.Runner() as runner:
            return runner.run(main)  # type: ignore[arg-type]
    finally:
        logging.disable(logging.NOTSET)


def live(name: str, crash_at: int | None = None, *, durability: str = "sync", **control: bool) -> Cut:
    """Run a scenario until the power cut at disk call `crash_at`, or to its end.

    `control`: faults of CrashFiles, such as `forget_sync`.
    """
    files, clock = CutFiles(crash_at=crash_at, **control), ManualClock()
    settings = {"durability": durability, **SETTINGS.get(name, {})}
    world = World(files, clock, **settings)

    async def steps() -> None:
        for step in SCENARIOS[name]:
            await step(world)

    run(until_cut(world, files, steps))
    last_call = "{} {}".format(*files.trace[-1])
    return Cut(name, files, world.observed, clock, f"call {files.calls} ({last_call})", settings)


async def until_cut(world: World, files: CutFiles, main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` until it ends or the power is cut, then discard the node. Raises the errors of `main`."""
    loop = asyncio.get_running_loop()
    power_is_cut = loop.create_future()

    def on_cut() -> None:
        if not power_is_cut.done():
            power_is_cut.set_result(None)

    files.on_cut = lambda: loop.call_soon_threadsafe(on_cut)
    task = asyncio.ensure_future(main())
    await asyncio.wait([task, power_is_cut], return_when=asyncio.FIRST_COMPLETED, timeout=2 * BOUND_S)
    is_cut, files.on_cut = power_is_cut.done(), None
    assert is_cut or task.done(), "it hangs without a cut"
    await world.abandon()
    if is_cut:
        return
    await task
    if world.unheard:
        raise Unheard(world.unheard)


def faults_after(cut: Cut, image: CrashFiles) -> list[Fault]:
    """Start on what the disk kept, let everything become due, and compare. Then once more after another cut.

    Returns the faults that the checker finds. An error of the start is a fault, too.
    """

    async def main() -> list[Fault]:
        world = cut.world(image)
        faults = await end_of_days(world)
        # Acknowledgements of the recovery itself must survive a second cut that keeps no unsynced data.
        second = World(image.crash(survival="nothing"), world.clock, world.observed, **cut.settings)
        return faults or await end_of_days(second)

    try:
        return run(main())
    except PowerCut:
        raise
    except Exception as error:
        # After a power cut a start must never fail, whatever the error is.
        return [Fault("broken", repr(error))]


async def end_of_days(world: World) -> list[Fault]:
    """Start, read all queues, let everything become due, read again, stop, and return the faults.

    The first reading notices a message that a restart makes visible too early.
    """
    await world.start()
    try:
        await world.settled()
        await world.consume()
        await world.resume_all()
        await world.advance(AFTER_MS)
        await world.consume()
        outcome = await world.outcome()
        await world.stop()
    finally:
        await world.abandon()
    if world.unheard:
        raise Unheard(world.unheard)
    return check(world.observed, outcome)


def report(cut: Cut, seed: int, survival: Survival, faults: list[Fault]) -> str:
    """Return the first five faults, with the arguments for `faults_after` that reproduce them."""
    lines = "\n  ".join(f"{fault.kind}: {fault.text}" for fault in faults[:5])
    return f"{cut.scenario}, {cut.at}, image seed={seed} survival={survival!r}:\n  {lines}"
