"""The command line as a whole: help, versions, and errors without stack traces."""

import re
import subprocess
import sys

import pytest
from tests.cli.in_process import run_here
from tests.cli.processes import environment, timeball

from timeball.cli.main import COMMANDS as ALL

GROUPS = {"pipeline", "campaign", "dead-letters", "cluster", "schedules", "selections", "import"}
OF_CLUSTER = ("init", "status", "add-replica", "remove-replica", "hand-over", "drain", "force")
OF_SCHEDULES = ("put", "preview", "list", "show", "history", "pause", "resume", "run", "delete")
OF_SELECTIONS = ("cancel", "shift", "pause", "resume", "release", "move", "undo", "list", "show")
COMMANDS = sorted(set(ALL) - GROUPS)
NOWHERE = "http://127.0.0.1:1"  # a port that nothing may listen on
NO_FLIGHT = "grpc://127.0.0.1:1"


def test_the_commands_are_those_of_the_design() -> None:
    """A command that is missing here would have no test below."""
    assert set(ALL) - GROUPS == {
        *(
            "up",
            "serve",
            "name-server",
            "kafka",
            "backup",
            "restore",
            "send",
            "schedule",
            "cancel",
            "reschedule",
            "pull",
            "get",
        ),
        *("topics", "groups", "pending", "audit", "dump", "bench", "status", "zones"),
        *("bulk", "replay", "forecast", "sql", "table"),
    }
    assert set(ALL) >= GROUPS


def test_the_help_of_send_imports_neither_arrow_nor_spark() -> None:
    """Arrow, Spark and the broker cost a second. A version, a help text or a status needs none of them."""
    program = "import sys, timeball.cli.main as m\ntry: m.main(['send', '--help'])\nexcept SystemExit: pass\n"
    program += "print(*(name for name in ('pyarrow', 'numpy', 'pyspark', 'asyncio') if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False
    )
    assert result.stdout.splitlines()[-1] == "", result.stdout


@pytest.mark.parametrize(
    "command",
    [
        *([name] for name in COMMANDS),
        ["pipeline", "run"],
        *(["cluster", name] for name in OF_CLUSTER),
        *(["schedules", name] for name in OF_SCHEDULES),
        *(["selections", name] for name in OF_SELECTIONS),
        ["import", "celery"],
    ],
    ids="-".join,
)
def test_every_command_has_help_with_examples_that_name_it(command: list[str]) -> None:
    """An example is a whole command line, and each command has at least two."""
    result = run_here(*command, "--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout
    examples = result.stdout.split("Examples:")[1]
    assert len(re.findall(rf"timeball {' '.join(command)}\b", examples)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), ["pipeline", "run"]], ids="-".join)
def test_every_command_is_a_process_with_an_exit_code(command: list[str]) -> None:
    """Other tests call `main` in their own process. This test starts the command as a shell does."""
    assert timeball(*command, "--help").stdout == run_here(*command, "--help").stdout
    result = timeball(*command, "--no-such-option")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--no-such-option" in result.stderr


def test_the_list_of_commands_comes_with_the_exit_codes() -> None:
    """Scripts need the exit codes, and their authors look for them in the help."""
    result = run_here("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)
    assert "Exit codes" in result.stdout


def test_the_version_is_shown() -> None:
    """The version is one line."""
    assert re.fullmatch(r"timeball \d+\.\d+\.\d+\n", run_here("--version").stdout)


@pytest.mark.parametrize(
    "command",
    [
        ["send", "orders", "x"],
        ["schedule", "orders", "x", "--after", "1s"],
        ["cancel", "some-id"],
        ["reschedule", "some-id", "--after", "5m"],
        ["pull", "orders"],
        ["pending"],
        ["status", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_no_broker_is_one_sentence_with_a_way_out(command: list[str]) -> None:
    """The exit code is 3. The sentence has the endpoint, and the command that starts a broker."""
    endpoint = NO_FLIGHT if command == ["pending"] else NOWHERE
    result = run_here(*command, "--endpoint", endpoint)
    assert result.returncode == 3
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert endpoint in result.stderr and "timeball up" in result.stderr


def test_timeball_debug_shows_the_stack_trace() -> None:
    """Without this variable the error is one sentence, as in the test above."""
    result = timeball("status", "--endpoint", NOWHERE, TIMEBALL_DEBUG="1")
    assert result.returncode != 0
    assert "Traceback" in result.stderr and "Unavailable" in result.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["serve", "--segment-bytes", "64M"], "--segment-bytes"),
        (["serve", "--retention-ms", "soon"], "--retention-ms"),
        (["nonsense"], "nonsense"),
        (["bench", "nonsense"], "nonsense"),
        (["cancel"], "--key"),
        (["reschedule", "--after", "5m"], "--key"),
        (["reschedule", "some-id"], "--after"),
        (["schedule", "orders", "x"], "--after"),
        (["schedule", "orders", "x", "--after", "1s", "--at", "2030-01-01T00:00:00Z"], "exactly one"),
        (["schedule", "orders", "x", "--after", "30"], "unit"),
        (["schedule", "orders", "x", "--at", "2030-01-01T00:00:00"], "time zone"),
        (["send", "orders", "x", "--property", "eu"], "NAME=VALUE"),
        (["pipeline", "run", "nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_usage_error_names_the_option_and_exits_with_2(command: list[str], named: str) -> None:
    """The error comes before the command connects to a broker or writes anything."""
    result = run_here(*command)
    assert result.returncode == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_that_cannot_work_are_a_set_up_error() -> None:
    """Settings refuses the value, and names the option."""
    result = run_here("serve", "--port", "70000")
    assert result.returncode == 4
    assert "--port 70000" in result.stderr
