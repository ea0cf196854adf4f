"""The example with RocketMQ's official Python client runs unchanged, and the page on gRPC shows the same one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.docs_pages import page
from tests.interop.drivers import BOUND_S
from tests.interop.grpc_conversation import PYTHON
from tests.interop.stock_broker import StockBroker
from tests.interop.stock_clients import command

EXAMPLE = Path(__file__).parents[2] / "examples/rocketmq_grpc.py"
ENDPOINT = "127.0.0.1:8081"  # as the example has it


def test_the_page_shows_the_example() -> None:
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```\n" in page("docs/protocols/grpc.md")
    assert len(code.splitlines()) <= 35, "a short example"


@pytest.mark.interop
def test_the_example_runs(broker: StockBroker, tmp_path: Path) -> None:
    code = EXAMPLE.read_text()
    assert ENDPOINT in code
    python = command(PYTHON)[0]
    done = subprocess.run(
        ["env", f"HOME={tmp_path}", python, "-c", code.replace(ENDPOINT, broker.grpc)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert done.stdout.splitlines() == promised
