"""The signals that ask a process to stop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from timeball.io.threads import watch_stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_future_is_done_at_the_first_signal_and_ignores_a_second(number: signal.Signals) -> None:
    async def check() -> bool:
        asked = watch_stop_signals()
        was_done = asked.done()
        for _ in range(2):
            os.kill(os.getpid(), number)
        await asked
        return was_done

    assert asyncio.run(check()) is False
