"""The walk of docs/curl.md, command by command: what curl prints is what the page shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.docs_pages import page
from tests.edges.push.receiver import receiver_of
from tests.node_fixture import eventually, running_node

from timeball.io.clock import ManualClock


def steps(text: str) -> list[tuple[str, str]]:
    """Return (commands, what they print) of each block of commands that is followed by an answer."""
    lines = r"((?:(?!```).*\n)*)```"  # of one block
    found = re.findall(rf"^```bash\n{lines}\s+^```json\n{lines}", text, re.MULTILINE)
    return [(commands, shown.strip()) for commands, shown in found]


def pattern(shown: str) -> str:
    return ".*?".join(re.escape(part) for part in shown.split("…"))


def check_step(commands: str, shown: str, folder: Path, replaced: dict[str, str]) -> None:
    for old, new in replaced.items():
        commands, shown = commands.replace(old, new), shown.replace(old, new)
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, capture_output=True, text=True, timeout=BOUND_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{commands}{ran.stderr}"
    assert re.fullmatch(pattern(shown), ran.stdout), f"{commands}\nprinted {ran.stdout}\nshown   {shown}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_schedules_of_the_page_can_be_made(tmp_path: Path) -> None:
    found = steps(page("docs/recurring.md"))
    assert len(found) >= 5
    with running_node(tmp_path / "data", ManualClock(), http_port=0) as node:
        replaced = {"localhost:7480": f"127.0.0.1:{node.node.http_port}"}
        for commands, shown in found:
            check_step(commands, shown, tmp_path, replaced)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_walk_can_be_gone(tmp_path: Path) -> None:
    found = steps(page("docs/curl.md"))
    assert len(found) >= 10
    with (
        running_node(tmp_path / "data", http_port=0, push_allow="127.0.0.1") as node,
        receiver_of() as receiver,
    ):
        replaced = {
            "localhost:7480": f"127.0.0.1:{node.node.http_port}",
            "127.0.0.1:9000": f"127.0.0.1:{receiver.port}",
        }
        for commands, shown in found:
            check_step(commands, shown, tmp_path, replaced)
        eventually(lambda: receiver.requests, "the push")


def test_an_answer_that_is_another_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="printed"):
        check_step("echo '{\"a\":1}'", '{"a":2}', tmp_path, {})
