"""The programs on the page docs/testing.md run unchanged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.bounds import BOUND_S
from tests.docs_pages import page, section

PAGE = page("docs/testing.md")


def test_the_python_tests_of_the_page_pass(tmp_path: Path) -> None:
    for name, code in re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', PAGE, re.M | re.S):
        (tmp_path / name).write_text(code)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, timeout=BOUND_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "3 passed" in process.stdout, process.stdout


def test_the_shell_commands_of_the_page_advance_the_clock(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section(PAGE, "Other languages"), re.M | re.S)
    serve, read_clock, advance = commands.splitlines()
    arguments = serve.replace("/tmp/test-data", str(tmp_path / "data")).split()[1:]
    ports = [f"--{port}-port=-1" for port in ("name-server", "remoting", "grpc")]
    command = [sys.executable, "-m", "timeball", *arguments, "--port=0", "--http-port=0", *ports, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout is not None
            address = json.loads(broker.stdout.readline())["http"]
            before = answer_of(read_clock, address)
            after = answer_of(advance, address)
            assert after["now_ms"] - before["now_ms"] == 40 * 86_400_000
            with urllib.request.urlopen(f"http://{address}/v1/broker") as status:
                assert json.loads(status.read())["clock"] == "manual"
        finally:
            broker.terminate()
            broker.wait(BOUND_S)


def answer_of(command: str, address: str) -> dict[str, int]:
    """Run a shell command against the broker at this address. Returns its JSON output."""
    process = subprocess.run(
        command.replace("localhost:7480", address),
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    answer: dict[str, int] = json.loads(process.stdout)
    return answer
