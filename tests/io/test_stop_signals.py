"""The signals that end a process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from timeball.io.stop_signals import stop_asked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_first_of_them_is_waited_for_and_a_second_does_no_harm(number: signal.Signals) -> None:
    async def check() -> bool:
        asked = stop_asked()
        was_done = asked.done()
        for _ in range(2):
            os.kill(os.getpid(), number)
        await asked
        return was_done

    assert asyncio.run(check()) is False
