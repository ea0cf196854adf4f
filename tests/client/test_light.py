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
PACKAGE_NAME = re.compile(r"[A-Za-z0-9._-]+")
OWN_EXTRAS = re.compile(r"timeball\[([a-z,]+)\]")

# The begin of each program: the imports of the modules in the first argument fail as if they were not installed.
REFUSE_IMPORTS = """
import importlib.abc, json, sys

refused = set(json.loads(sys.argv.pop(1)))

class Refusal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
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

for module in pkgutil.walk_packages(timeball.spark.__path__, "timeball.spark."):
    if not module.name.endswith(("duckdb_session", "duckdb_relations")):
        importlib.import_module(module.name)
print("imported")
"""

# The commands that call a broker over HTTP and need only the extra `cli`. ID stands for the id of a waiting message.
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
# The other commands, each with the extra that it needs. DATA stands for a folder. The arguments are valid, so that the
# command fails only at the missing packages.
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
CHECKOUT_COMMANDS = {"bench"}


def arguments(words: Iterable[str], folder: Path) -> list[str]:
    """Create the files that the arguments name, and replace DATA by their folder."""
    (folder / "own").mkdir(exist_ok=True)
    (folder / "rows.csv").write_text("body,due_ms\n")
    return [word.replace("DATA", str(folder)) for word in words]


def distributions(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions of these requirements, and of all that they require in turn."""
    names: set[str] = set()
    unvisited = {_canonical(PACKAGE_NAME.match(line)[0]) for line in requirements}  # type: ignore[index]
    while unvisited:
        names |= unvisited
        required = {
            _canonical(PACKAGE_NAME.match(line)[0])  # type: ignore[index]
            for name in unvisited
            for line in _requires(name)
            if "extra ==" not in line
        }
        unvisited = required - names
    return names


def _requires(name: str) -> list[str]:
    """The requirements of a distribution, also those of its extras."""
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # a requirement for another Python or system is not installed here
        return []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(name: str) -> list[str]:
    """Return the requirements of an extra, and of the extras that it names."""
    requirements: list[str] = []
    for line in PROJECT["optional-dependencies"][name]:
        if own_extras := OWN_EXTRAS.fullmatch(line):
            for extra in own_extras[1].split(","):
                requirements += requirements_of(extra)
        else:
            requirements.append(line)
    return requirements


def modules_without(extras: Iterable[str]) -> list[str]:
    """Return the top-level modules here that an installation with these extras does not have."""
    requirements = sum((requirements_of(extra) for extra in extras), list(PROJECT["dependencies"]))
    installed = distributions(requirements) | {"timeball"}
    return [
        module
        for module, names in packages_distributions().items()
        if not installed & {_canonical(name) for name in names} and module not in sys.stdlib_module_names
    ]


def run(
    program: str, *arguments: str, extras: Iterable[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as in an installation with only these extras, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", REFUSE_IMPORTS + program, json.dumps(modules_without(extras)), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_clients_work_with_the_plain_package_alone(node: RunningNode) -> None:
    result = run(CLIENT, node.http_endpoint)
    assert result.stdout.splitlines() == ["True visible", "cancelled"], result.stderr


def test_columns_work_with_the_extra_arrow_and_name_pyarrow_without_it(node: RunningNode) -> None:
    result = run(COLUMNS, node.http_endpoint, node.endpoint, extras=["arrow"])
    assert result.stdout.splitlines() == ["2 [b'x', b'y']"], result.stderr
    result = run(COLUMNS, node.http_endpoint, node.endpoint)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'pyarrow'\n"), result.stderr


def test_a_command_without_the_extra_cli_names_it() -> None:
    result = run(COMMAND, "topics")
    assert result.returncode == 4 and re.fullmatch(
        r"timeball: \w+ is not installed: .* pip install '\.\[cli\]', .*\n", result.stderr
    ), result.stderr


def test_every_command_is_in_exactly_one_of_the_tables_of_this_file() -> None:
    """A command that works only in a checkout is in CHECKOUT_COMMANDS."""
    assert sorted([*TALK, *NEED, *CHECKOUT_COMMANDS]) == sorted(COMMANDS)


def test_commands_that_talk_to_a_broker_work_with_the_extra_cli_alone(node: RunningNode) -> None:
    endpoint = node.http_endpoint
    commands = [[*words, "--endpoint", endpoint, "--json"] for words in TALK.values()]
    result = run(COMMANDS_IN_A_ROW, endpoint, json.dumps(commands), extras=["cli"])
    endings = [line for line in result.stderr.splitlines() if line.startswith("ended")]
    assert endings == [f"ended {name} 0" for name in TALK], result.stderr


def test_a_command_that_needs_another_extra_names_it(node: RunningNode, tmp_path: Path) -> None:
    commands = [arguments(words, tmp_path) for words, _ in NEED.values()]
    result = run(
        COMMANDS_IN_A_ROW,
        node.http_endpoint,
        json.dumps(commands),
        extras=["cli"],
        TIMEBALL_FLIGHT=node.endpoint,
    )
    # A line for each command, and its exit code 4 from COMMANDS_IN_A_ROW.
    lines = "".join(
        rf"timeball: \w+(\.\w+)* is not installed: install the extra, in a checkout of Timeball pip install "
        rf"'\.\[{extra}\]', of a release pip install 'TIMEBALL\.whl\[{extra}\]' TIMEBALL_BROKER\.whl\n"
        f"ended {name} 4\n"
        for name, (_, extra) in NEED.items()
    )
    assert re.fullmatch(lines, result.stderr), result.stderr
    assert result.stdout == ""


def test_a_picture_without_the_extra_picture_names_it(node: RunningNode, tmp_path: Path) -> None:
    command = ["forecast", "--picture", str(tmp_path / "load.png"), "--endpoint", node.endpoint]
    result = run(COMMAND, *command, extras=["broker"])
    assert result.returncode == 4 and "pip install '.[picture]'" in result.stderr, result.stderr


def test_the_help_of_commands_needs_only_the_extra_cli() -> None:
    assert run(COMMAND, "--help", extras=["cli"]).returncode == 0
    assert "--segment-bytes" in run(COMMAND, "serve", "--help", extras=["cli"]).stdout


def test_the_modules_of_the_pipeline_import_with_the_extra_spark_alone() -> None:
    """All modules except those that run DuckDB, which no executor of Spark imports."""
    result = run(PIPELINE, extras=["spark"])
    assert result.stdout == "imported\n", result.stderr


def test_the_import_contract_forbids_all_packages_of_the_larger_extras() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if "arrow and cli alone" in contract["name"])
    forbidden = {
        _canonical(name)
        for module in contract["forbidden_modules"]
        for name in packages_distributions()[module]
    }
    allowed = set(requirements_of("cli"))
    lines = {line for extra in ("broker", "spark", "picture") for line in requirements_of(extra)} - allowed
    larger = {PACKAGE_NAME.match(line)[0] for line in lines}  # type: ignore[index]
    assert {_canonical(name) for name in larger} <= forbidden


def test_a_package_has_the_same_requirement_in_all_extras() -> None:
    lines: dict[str, set[str]] = {}
    for extra in PROJECT["optional-dependencies"]:
        for line in requirements_of(extra):
            lines.setdefault(PACKAGE_NAME.match(line)[0], set()).add(line)  # type: ignore[index]
    assert not {name: requirements for name, requirements in lines.items() if len(requirements) > 1}
    assert PROJECT["optional-dependencies"]["all"] == ["timeball[broker,spark,kafka,picture,otel]"]
