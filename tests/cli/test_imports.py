"""`timeball import celery`, and `timeball schedules import celery-beat` and `crontab`.

No Redis runs here: tests/interop/test_celery.py has one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import running_node
from tests.ports import free_ports

from timeball import NotFound
from timeball.testing import TestBroker

# ---- tasks of Celery ------------------------------------------------------------------------------------------


def test_a_redis_that_does_not_answer_is_a_set_up_error_without_its_password(endpoint: str) -> None:
    (port,) = free_ports(1)
    result = run_here(
        "import", "celery", "--from", f"redis://:secret@127.0.0.1:{port}/0", "--endpoint", endpoint
    )
    assert result.returncode == 4
    assert f"127.0.0.1:{port}/0" in result.stderr and "secret" not in result.stderr


def test_the_option_from_is_required(endpoint: str) -> None:
    result = run_here("import", "celery", "--endpoint", endpoint)
    assert result.returncode == 2 and "--from" in result.stderr


# ---- schedules of celery beat ---------------------------------------------------------------------------------

PROGRAM = """
from celery import Celery
from celery.schedules import crontab

app = Celery("bakery", broker="timeball://127.0.0.1:1", set_as_current=False)
app.conf.result_expires = None
app.conf.beat_schedule = {"bread": {"task": "bakery.bake", "schedule": crontab(minute=0, hour=4)}}
"""


@pytest.fixture
def bakery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of an app, which commands find in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file changes within a second
    (tmp_path / "bakery.py").write_text(PROGRAM)
    yield tmp_path / "bakery.py"
    sys.modules.pop("bakery", None)


def test_a_dry_run_shows_the_entries_and_an_import_puts_and_deletes_them(bakery: Path) -> None:
    with TestBroker() as broker, broker.client() as ball:

        def import_bakery(*arguments: str) -> str:
            """Run the command on the present file of the app, and return its output."""
            sys.modules.pop("bakery", None)  # otherwise Python keeps the module of the earlier file
            words = ("schedules", "import", "celery-beat", "bakery", *arguments)
            result = run_here(*words, "--endpoint", broker.endpoint)
            assert result.returncode == 0, result.stderr
            return result.stdout.strip()

        assert (
            import_bakery("--dry-run")
            == "bakery-bread: would be put, cron 0 4 * * *, zone UTC, bakery.bake to celery"
        )
        assert json.loads(import_bakery("--dry-run", "--json"))["name"] == "bakery-bread"
        with pytest.raises(NotFound):
            ball.schedules.get("bakery-bread")
        assert import_bakery() == "bakery-bread: put"
        assert ball.schedules.get("bakery-bread").rule == {"cron": "0 4 * * *", "zone": "UTC"}
        assert import_bakery() == "nothing has changed"
        bakery.write_text(PROGRAM.replace('"bread"', '"cake"'))
        assert import_bakery("--json") == '{"put":["bakery-cake"],"deleted":["bakery-bread"]}'


@pytest.mark.parametrize(
    ("app", "reason"), [("nowhere:app", "name the app as for `celery -A`"), ("bakery", "entry 'bread'")]
)
def test_a_missing_app_and_an_entry_that_is_too_frequent_are_refused(
    bakery: Path, app: str, reason: str
) -> None:
    # An interval of 0.1 s is shorter than any that the broker accepts.
    bakery.write_text(PROGRAM.replace("crontab(minute=0, hour=4)", "0.1"))
    result = run_here("schedules", "import", "celery-beat", app)
    assert result.returncode == 2 and reason in result.stderr and "Traceback" not in result.stderr


def test_an_app_whose_import_fails_is_refused_with_the_error(bakery: Path) -> None:
    bakery.write_text('import os\n\nos.environ["SHOP_DATABASE"]\n')
    result = run_here("schedules", "import", "celery-beat", "bakery")
    assert result.returncode == 2 and "fault in Timeball" not in result.stderr
    assert "its import failed: KeyError: 'SHOP_DATABASE'" in result.stderr


# ---- schedules of a crontab -----------------------------------------------------------------------------------

SYSTEM_CRONTAB = """# Jobs of the machine.
SHELL=/bin/sh
17 * * * * root cd / && run-parts --report /etc/cron.hourly
CRON_TZ=Asia/Tokyo
30 2 * * 1-5 backup /usr/bin/backup-all --quiet
@reboot root /usr/sbin/start-it
"""
USER_CRONTAB = "*/5 * * * * /usr/bin/poll\n"


@pytest.fixture(scope="module")
def http_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The HTTP address of a broker without schedules."""
    with running_node(tmp_path_factory.mktemp("crontab") / "data") as node:
        yield node.http_endpoint


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A file in a folder cron.d, whose commands stand behind a user."""
    file = tmp_path / "cron.d" / "jobs"
    file.parent.mkdir()
    file.write_text(SYSTEM_CRONTAB)
    return file


def test_a_system_crontab_is_imported_once_and_its_refused_entry_is_named(
    http_endpoint: str, system: Path
) -> None:
    options = [str(system), "--topic", "commands", "--zone", "Europe/Berlin", "--endpoint", http_endpoint]

    def import_crontab(*more: str) -> tuple[int, str, str]:
        result = run_here("schedules", "import", "crontab", *options, *more)
        return result.returncode, result.stdout, result.stderr

    def stored_schedules() -> list[dict[str, object]]:
        result = run_here("schedules", "list", "--json", "--endpoint", http_endpoint)
        return [json.loads(line) for line in result.stdout.splitlines()]

    # A name ends with the beginning of a hash of the command.
    code, output, note = import_crontab("--dry-run")
    assert (code, stored_schedules()) == (1, []) and "2 would be put, 1 refused" in note
    assert output.splitlines()[:2] == [
        "cron-hourly-0d0bc6: would be put, 17 * * * * in Europe/Berlin",
        "backup-all-499fc4: would be put, 30 2 * * 1-5 in Asia/Tokyo",
    ]
    assert output.splitlines()[2].startswith("start-it-fe7bd3: refused (line 6: cron='@reboot': ")
    code, _, note = import_crontab()
    assert code == 1 and "2 created, 1 refused" in note
    backup, hourly = stored_schedules()
    assert (backup["name"], backup["topic"], backup["body"]) == (
        "backup-all-499fc4",
        "commands",
        "/usr/bin/backup-all --quiet",
    )
    assert backup["properties"] == {"crontab_user": "backup"}
    assert hourly["rule"] == {"cron": "17 * * * *", "zone": "Europe/Berlin"}
    # A second import changes nothing.
    assert "2 unchanged, 1 refused" in import_crontab()[2]
    assert len(stored_schedules()) == 2


def test_a_crontab_of_a_user_is_imported(http_endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(USER_CRONTAB)
    result = run_here(
        "schedules", "import", "crontab", str(file), "--topic", "mine", "--zone", "UTC", "--prefix", "web-", "--json",
        "--endpoint", http_endpoint,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "name": "web-poll-2aae42", "outcome": "created", "rule": {"cron": "*/5 * * * *", "zone": "UTC"},
        "body": "/usr/bin/poll", "user": None, "note": None,
    }  # fmt: skip


@pytest.mark.parametrize(("file", "zone", "named"), [("none", "UTC", "none"), ("mine", "CEST", "CEST")])
def test_a_missing_file_and_an_unknown_zone_are_refused(
    http_endpoint: str, tmp_path: Path, file: str, zone: str, named: str
) -> None:
    (tmp_path / "mine").write_text(USER_CRONTAB)
    result = run_here(
        "schedules", "import", "crontab", str(tmp_path / file), "--topic", "mine", "--zone", zone, "--endpoint",
        http_endpoint,
    )  # fmt: skip
    assert result.returncode == 2 and named in result.stderr and "Traceback" not in result.stderr
