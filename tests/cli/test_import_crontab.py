"""`timeball schedules import crontab`: each entry becomes a schedule, and a refused one is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import running_node

SYSTEM = """# Jobs of the machine.
SHELL=/bin/sh
17 * * * * root cd / && run-parts --report /etc/cron.hourly
CRON_TZ=Asia/Tokyo
30 2 * * 1-5 backup /usr/bin/backup-all --quiet
@reboot root /usr/sbin/start-it
"""
USERS = "*/5 * * * * /usr/bin/poll\n"


@pytest.fixture(scope="module")
def http_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_node(tmp_path_factory.mktemp("crontab") / "data") as node:
        yield node.http_endpoint


@pytest.fixture
def system(tmp_path: Path) -> Path:
    file = tmp_path / "cron.d" / "jobs"
    file.parent.mkdir()
    file.write_text(SYSTEM)
    return file


def test_a_system_crontab_is_imported(http_endpoint: str, system: Path) -> None:
    options = [str(system), "--topic", "commands", "--zone", "Europe/Berlin", "--endpoint", http_endpoint]

    def imported(*more: str) -> tuple[int, str, str]:
        ended = run_here("schedules", "import", "crontab", *options, *more)
        return ended.returncode, ended.stdout, ended.stderr

    def known() -> list[dict[str, object]]:
        ended = run_here("schedules", "list", "--json", "--endpoint", http_endpoint)
        return [json.loads(line) for line in ended.stdout.splitlines()]

    code, shown, note = imported("--dry-run")
    assert (code, known()) == (1, []) and "2 would be put, 1 refused" in note
    assert shown.splitlines()[:2] == [
        "cron-hourly-0d0bc6: would be put, 17 * * * * in Europe/Berlin",
        "backup-all-499fc4: would be put, 30 2 * * 1-5 in Asia/Tokyo",
    ]
    assert shown.splitlines()[2].startswith("start-it-fe7bd3: refused (line 6: cron='@reboot': ")
    code, _, note = imported()
    assert code == 1 and "2 created, 1 refused" in note
    backup, hourly = known()
    assert (backup["name"], backup["topic"], backup["body"]) == (
        "backup-all-499fc4",
        "commands",
        "/usr/bin/backup-all --quiet",
    )
    assert backup["properties"] == {"crontab_user": "backup"}
    assert hourly["rule"] == {"cron": "17 * * * *", "zone": "Europe/Berlin"}
    # Repeated, it changes nothing.
    assert "2 unchanged, 1 refused" in imported()[2]
    assert len(known()) == 2


def test_a_crontab_of_a_user_is_imported(http_endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(USERS)
    ended = run_here(
        "schedules", "import", "crontab", str(file), "--topic", "mine", "--zone", "UTC", "--prefix", "web-", "--json",
        "--endpoint", http_endpoint,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "name": "web-poll-2aae42", "outcome": "created", "rule": {"cron": "*/5 * * * *", "zone": "UTC"},
        "body": "/usr/bin/poll", "user": None, "note": None,
    }  # fmt: skip


@pytest.mark.parametrize(("file", "zone", "named"), [("none", "UTC", "none"), ("mine", "CEST", "CEST")])
def test_a_file_or_a_zone_that_is_not_there_is_refused(
    http_endpoint: str, tmp_path: Path, file: str, zone: str, named: str
) -> None:
    (tmp_path / "mine").write_text(USERS)
    ended = run_here(
        "schedules", "import", "crontab", str(tmp_path / file), "--topic", "mine", "--zone", zone, "--endpoint",
        http_endpoint,
    )  # fmt: skip
    assert ended.returncode == 2 and named in ended.stderr and "Traceback" not in ended.stderr
