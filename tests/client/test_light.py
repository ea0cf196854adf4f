"""The plain package suffices for a client over HTTP, `arrow` for one over Flight, `cli` for commands of a broker.

Everything else names the extra that has it.

These tests run in a process that cannot import anything else. `make wheel-check` uses a real installation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from tests.cli.processes import environment
from tests.docs_pages import ROOT
from tests.node_fixture import RunningNode

from timeball.cli.main import COMMANDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = re.compile(r"[A-Za-z0-9._-]+")
OWN = re.compile(r"timeball\[([a-z,]+)\]")

# In place of Python's: whatever is installed and not allowed is not there.
PLAIN = """
import importlib.abc, json, sys

refused = set(json.loads(sys.argv.pop(1)))

class Plain(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Plain())
"""
CLIENT = """
import asyncio
from timeball import AsyncTimeball, Retry, Timeball, Worker

with Timeball(sys.argv[1]) as ball:
    receipt = ball.send("light", "x", after="10ms", retry=True)
    (message,) = ball.pull("light", "g", wait="30s")
    print(message.ack(), ball.get(receipt.id).state)

async def ask():
    async with AsyncTimeball(sys.argv[1]) as ball:
        print((await ball.cancel((await ball.send("light", "y", after="1h")).id)).verdict)

asyncio.run(ask())
"""
COLUMNS = """
from timeball import Timeball

with Timeball(sys.argv[1], flight=sys.argv[2]) as ball:
    import pyarrow as pa

    ball.create_topic("light-columns", 1)
    sent = ball.send_many(pa.table({"body": [b"x", b"y"]}), topic="light-columns")
    print(sent.rows, ball.browse_batch("light-columns").column("body").to_pylist())
"""
COMMAND = """
from timeball.__main__ import main

main(sys.argv[1:])
"""
COMMANDS_IN_A_ROW = """
from timeball import Timeball
from timeball.cli.main import main

with Timeball(sys.argv[1]) as ball:
    waiting = ball.send("light", "x", after="1h").id
for words in json.loads(sys.argv[2]):
    try:
        main([waiting if word == "ID" else word for word in words])
    except SystemExit as end:
        print("ended", words[0], end.code, file=sys.stderr)
"""
PIPELINE = """
import importlib, pkgutil, timeball.spark

for found in pkgutil.walk_packages(timeball.spark.__path__, "timeball.spark."):
    if not found.name.endswith(("duckdb_session", "duckdb_relations")):
        importlib.import_module(found.name)
