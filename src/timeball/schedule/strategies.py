"""Build the backlog of the chosen strategy from the settings, and check its saved state.

`hour_log` always runs, since it serves the pending table under every strategy. The delay levels always run, too. If
another strategy is chosen, its backlog runs beside them and stores the messages that are sent.

A saved state is ignored if it belongs to another strategy or another ring, or if its files do not match their
checksums. Then the log is read once, from the oldest scheduled message on.

The module of another strategy is imported only when it is chosen. A start is faster without it.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec

from timeball.io.files import Files
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, SetupError
from timeball.schedule.backlog import Backlog
from timeball.schedule.loaded import AHEAD_MS
from timeball.schedule.outcomes import Outcomes

if TYPE_CHECKING:
    from timeball.schedule.timer_wheel import Slots

logger = logging.getLogger(__name__)


def saved_state(
    settings: Settings, files: Files, saved: Checkpoint | None, ahead_ms: int = AHEAD_MS
) -> msgspec.Struct | None:
    """Build the chosen strategy's state from a checkpoint, and check its files. None if there is no usable state.

    Reading all files of the strategy takes about 50 ns per pending message.
    """
    # The name is compared before the fields are read: states of different strategies have different fields.
    if saved is None or saved.facts.kept is None or saved.facts.schedule != settings.strategy:
        return None
    # A state is a cache of the log. A fault in it is a reason to rebuild it, never to refuse the start.
    try:
        return _checked(settings, files, saved.facts.kept, ahead_ms)
    except (Corrupt, SetupError, msgspec.ValidationError) as error:
        logger.warning(
            "saved state not used, the whole log is read schedule=%s reason=%s", settings.strategy, error
        )
        return None


def _checked(settings: Settings, files: Files, raw_state: dict[str, object], ahead_ms: int) -> msgspec.Struct:
    """Convert a decoded JSON object to the strategy's state and check its files.

    Raises Corrupt for damaged files, SetupError if the settings have changed, ValidationError for other fields.
    """
    if settings.strategy == "timer_wheel":
        from timeball.schedule import timer_wheel as wheel
        from timeball.schedule.timer_wheel import WheelState

        wheel_state = msgspec.convert(raw_state, WheelState)
        wheel.check(files, ring_slots_of(settings, ahead_ms), wheel_state)
        return wheel_state
    from timeball.schedule import level_cascade as cascade
    from timeball.schedule.level_cascade import CascadeState

    cascade_state = msgspec.convert(raw_state, CascadeState)
    cascade.check(files, cascade_state, opens_ahead_ms(settings, ahead_ms))
    return cascade_state


def build(
    settings: Settings,
    files: Files,
    reader: LogReader,
    reader_thread: Executor,
    outcomes: Outcomes,
    ahead_ms: int = AHEAD_MS,
) -> Backlog | None:
    """Build the backlog of the strategy that the settings name. None for `hour_log`, which the node always builds."""
    if settings.strategy == "timer_wheel":
        from timeball.schedule.timer_wheel import TimerWheel

        return TimerWheel(
            files,
            reader,
            reader_thread,
            outcomes,
            slots=ring_slots_of(settings, ahead_ms),
            congest_rows=settings.timer_congest_num_each_slot,
            ahead_ms=ahead_ms,
        )
    if settings.strategy == "level_cascade":
        from timeball.schedule.level_cascade import LevelCascade

        return LevelCascade(files, reader, outcomes, ahead_ms=ahead_ms)
    return None


def opens_ahead_ms(settings: Settings, ahead_ms: int) -> int:
    """Compute how many ms before their due times messages are opened, if bodies are loaded `ahead_ms` ahead."""
    if settings.strategy != "level_cascade":
        return ahead_ms
    from timeball.schedule.level_cascade import lead_ms_of

    return lead_ms_of(ahead_ms)


def ring_slots_of(settings: Settings, ahead_ms: int) -> Slots:
    """Compute the slots of the timer wheel's ring from the settings."""
    from timeball.schedule.timer_wheel import Slots

    return Slots.of(
        precision_ms=settings.timer_precision_ms,
        wheel_ms=settings.timer_wheel_ms,
        ahead_ms=ahead_ms,
    )
