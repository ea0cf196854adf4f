"""Reports of jobs are returned as written. Files that are no reports are left out."""

from __future__ import annotations

import pytest
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.admin import administration
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Forbidden


@on_node()
async def test_reports_of_jobs_and_audit_are_returned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, files = world.broker.job_reports, world.broker.files
    assert await reports.all(ANONYMOUS) == ([], None)
    files.make_dir("pipeline")
    files.make_dir("pipeline/status")
    files.replace("pipeline/status/compact.json", b'{"job": "compact", "state": "running"}')
    files.replace("pipeline/status/half.json", b'{"job": ')
    files.replace("pipeline/status/list.json", b"[]")
    files.replace("pipeline/status/ledger.json.new", b"{}")
    files.replace("pipeline/audit.json", b'{"ok": true}')
    assert await reports.all(ANONYMOUS) == ([{"job": "compact", "state": "running"}], {"ok": True})
    with pytest.raises(Forbidden):
        await reports.all(principal())
    monkeypatch.setattr(administration, "FILE_BYTES_MAX", 1)
    assert await reports.all(ANONYMOUS) == ([], None)