print("imported")
"""

# Arguments with which a command comes as far as what it needs; ID: a message that waits, DATA: a data folder.
TALK = {
    "send": ["send", "light", "a"],
    "schedule": ["schedule", "light", "b", "--after", "1h"],
    "get": ["get", "ID"],
    "reschedule": ["reschedule", "ID", "--after", "2h"],
    "cancel": ["cancel", "ID"],
    "pull": ["pull", "light", "--group", "other"],
    "topics": ["topics"],
    "groups": ["groups"],
    "dead-letters": ["dead-letters", "list", "other"],
    "status": ["status"],
    "schedules": ["schedules", "list"],
    "zones": ["zones"],
    "selections": ["selections", "list"],
}
NEED = {
    "up": (["up", "--port", "0"], "broker"),
    "serve": (["serve", "--port", "0"], "broker"),
    "name-server": (
        [
            "name-server",
            "--http-port",
            "-1",
            "--name-server-port",
            "9876",
            "--port",
            "7400",
            "--remoting-port",
            "-1",
            "--grpc-port",
            "-1",
            "--cluster",
            "c",
            "--node",
            "n",
            "--etcd",
            "http://127.0.0.1:1",
        ],
        "broker",
    ),
    "cluster": (["cluster", "status", "--cluster", "c", "--etcd", "http://127.0.0.1:1"], "broker"),
    "kafka": (["kafka", "--in", "delayed", "--status-every", "1h"], "kafka"),
    "import": (["import", "celery", "--from", "redis://127.0.0.1:1"], "celery"),
    "backup": (["backup", "DATA/copy", "--data", "DATA/own"], "broker"),
    "restore": (["restore", "DATA/own", "--data", "DATA/new"], "broker"),
    "dump": (["dump", "--data", "DATA/own"], "broker"),
    "pending": (["pending"], "broker"),
    "sql": (["sql", "select 1"], "broker"),
    "table": (["table"], "broker"),
    "forecast": (["forecast"], "broker"),
    "campaign": (["campaign", "status", "none"], "broker"),
    "pipeline": (["pipeline", "run", "compact"], "spark"),
    "bulk": (["bulk", "DATA/rows.csv", "--topic", "light", "--dry-run"], "spark"),
    "replay": (
        ["replay", "--from", "2026-01-01T00:00Z", "--until", "2026-01-02T00:00Z", "--shift", "7d"],
        "spark",
    ),
    "audit": (["audit"], "spark"),
}
OF_A_CHECKOUT = {"bench"}


def arguments(words: Iterable[str], folder: Path) -> list[str]:
    """Put files that are there in the place of DATA."""
    (folder / "own").mkdir(exist_ok=True)
    (folder / "rows.csv").write_text("body,due_ms\n")
    return [word.replace("DATA", str(folder)) for word in words]


def distributions(wanted: Iterable[str]) -> set[str]:
    """Return these distributions and all that they need themselves."""
    found: set[str] = set()
    missing = {_canonical(NAME.match(each)[0]) for each in wanted}  # type: ignore[index]
    while missing:
        found |= missing
        further = {
            _canonical(NAME.match(line)[0])  # type: ignore[index]
            for name in missing
            for line in _requires(name)
            if "extra ==" not in line
        }
        missing = further - found
    return found


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # for another Python or system
        return []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def extras_of(name: str) -> list[str]:
    """Return the requirements of an extra, and of the extras that it names."""
    found: list[str] = []
    for line in PROJECT["optional-dependencies"][name]:
        if named := OWN.fullmatch(line):
            for extra in named[1].split(","):
                found += extras_of(extra)
        else:
            found.append(line)
    return found


def modules_beside(extras: Iterable[str]) -> list[str]:
    """Return the top-level modules here that an installation with these extras does not have."""
    wanted = sum((extras_of(extra) for extra in extras), list(PROJECT["dependencies"]))
    there = distributions(wanted) | {"timeball"}
    return [
        module
        for module, names in packages_distributions().items()
        if not there & {_canonical(name) for name in names} and module not in sys.stdlib_module_names
    ]


def run(
    program: str, *given: str, extras: Iterable[str] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as in an installation with these extras and no others."""
    return subprocess.run(
        [sys.executable, "-c", PLAIN + program, json.dumps(modules_beside(extras)), *given],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_clients_work_with_the_plain_package_alone(node: RunningNode) -> None:
    ran = run(CLIENT, node.http_endpoint)
    assert ran.stdout.splitlines() == ["True visible", "cancelled"], ran.stderr


def test_columns_work_with_the_extra_arrow_and_name_pyarrow_without_it(node: RunningNode) -> None:
    ran = run(COLUMNS, node.http_endpoint, node.endpoint, extras=["arrow"])
    assert ran.stdout.splitlines() == ["2 [b'x', b'y']"], ran.stderr
    ran = run(COLUMNS, node.http_endpoint, node.endpoint)
    assert ran.stderr.endswith("ModuleNotFoundError: No module named 'pyarrow'\n"), ran.stderr


def test_a_command_without_the_extra_cli_names_it() -> None:
    ran = run(COMMAND, "topics")
    assert ran.returncode == 4 and re.fullmatch(
        r"timeball: \w+ is not installed: .* pip install '\.\[cli\]', .*\n", ran.stderr
    ), ran.stderr


def test_every_command_is_in_exactly_one_of_the_tables_of_this_file() -> None:
    """A new command must be added to TALK, to NEED, or to OF_A_CHECKOUT if it works only in a checkout."""
    assert sorted([*TALK, *NEED, *OF_A_CHECKOUT]) == sorted(COMMANDS)


def test_commands_that_talk_to_a_broker_work_with_the_extra_cli_alone(node: RunningNode) -> None:
    endpoint = node.http_endpoint
    asked = [[*words, "--endpoint", endpoint, "--json"] for words in TALK.values()]
    ran = run(COMMANDS_IN_A_ROW, endpoint, json.dumps(asked), extras=["cli"])
    ended = [line for line in ran.stderr.splitlines() if line.startswith("ended")]
    assert ended == [f"ended {name} 0" for name in TALK], ran.stderr


def test_a_command_that_needs_another_extra_names_it(node: RunningNode, tmp_path: Path) -> None:
    asked = [arguments(words, tmp_path) for words, _ in NEED.values()]
    ran = run(
        COMMANDS_IN_A_ROW,
        node.http_endpoint,
        json.dumps(asked),
        extras=["cli"],
        TIMEBALL_FLIGHT=node.endpoint,
    )
    lines = "".join(
        rf"timeball: \w+(\.\w+)* is not installed: install the extra, in a checkout of Timeball pip install "
        rf"'\.\[{extra}\]', of a release pip install 'TIMEBALL\.whl\[{extra}\]' TIMEBALL_BROKER\.whl\n"
        f"ended {name} 4\n"
        for name, (_, extra) in NEED.items()
    )
    assert re.fullmatch(lines, ran.stderr), ran.stderr
    assert ran.stdout == ""


def test_a_picture_without_the_extra_picture_names_it(node: RunningNode, tmp_path: Path) -> None:
    picture = ["forecast", "--picture", str(tmp_path / "load.png"), "--endpoint", node.endpoint]
    ran = run(COMMAND, *picture, extras=["broker"])
    assert ran.returncode == 4 and "pip install '.[picture]'" in ran.stderr, ran.stderr


def test_the_help_of_commands_needs_only_the_extra_cli() -> None:
    assert run(COMMAND, "--help", extras=["cli"]).returncode == 0
    assert "--segment-bytes" in run(COMMAND, "serve", "--help", extras=["cli"]).stdout


def test_the_modules_of_the_pipeline_import_with_the_extra_spark_alone() -> None:
    """All but the SQL of DuckDB, which no executor runs."""
    ran = run(PIPELINE, extras=["spark"])
    assert ran.stdout == "imported\n", ran.stderr


def test_the_import_contract_forbids_all_packages_of_the_larger_extras() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (plain,) = (each for each in contracts if "arrow and cli alone" in each["name"])
    of = {
        _canonical(name) for module in plain["forbidden_modules"] for name in packages_distributions()[module]
    }
    allowed = set(extras_of("cli"))
    lines = {line for extra in ("broker", "spark", "picture") for line in extras_of(extra)} - allowed
    wanted = {NAME.match(line)[0] for line in lines}  # type: ignore[index]
    assert {_canonical(name) for name in wanted} <= of


def test_a_package_has_the_same_requirement_in_all_extras() -> None:
    lines: dict[str, set[str]] = {}
    for extra in PROJECT["optional-dependencies"]:
        for line in extras_of(extra):
            lines.setdefault(NAME.match(line)[0], set()).add(line)  # type: ignore[index]
    assert not {name: found for name, found in lines.items() if len(found) > 1}
    assert PROJECT["optional-dependencies"]["all"] == ["timeball[broker,spark,kafka,picture,otel]"]
