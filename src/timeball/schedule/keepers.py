"""Which strategy keeps promises for an instant: from the settings to the one they name, and to what it had saved.

`hour_log` is none of these: it keeps the pending table whatever is chosen, and what is sent unless another does.
A state saved by another strategy, or for another ring, is no use to the one that starts; then it is told of all
that waits, and the log is read once from the oldest promise on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from timeball.config import Settings
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
    """What the chosen strategy saved for itself and can begin with; None when there is nothing of the sort."""
    if saved is None or saved.facts.kept is None or saved.facts.schedule != settings.schedule:
        return None
    state = _usable(settings, files, saved.facts.kept)
    if state is None:
        logger.warning("saved state not used, the whole log is read schedule=%s", settings.schedule)
    return state


def _usable(settings: Settings, files: Files, found: dict[str, object]) -> msgspec.Struct | None:
    try:
        if settings.schedule == "timer_wheel":
            wheel_state = msgspec.convert(found, WheelState)
            return wheel_state if wheel.is_usable(files, slots_of(settings), wheel_state) else None
        cascade_state = msgspec.convert(found, CascadeState)
        return cascade_state if cascade.usable(files, cascade_state) else None
    except msgspec.ValidationError:
        return None


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
    if settings.schedule == "timer_wheel":
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
    if settings.schedule == "level_cascade":
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
