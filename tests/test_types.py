"""Users have complete types: mypy is strict with the examples and with the programs of the pages.

A program of a page may leave out the types of its own functions. mypy checks their bodies nevertheless.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs_pages import DOCS, PAGES, ROOT

PROGRAM = re.compile(r'^ *```python(?: title="([\w./]+)")?\n(.*?)^ *```', re.M | re.S)
# The programs' own functions have no types, and frameworks without types decorate them.
AS_ON_A_PAGE = [
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-globals",
    "--allow-untyped-calls",
    "--allow-untyped-decorators",
]
WRONG = """import asyncio
from timeball import AsyncTimeball, Timeball


async def main(ball: AsyncTimeball) -> None:
    await ball.send("orders", 5)
    (await ball.cancel("id")).verdicts
    for message in await ball.pull("orders", "g"):
        await message.ack(1)


Timeball().send("orders", "x", wait="5s")
"""
WRONG_LINES = ["6", "7", "9", "12"]
# RocketMQ's own client is not installed, and each line of Django's page uses Django, which has no types.
LEFT_OUT = {"docs/protocols/grpc.md", "docs/django.md"}


def write_programs(folder: Path) -> int:
    """Write the programs of the pages. Those of a page that names their files are in a folder. Returns their number."""
    count = 0
    for page in PAGES:
        programs = PROGRAM.findall(page.read_text("utf-8"))
        if str(page.relative_to(ROOT)) in LEFT_OUT:
            continue
        name = page.stem.replace("-", "_").lower()
        if programs and page.parent == DOCS / "pipeline":  # a program continues the ones before it
            programs = [("", "".join(code for _, code in programs))]
        for number, (title, code) in enumerate(programs):
            path = folder / (f"{name}/{title}" if title else f"untitled/{name}_{number}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
            count += 1
    return count


def errors(*arguments: str, folder: Path) -> list[str]:
    """Return the errors that mypy reports."""
    result = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict",
            "--cache-dir", str(ROOT / ".mypy_cache" / "users"), "--explicit-package-bases", "--no-error-summary",
            *arguments,
        ],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stderr
    return [line for line in result.stdout.splitlines() if ": note: " not in line]


@pytest.mark.slow
def test_mypy_is_strict_with_the_examples() -> None:
    # The clients of RocketMQ have no types.
    assert errors("--exclude", "rocketmq_grpc", "examples", folder=ROOT) == []


@pytest.mark.slow
def test_mypy_is_strict_with_the_programs_of_the_pages(tmp_path: Path) -> None:
    assert write_programs(tmp_path) >= 25
    reported = [
        error for folder in sorted(tmp_path.iterdir()) for error in errors(*AS_ON_A_PAGE, ".", folder=folder)
    ]
    assert reported == []


@pytest.mark.slow
def test_a_program_with_a_wrong_type_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    lines = errors("wrong.py", folder=tmp_path)
    assert [line.split(":")[1] for line in lines] == WRONG_LINES, lines
