"""Which strategy keeps promises for an instant: from the settings to the one they name, and to what it had saved.

`hour_log` is none of these: it keeps the pending table whatever is chosen, and what is sent unless another does.
A state saved by another strategy, or for another ring, is no use to the one that starts, nor is one whose files do
not match their checksums; then it is told of all that waits, and the log is read once from the oldest promise on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from timeball.config import Settings
from timeball.errors import Corrupt, SetupError
from timeball.files import Files
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.schedule.level_cascade import store as cascade
from timeball.schedule.level_cascade.store import CascadeState, LevelCascade
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Keeper
from timeball.schedule.timer_wheel import wheel
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.store import TimerWheel
from timeball.schedule.timer_wheel.wheel import WheelState

logger = logging.getLogger(__name__)


def kept(settings: Settings, files: Files, saved: Checkpoint | None) -> msgspec.Struct | None:
    """What the chosen strategy saved for itself and can begin with; None when there is nothing of the sort.

    Reads all its files, which takes some 50 ns for each promise that waits.
    """
    if saved is None or saved.facts.kept is None or saved.facts.schedule != settings.strategy:
        return None
    try:
        return _checked(settings, files, saved.facts.kept)
    except (Corrupt, SetupError, msgspec.ValidationError) as error:
        logger.warning(
            "saved state not used, the whole log is read schedule=%s reason=%s", settings.strategy, error
        )
        return None


def _checked(settings: Settings, files: Files, found: dict[str, object]) -> msgspec.Struct:
    if settings.strategy == "timer_wheel":
        wheel_state = msgspec.convert(found, WheelState)
        wheel.check(files, slots_of(settings), wheel_state)
        return wheel_state
    cascade_state = msgspec.convert(found, CascadeState)
    cascade.check(files, cascade_state)
    return cascade_state


def build(
    settings: Settings,
    files: Files,
    reader: LogReader,
    reader_thread: Executor,
    settling: Settling,
    *,
    on_change: Callable[[], None],
    on_failure: Callable[[BaseException], None],
) -> Keeper | None:
    """The strategy with files of its own that the settings name; None for `hour_log`."""
    if settings.strategy == "timer_wheel":
        return TimerWheel(
            files,
            reader,
            reader_thread,
            settling,
            slots=slots_of(settings),
            congest_rows=settings.timer_congest_num_each_slot,
            ahead_ms=settings.gather_ahead_ms,
            gather_bytes=settings.gather_bytes,
            on_change=on_change,
            on_failure=on_failure,
        )
    if settings.strategy == "level_cascade":
        return LevelCascade(
            files,
            reader,
            reader_thread,
            settling,
            ahead_ms=settings.gather_ahead_ms,
            gather_bytes=settings.gather_bytes,
            on_change=on_change,
            on_failure=on_failure,
        )
    return None


def slots_of(settings: Settings) -> Slots:
    """The ring that the settings ask for."""
    return Slots.of(
        precision_ms=settings.timer_precision_ms,
        wheel_ms=settings.timer_wheel_ms,
        ahead_ms=settings.gather_ahead_ms,
    )
