"""`timeball schedules import celery-beat`: what it prints and puts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.in_process import run_here

from timeball import NotFound
from timeball.testing import TestBroker

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


def test_entries_are_shown_and_put(bakery: Path) -> None:
    with TestBroker() as broker, broker.client() as ball:

        def said(*arguments: str) -> str:
            sys.modules.pop("bakery", None)
            words = ("schedules", "import", "celery-beat", "bakery", *arguments)
            ended = run_here(*words, "--endpoint", broker.endpoint)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout.strip()

        assert (
            said("--dry-run") == "bakery-bread: would be put, cron 0 4 * * *, zone UTC, bakery.bake to celery"
        )
        assert json.loads(said("--dry-run", "--json"))["name"] == "bakery-bread"
        with pytest.raises(NotFound):
            ball.schedules.get("bakery-bread")
        assert said() == "bakery-bread: put"
        assert ball.schedules.get("bakery-bread").rule == {"cron": "0 4 * * *", "zone": "UTC"}
        assert said() == "nothing has changed"
        bakery.write_text(PROGRAM.replace('"bread"', '"cake"'))
        assert said("--json") == '{"put":["bakery-cake"],"deleted":["bakery-bread"]}'


def test_an_app_that_is_not_there_and_entries_that_are_refused(bakery: Path) -> None:
    for app, reason in (("nowhere:app", "name the app as for `celery -A`"), ("bakery", "entry 'bread'")):
        bakery.write_text(PROGRAM.replace("crontab(minute=0, hour=4)", "0.1"))
        ended = run_here("schedules", "import", "celery-beat", app)
        assert ended.returncode == 2 and reason in ended.stderr and "Traceback" not in ended.stderr


def test_an_app_whose_import_fails(bakery: Path) -> None:
    bakery.write_text('import os\n\nos.environ["SHOP_DATABASE"]\n')
    ended = run_here("schedules", "import", "celery-beat", "bakery")
    assert ended.returncode == 2 and "fault in Timeball" not in ended.stderr
    assert "its import failed: KeyError: 'SHOP_DATABASE'" in ended.stderr
