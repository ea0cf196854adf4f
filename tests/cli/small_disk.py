"""A disk of a few megabytes: a tmpfs in a separate mount namespace, if the system allows one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest


def on_small_disk(folder: Path, size_mib: int, command: list[str]) -> list[str]:
    """`command` with a tmpfs of this size on `folder`, invisible to others. Skips the test if there can be none."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size={size_mib}m tmpfs {shlex.quote(str(folder))}"
    tried = [unshare or "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    if unshare is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make a small disk")
    return [*tried[:-1], f"{mount} && exec {shlex.join(command)}"]
