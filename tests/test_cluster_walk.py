"""The walk of docs/cluster.md, word for word: three addresses of this machine's loopback are the machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.docs_pages import page, section
from tests.test_curl_walk import pattern

pytestmark = pytest.mark.xdist_group("etcd")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STAYS = ("etcd ", "timeball serve ")  # they run in the foreground


@dataclass
class Machine:
    """A folder, an address, and the variables that were exported there."""

    name: str
    folder: Path
    exported: str = ""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, commands: str) -> str:
        """Run commands to their end and return what they print."""
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.exported + commands], cwd=self.folder, env=environment(),
            capture_output=True, text=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{commands}{result.stdout}{result.stderr}"
        self.exported += "".join(line + "\n" for line in commands.splitlines() if line.startswith("export "))
        return result.stdout

    def start(self, command: str) -> None:
        """Start a command that runs until the end of the test."""
        words = ["bash", "-euc", f"{self.exported}exec {command}"]
        with (self.folder / f"{command.split()[0]}.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=self.folder, env=environment(), stdout=log, stderr=log)
        self.running.append(process)


def environment() -> dict[str, str]:
    """Return an environment in which `timeball` is that of this tree."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBALL_")}
    # The page shows the first epoch. A machine too busy to renew a lease of a second has others by then.
    lease = {"TIMEBALL_LEASE_TTL_MS": "10s"}
    return {**variables, **lease, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def three_machines(folder: Path) -> Iterator[list[Machine]]:
    """Make three machines, and end their processes at the end."""
    machines = [Machine(name, folder / name) for name in "abc"]
    for machine in machines:
        machine.folder.mkdir()
    try:
        yield machines
    finally:
        for machine in machines:
            for process in machine.running:
                process.kill()
                process.wait()


def blocks(heading: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each block of a section."""
    return BLOCK.findall(section(page("docs/cluster.md"), heading))


def with_addresses_here(text: str) -> str:
    """Return commands with addresses of this machine, which no other test uses."""
    return text.replace("10.0.0.", f"127.{100 + os.getpid() % 100}.7.")


def test_the_commands_of_the_page_print_its_answers(tmp_path: Path) -> None:
    need_etcd()
    with three_machines(tmp_path) as machines:
        for kind, text in blocks("On each machine"):
            assert kind == "bash"
            for number, machine in enumerate(machines, 1):
                own = with_addresses_here(
                    text.replace("NODE=a ADDRESS=10.0.0.1", f"NODE={machine.name} ADDRESS=10.0.0.{number}")
                )
                machine.start(own) if text.startswith(STAYS) else machine.run(own)
        steps = blocks("On one of them")
        assert [kind for kind, _ in steps] == ["bash", "text"] * 4
        for (_, commands), (_, shown) in zip(steps[::2], steps[1::2], strict=True):
            follow(machines[0], with_addresses_here(commands), shown)


def follow(machine: Machine, commands: str, shown: str) -> None:
    """Run commands. A look at the cluster is repeated until it shows the expected state, as by a person."""
    until_s = time.monotonic() + BOUND_S
    while True:
        try:
            printed = machine.run(commands)
            assert re.fullmatch(pattern(shown.strip()), printed.strip(), re.DOTALL), (
                f"{commands}\nprinted {printed}\nshown   {shown}"
            )
        except AssertionError:
            if "cluster status" not in commands or time.monotonic() > until_s:
                raise
            time.sleep(0.2)
        else:
            return
