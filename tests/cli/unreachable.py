"""A broker that does not exist, and the error of each command."""

from __future__ import annotations

import subprocess

NOWHERE = "http://127.0.0.1:1"  # a port that nothing may listen on
NO_FLIGHT = "grpc://127.0.0.1:1"


def assert_says_how_to_reach_one(ended: subprocess.CompletedProcess[str], endpoint: str = NOWHERE) -> None:
    """Exit code 3, and one sentence with the endpoint, the command that starts a broker, and the option."""
    assert (ended.returncode, ended.stdout) == (3, "")
    assert len(ended.stderr.splitlines()) == 1
    assert endpoint in ended.stderr
    assert "'timeball up'" in ended.stderr and "--endpoint" in ended.stderr
