"""What a command has started ends with it, at whatever moment it is interrupted."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from timeball.cli.children import no_child_left_behind


def test_an_interrupt_ends_what_was_started_and_nothing_else() -> None:
    """With its children; a process from before the block goes on."""
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with pytest.raises(KeyboardInterrupt), no_child_left_behind():
                java = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
                raise KeyboardInterrupt
            # Its own child may have been ended a moment earlier, and the shell have gone by itself: both will do.
            java.wait(60)
            assert psutil.pid_exists(other.pid) and other.poll() is None
        finally:
            other.kill()
