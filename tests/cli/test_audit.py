"""`timeball audit`: the verdict as lines, as JSON and as an exit code. Its reckoning: tests/spark/jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.cli.in_process import run_here
from tests.cli.unreachable import NOWHERE, assert_says_how_to_reach_one
from tests.node_fixture import eventually, running_node

from timeball import Timeball
from timeball.cli.audit import OFFENDERS_SHOWN, describe

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from timeball.spark.jobs.audit import AuditReport, Scope, add_up
from timeball.spark.table_store import sibling

SCOPE = Scope(since=1, first=1, end=9_000, ledger_end=50, watermark=20, version=3, now_ms=10_000)
COUNTS = {"accepted": 5_000, "released": 4_000, "cancelled": 700, "expired": 0, "pending": 300}
NO_BREACH = dict.fromkeys(("lost", "early", "duplicate", "unknown", "overdue", "queue_gaps"), 0)
EQUATION = "accepted 5,000 = released 4,000 + cancelled 700 + expired 0 + pending 300"


def report(ok: bool, offenders: dict[str, list[dict[str, Any]]]) -> AuditReport:
    return AuditReport(ok=ok, scope=SCOPE, **COUNTS, **NO_BREACH, offenders=offenders)


def test_a_balance_is_two_lines() -> None:
    assert list(describe(report(True, {}))) == [EQUATION, "it balances"]


def test_counts_of_groups_are_shown_separately_and_added_up() -> None:
    lost = {"lost": [{"seq": 7}]}
    both = add_up({"g1": report(True, {}), "g2": report(False, lost)})
    assert not both.ok and both.accepted == 10_000 and both.scope is None
    assert list(describe(both)) == [
        f"group g1: {EQUATION}",
        f"group g2: {EQUATION}, IT DOES NOT BALANCE",
        "all groups: accepted 10,000 = released 8,000 + cancelled 1,400 + expired 0 + pending 600",
        "lost: 1, for example",
        "  group g2, seq 7",
        "IT DOES NOT BALANCE",
    ]


def test_a_breach_names_some_of_its_scheduled_messages_and_the_verdict_comes_last() -> None:
    """Without what is not known of them; a hundred are all that the report has, so there may be more."""
    lost = [{"seq": seq, "due_ms": None, "early": False, "unique_key": f"u{seq}"} for seq in range(100)]
    early = [{"seq": 7, "due_ms": 0, "early": True, "unique_key": None}]
    equation, *lines, verdict = describe(report(False, {"lost": lost, "early": early}))
    assert (equation, verdict) == (EQUATION, "IT DOES NOT BALANCE")
    assert lines[0] == "lost: 100 or more, for example"
    assert lines[1 : OFFENDERS_SHOWN + 1] == [f"  seq {n}, unique_key u{n}" for n in range(OFFENDERS_SHOWN)]
    assert lines[OFFENDERS_SHOWN + 1 :] == ["early: 1, for example", "  seq 7, due_ms 0, early True"]


def test_no_broker_is_told_without_waiting_for_spark() -> None:
    """A master that cannot be reached is never asked."""
    assert_says_how_to_reach_one(run_here("audit", "--master", "spark://127.0.0.1:1", "--endpoint", NOWHERE))


def test_help_names_the_exit_code_of_a_breach() -> None:
    shown = run_here("audit", "--help")
    assert shown.returncode == 0
    assert "timeball audit --json | jq .ok" in shown.stdout and "Exit code 1" in shown.stdout


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_books_that_balance_and_books_that_were_tampered_with(tmp_path: Path) -> None:
    """Exit code 0, and 1 when the ledger forgets what it had accepted; one Java for four commands."""
    with (
        running_node(tmp_path / "data", compact_rows=0) as node,
        Timeball(node.endpoint) as ball,
    ):
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": 1, "unique_key": f"m{n}"} for n in range(5)])
        kept = [ball.send("t", b"y", after="1d").id for _ in range(3)]
        ball.cancel(id=kept[0])
        eventually(lambda: len(ball.browse("t", "all", wait="10s")) == 5, "five messages released")
        equation = "accepted 8 = released 5 + cancelled 1 + expired 0 + pending 2"
        fresh = run_here("audit", "--endpoint", node.endpoint)  # no ledger: what is in the log is enough
        assert (fresh.returncode, fresh.stdout.splitlines()) == (0, [equation, "it balances"]), fresh.stderr
        assert kept_audit(tmp_path)["accepted"] == 8
        wrote = run_here("pipeline", "run", "ledger", "--once", "--endpoint", node.endpoint)
        assert (wrote.returncode, wrote.stdout) == (0, ""), wrote.stderr
        uri = sibling(ball.status()["table"]["uri"], "ledger")
        good = run_here("audit", "--endpoint", node.endpoint, "--ledger", uri)
        assert (good.returncode, good.stdout.splitlines()) == (0, [equation, "it balances"]), good.stderr
        DeltaTable(uri).delete("event = 'accepted' AND unique_key = 'm3'")
        bad = run_here("audit", "--json", "--endpoint", node.endpoint)
        assert bad.returncode == 1, bad.stderr
        [document] = [json.loads(line) for line in bad.stdout.splitlines()]
        assert (document["ok"], document["unknown"]) == (False, 1)
        assert [offender["unique_key"] for offender in document["offenders"]["unknown"]] == ["m3"]
        assert kept_audit(tmp_path)["ok"] is False


def kept_audit(folder: Path) -> dict[str, Any]:
    """Return what the last audit has left beside the pending table, for the broker to show."""
    found: dict[str, Any] = json.loads((folder / "data" / "pipeline" / "audit.json").read_text())
    assert found.pop("offenders") == {}
    return found
