"""pyright accepts the examples and the programs of the pages, and in strict mode a program that uses the client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.docs_pages import ROOT
from tests.interop.stock_clients import command
from tests.test_types import WRONG, WRONG_LINES, write_programs

pytestmark = pytest.mark.interop

STRICT = """
from collections.abc import Mapping

from timeball import AsyncTimeball, Message, Receipt, Timeball, Verdict, Worker
from timeball.model.http_api import Schedule


def handle(message: Message) -> None:
    print(message.body.decode(), message.properties["region"].upper(), message.attempts + 1)


def blocking(ball: Timeball) -> tuple[Receipt, Verdict, list[Verdict]]:
    receipt = ball.send("orders", "x", after="5m", keys=["a"])
    for message in ball.consume("orders", "g", until_idle="1s"):
        message.ack()
    rows: list[Mapping[str, str]] = [{"body": "x"}]
    print(ball.send_many(rows, topic="orders").accepted[0].first_seq + 1)
    print(ball.schedules.get("daily").topic.upper())
    return receipt, ball.cancel(receipt.id), ball.cancel(key="a")


async def awaited(ball: AsyncTimeball) -> tuple[Receipt, Verdict, list[Verdict], list[Schedule]]:
    receipt = await ball.send("orders", "x", after="5m", keys=["a"])
    async for message in ball.consume("orders", "g", until_idle="1s"):
        print(await message.ack() is True, message.body.decode())
    rows: list[Mapping[str, str]] = [{"body": "x"}]
    print((await ball.send_many(rows, topic="orders")).accepted[0].first_seq + 1)
    found = await ball.schedules.all()
    return receipt, await ball.cancel(receipt.id), await ball.cancel(key="a"), found


Worker(Timeball(), "g", "orders", handle).run()
"""


def errors(folder: Path, **settings: Any) -> list[str]:
    """Return pyright's errors for the programs of a folder: "<file>:<line>: <text>". `settings` are pyright's."""
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"include": ["."], "extraPaths": [str(ROOT / "src"), str(ROOT)], **settings})
    )
    done = subprocess.run(
        [*command("pyright"), "--outputjson", "--pythonpath", sys.executable, "--project", str(folder)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return [
        f"{Path(each['file']).relative_to(folder)}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def test_examples_and_programs_of_pages_have_right_types(tmp_path: Path) -> None:
    assert write_programs(tmp_path) >= 25
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # Celery's decorators have no types, and RocketMQ's client is not installed.
    assert errors(tmp_path, exclude=["celery", "examples/rocketmq_grpc.py"]) == []


def test_a_program_that_uses_the_client_has_right_types_in_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STRICT)
    assert errors(tmp_path, typeCheckingMode="strict") == []


def test_a_program_with_a_wrong_type_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    assert [each.split(":")[1] for each in errors(tmp_path)] == WRONG_LINES
