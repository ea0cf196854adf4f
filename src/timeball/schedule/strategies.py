"""Build the backlogs from the settings, and read the state that the chosen one had saved.

`hour_log` always runs, as it keeps the pending table under every strategy, and so do the delay levels; another strategy
runs beside them and keeps the promises that are sent. A state saved by another strategy, or for another ring, or with
files that do not match their checksums is not used: then the log is read once from the oldest promise on.

The modules of a strategy are imported when it is chosen: a start is over sooner without those of the others.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec

from timeball.config import Settings
from timeball.errors import Corrupt, SetupError
from timeball.files import Files
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.schedule.backlog import Backlog
from timeball.schedule.outcomes import Outcomes

if TYPE_CHECKING:
    from timeball.schedule.timer_wheel.ring import Slots

logger = logging.getLogger(__name__)


def saved_state(settings: Settings, files: Files, saved: Checkpoint | None) -> msgspec.Struct | None:
    """Return what the chosen strategy saved for itself and can begin with; None when there is nothing of the sort.

    Reads all its files, which takes some 50 ns for each promise that waits.
    """
    # By name, before its fields are read: states of different strategies have different fields.
    if saved is None or saved.facts.kept is None or saved.facts.schedule != settings.strategy:
        return None
    # Any fault of a state is a reason to build it anew, never to refuse the start: it is a cache of the log.
    try:
        return _checked(settings, files, saved.facts.kept)
    except (Corrupt, SetupError, msgspec.ValidationError) as error:
        logger.warning(
            "saved state not used, the whole log is read schedule=%s reason=%s", settings.strategy, error
        )
        return None


def _checked(settings: Settings, files: Files, found: dict[str, object]) -> msgspec.Struct:
    if settings.strategy == "timer_wheel":
        from timeball.schedule.timer_wheel import backlog as wheel
        from timeball.schedule.timer_wheel.backlog import WheelState

        wheel_state = msgspec.convert(found, WheelState)
        wheel.check(files, slots_of(settings), wheel_state)
        return wheel_state
    from timeball.schedule.level_cascade import backlog as cascade
    from timeball.schedule.level_cascade.backlog import CascadeState

    cascade_state = msgspec.convert(found, CascadeState)
    cascade.check(files, cascade_state, ahead_ms_of(settings))
    return cascade_state


def build(
    settings: Settings, files: Files, reader: LogReader, reader_thread: Executor, outcomes: Outcomes
) -> Backlog | None:
    """Return the backlog with files of its own that the settings name; None for `hour_log`."""
    if settings.strategy == "timer_wheel":
        from timeball.schedule.timer_wheel.backlog import TimerWheel

        return TimerWheel(
            files,
            reader,
            reader_thread,
            outcomes,
            slots=slots_of(settings),
            congest_rows=settings.timer_congest_num_each_slot,
            ahead_ms=settings.gather_ahead_ms,
        )
    if settings.strategy == "level_cascade":
        from timeball.schedule.level_cascade.backlog import LevelCascade

        return LevelCascade(files, reader, outcomes, ahead_ms=settings.gather_ahead_ms)
    return None


def ahead_ms_of(settings: Settings) -> int:
    """Return how long before their instants promises are opened."""
    if settings.strategy != "level_cascade":
        return settings.gather_ahead_ms
    from timeball.schedule.level_cascade.placement import lead_ms_of

    # The cascade opens its queues half the lead ahead, and needs more of it than a short setting gives.
    return lead_ms_of(settings.gather_ahead_ms)


def slots_of(settings: Settings) -> Slots:
    """Return the ring that the settings ask for."""
    from timeball.schedule.timer_wheel.ring import Slots

    return Slots.of(
        precision_ms=settings.timer_precision_ms,
        wheel_ms=settings.timer_wheel_ms,
        ahead_ms=settings.gather_ahead_ms,
    )
