"""The walk of docs/curl.md, command by command: curl prints the answers of the page."""

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
    """Return the commands and the answer of each block of commands that is followed by an answer."""
    lines = r"((?:(?!```).*\n)*)```"  # of one block
    blocks = re.findall(rf"^```bash\n{lines}\s+^```json\n{lines}", text, re.MULTILINE)
    return [(commands, shown.strip()) for commands, shown in blocks]


def pattern(shown: str) -> str:
    """Return the regular expression of an answer, in which … stands for any text."""
    return ".*?".join(re.escape(part) for part in shown.split("…"))


def check_step(commands: str, shown: str, folder: Path, replaced: dict[str, str]) -> None:
    """Run commands, and compare their output with the answer of the page."""
    for old, new in replaced.items():
        commands, shown = commands.replace(old, new), shown.replace(old, new)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, capture_output=True, text=True, timeout=BOUND_S,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{commands}{result.stderr}"
    assert re.fullmatch(pattern(shown), result.stdout), (
        f"{commands}\nprinted {result.stdout}\nshown   {shown}"
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_schedules_of_the_recurring_page_are_accepted(tmp_path: Path) -> None:
    walk = steps(page("docs/recurring.md"))
    assert len(walk) >= 5
    with running_node(tmp_path / "data", ManualClock(), http_port=0) as node:
        replaced = {"localhost:7480": f"127.0.0.1:{node.node.http_port}"}
        for commands, shown in walk:
            check_step(commands, shown, tmp_path, replaced)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_of_the_page_print_its_answers(tmp_path: Path) -> None:
    walk = steps(page("docs/curl.md"))
    assert len(walk) >= 10
    with (
        running_node(tmp_path / "data", http_port=0, push_allow="127.0.0.1") as node,
        receiver_of() as receiver,
    ):
        replaced = {
            "localhost:7480": f"127.0.0.1:{node.node.http_port}",
            "127.0.0.1:9000": f"127.0.0.1:{receiver.port}",
        }
        for commands, shown in walk:
            check_step(commands, shown, tmp_path, replaced)
        eventually(lambda: receiver.requests, "the push")


def test_an_answer_that_is_another_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="printed"):
        check_step("echo '{\"a\":1}'", '{"a":2}', tmp_path, {})
