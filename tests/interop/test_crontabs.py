"""The crontabs of real packages of Debian: each entry becomes a schedule, or is refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.interop.debian_packages import names, package
from tests.interop.environments import Missing
from tests.node_fixture import running_node

pytestmark = pytest.mark.interop

# By file and by the times of a rule: the program after which the schedule is named.
SCHEDULES = {
    "crontab": {
        "17 * * * *": "cron-hourly",
        "25 6 * * *": "anacron",
        "47 6 * * 7": "anacron",
        "52 6 1 * *": "anacron",
    },
    "mdadm": {"57 0 * * 0": "checkarray"},
    "sysstat": {"5-55/10 * * * *": "debian-sa1", "59 23 * * *": "debian-sa1"},
    "certbot": {"0 */12 * * *": "certbot"},
    "e2scrub_all": {"30 3 * * 0": "e2scrub_all_cron", "10 3 * * *": "e2scrub_all"},
    "php": {"09,39 * * * *": "sessionclean"},
    "anacron": {"30 7-23 * * *": "anacron"},
}
HASH = re.compile(r"-[0-9a-f]{6}\Z")  # at the end of a schedule's name
REFUSED = {"logcheck"}  # of its two entries, the one with `@reboot` is refused


def crontabs() -> list[Path]:
    """Return the files of all packages with a crontab. Skip the test if a package is Missing."""
    try:
        folders = [package(name) / "etc" for name in names()]
    except Missing as missing:
        pytest.skip(str(missing))
    return sorted(file for each in folders for file in [*each.glob("crontab"), *each.glob("cron.d/[a-z]*")])


def test_crontabs_of_packages_are_imported_except_reboot_entries(tmp_path: Path) -> None:
    schedules: dict[str, dict[str, str]] = {}
    with running_node(tmp_path / "data", http_port=0) as node:
        for file in crontabs():
            ended = run_here(
                "schedules", "import", "crontab", str(file), "--topic", "commands", "--zone", "Europe/Berlin",
                "--system", "--prefix", f"{file.name}-", "--json", "--endpoint", node.http_endpoint,
            )  # fmt: skip
            lines = [json.loads(line) for line in ended.stdout.splitlines()]
            assert {line["outcome"] for line in lines if line["rule"]} <= {"created"}, ended.stderr
            # All refused entries are those with @reboot.
            refused = [line for line in lines if line["outcome"] == "refused"]
            assert all("@reboot" in line["note"] for line in refused)
            assert ended.returncode == (1 if refused else 0) and bool(refused) == (file.name in REFUSED)
            assert all(line["user"] and line["body"] for line in lines)
            assert len({line["name"] for line in lines}) == len(lines)
            schedules[file.name] = {
                line["rule"]["cron"]: HASH.sub("", line["name"]).removeprefix(f"{file.name}-")
                for line in lines
                if line["rule"]
            }
    assert {name: schedules.get(name) for name in SCHEDULES} == SCHEDULES
    assert schedules.keys() >= SCHEDULES.keys() | REFUSED
