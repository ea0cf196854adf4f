"""`make cluster`: one command runs a cluster on this machine, and Ctrl-C ends all its processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.bounds import BOUND_S
from tests.cli.in_process import run_here
from tests.cluster.etcd_cluster import need_etcd

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.cluster"]

pytestmark = pytest.mark.xdist_group("etcd")


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    """Return the first match of a pattern in the log of a process, once it is there."""
    until_s = time.monotonic() + BOUND_S
    while (match := re.search(pattern, log.read_text(), re.MULTILINE)) is None:
        assert process.poll() is None and time.monotonic() < until_s, log.read_text()
        time.sleep(0.05)
    return match


def test_one_command_runs_a_cluster_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    need_etcd()
    log, data = tmp_path / "log", tmp_path / "data"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, "--any-ports", "--data", str(data)], cwd=ROOT, stdout=out, stderr=out
        )
    try:
        wait_for(log, r"^Ctrl-C ends all", process)
        etcd = wait_for(log, r"TIMEBALL_ETCD=(\S+)", process)[1]
        leader = wait_for(log, r"^leader  (\w)", process)[1]
        pids = {
            name: int(pid) for name, pid in re.findall(r"^node (\w) .* pid (\d+)$", log.read_text(), re.M)
        }
        status = run_here("cluster", "status", "--cluster", "demo", "--etcd", etcd, "--json")
        assert json.loads(status.stdout)["leader"] == leader
        psutil.Process(pids[leader]).kill()
        wait_for(log, rf"^leader  [^{leader}]$", process)
        wait_for(log, rf"^node {leader} had ended, and is started again$", process)
        children = psutil.Process(process.pid).children()
        assert len(children) == 6
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 0, log.read_text()
        assert not any(child.is_running() for child in children)
        assert log.read_text().endswith("cluster: ended\n")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(BOUND_S)


def test_without_etcd_the_command_names_the_package_to_install(tmp_path: Path) -> None:
    result = subprocess.run(
        COMMAND, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 4 and "apt-get install etcd-server" in result.stderr and not result.stdout
