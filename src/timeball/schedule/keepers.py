"""Which strategy keeps promises for an instant: from the settings to the one they name, and to what it had saved.

`hour_log` is none of these: it keeps the pending table whatever is chosen, and what is sent unless another does.
A state saved by another strategy, or for another ring, is no use to the one that starts; then it is told of all
that waits, and the log is read once from the oldest promise on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from timeball.config import Settings
from timeball.files import Files
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Keeper


def kept(settings: Settings, saved: Checkpoint | None) -> msgspec.Struct | None:
    """What the chosen strategy saved for itself and can begin with; None when there is nothing of the sort."""
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
    return None
