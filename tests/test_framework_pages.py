"""The programs of docs/django.md, docs/dramatiq.md and docs/coming-from.md run unchanged."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
import dramatiq
import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import environment
from tests.docs_pages import page
from tests.node_fixture import eventually

from timeball import Timeball, Worker
from timeball.testing import TestBroker

ENDPOINT = "http://127.0.0.1:7480"


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    """Run a broker for tests."""
    with TestBroker() as broker:
        yield broker


def write_programs(name: str, folder: Path, endpoint: str) -> None:
    """Write the titled programs of a page to a folder, with the broker's address."""
    programs = re.findall(r'^```python title="([\w./]+)"\n(.*?)^```', page(name), re.M | re.S)
    assert programs
    for title, code in programs:
        path = folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code.replace(ENDPOINT, endpoint))


def load(folder: Path, name: str) -> Any:
    """Import a program under its name. Each test has programs of other names, so they need not be removed."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- Django -------------------------------------------------------------------------------------------------

SETTINGS = """
SECRET_KEY = "of the tests"
INSTALLED_APPS = ["shop"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}

"""
# The steps of the page in a project, and the effect of a relay that has ended between its send and its delete.
WALK = """
import json
from datetime import timedelta

import django
from django.core.management import call_command
from django.utils import timezone

django.setup()
call_command("check", fail_level="WARNING")
call_command("migrate", run_syncdb=True, verbosity=0)

from shop import cancelling, ordering, views
from shop.models import Order, Reminder

placed = views.place(None, 17).content.decode()
cancelled = views.place(None, 18).content.decode()
verdict = cancelling.cancel(cancelled)
ordering.place(19, timezone.now() + timedelta(days=40))
(row,) = Reminder.objects.all()
call_command("relay")
assert not Reminder.objects.exists()
Reminder.objects.create(id=row.id, number=row.number, run_after=row.run_after)
call_command("relay")
print(json.dumps({"placed": placed, "verdict": verdict, "relayed": str(row.id)}))
"""


def test_the_programs_of_the_django_page_run(broker: TestBroker, tmp_path: Path) -> None:
    write_programs("docs/django.md", tmp_path, broker.endpoint)
    for folder in ("shop", "shop/management", "shop/management/commands"):
        (tmp_path / folder / "__init__.py").touch()
    settings = SETTINGS + (tmp_path / "settings.py").read_text()
    if django.VERSION < (6,):  # as on the page
        settings += '\nINSTALLED_APPS += ["django_tasks"]\n'
        for path in (tmp_path / "shop").rglob("*.py"):
            path.write_text(path.read_text().replace("django.tasks", "django_tasks"))
    (tmp_path / "settings.py").write_text(settings)
    (tmp_path / "walk.py").write_text(WALK)
    variables = {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    walk = subprocess.run(
        [sys.executable, "walk.py"],
        cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert walk.returncode == 0, walk.stderr
    tests = subprocess.run(
        [sys.executable, "-m", "django", "test", "shop"],
        cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert tests.returncode == 0 and "Ran 1 test" in tests.stderr, tests.stderr
    results = json.loads(walk.stdout.splitlines()[-1])
    assert results["verdict"] == "cancelled"
    pending = broker.pending("django-default")
    assert sorted(message.id or "" for message in pending) == sorted([results["placed"], results["relayed"]])

    (commands,) = re.findall(r"^```sh\n(.*?)^```", page("docs/django.md"), re.M | re.S)
    work = commands.splitlines()[-1].replace("python manage.py", f"{sys.executable} -m django").split()
    worker = subprocess.Popen(work, cwd=tmp_path, env=environment(**variables), stdout=subprocess.DEVNULL)
    try:
        broker.clock.advance_to(max(message.due for message in pending))
        with sqlite3.connect(tmp_path / "shop.db") as shop:
            closed = "select number from shop_order where closed order by number"
            eventually(lambda: shop.execute(closed).fetchall() == [(17,), (19,)], "closed after 40 days")
        shop.close()
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(BOUND_S) == 0


# ---- Dramatiq -----------------------------------------------------------------------------------------------


def test_the_programs_of_the_dramatiq_page_run(
    broker: TestBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_programs("docs/dramatiq.md", tmp_path, broker.endpoint)
    (tmp_path / "jobs.py").rename(tmp_path / "dramatiq_jobs.py")
    jobs = load(tmp_path, "dramatiq_jobs")
    monkeypatch.setitem(sys.modules, "jobs", jobs)
    (tmp_path / "shop.py").rename(tmp_path / "dramatiq_shop.py")
    shop = load(tmp_path, "dramatiq_shop")
    shop.place(17)
    assert shop.pay(shop.place(18)) == ["cancelled"]
    worker = dramatiq.Worker(jobs.broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        broker.clock.advance("40d")
        jobs.broker.join("default", timeout=BOUND_S * 1000)
    finally:
        worker.stop()
        jobs.broker.close()
    assert capsys.readouterr().out == "closed 17\n"


# ---- coming from --------------------------------------------------------------------------------------------


def test_the_program_for_users_of_other_tools(
    broker: TestBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_programs("docs/coming-from.md", tmp_path, broker.endpoint)
    (tmp_path / "jobs.py").rename(tmp_path / "own_jobs.py")
    jobs = load(tmp_path, "own_jobs")
    with Timeball(broker.endpoint) as ball:
        assert jobs.examples(ball, broker.clock.now + timedelta(hours=1)) == "cancelled"
        for _ in range(2):  # two processes
            jobs.daily(ball)
        released = broker.clock.advance("40d")
        with Worker(ball, "jobs", "jobs", jobs.run) as worker:
            eventually(lambda: worker.counts.acknowledged == len(released), "handled")
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("remind 5") == 1
    # A change to summer time may add or remove one.
    assert lines.count("remind all") == len(lines) - 1 and 39 <= len(lines) - 1 <= 41
