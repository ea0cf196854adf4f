"""The fixtures of the pytest plugin, in a separate test session as an application has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bounds import BOUND_S

SESSION = """
import asyncio

def test_scheduled(timeball_broker, timeball_client):
    timeball_client.send("orders", b"x", after="40d", keys="17")
    timeball_broker.assert_scheduled("orders", key="17", after="40d")
    assert [message.body for message in timeball_broker.clock.advance("40d")] == [b"x"]

def test_each_test_has_its_own_broker(timeball_broker):
    assert timeball_broker.pending() == []

def test_async(timeball_broker, timeball_async_client):
    async def send():
        async with timeball_async_client as client:
            await client.send("orders", b"x", after="1m")
    asyncio.run(send())
    assert len(timeball_broker.pending("orders")) == 1

def test_not_scheduled(timeball_broker):
    timeball_broker.assert_scheduled("orders")
"""


def test_pytest_finds_the_fixtures_in_an_application_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(SESSION)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, timeout=BOUND_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    # The last test of SESSION must fail: this shows that `assert_scheduled` can fail.
    assert "1 failed, 3 passed" in process.stdout, process.stdout
    assert "0 messages are scheduled with topic 'orders'; pending are: none" in process.stdout
