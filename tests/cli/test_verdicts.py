"""Each verdict has its sentence, and only those that a command wanted leave with 0."""

from __future__ import annotations

import json

import pytest
import typer

from timeball.cli.messages import SENTENCES, report_ends, sentence
from timeball.cli.output import ExitCode
from timeball.model.wire import VERDICTS, Verdict


def test_each_verdict_has_a_sentence() -> None:
    said = VERDICTS
    assert SENTENCES.keys() == set(said)
    assert len({sentence(Verdict("x", verdict, 1, 0, 5)) for verdict in said}) == len(said)
    assert sentence(Verdict("x", "rescheduled", 1, 0, 5)).endswith("due 1970-01-01T00:00:00.005Z")
    assert sentence(Verdict("x", "released", 1, None)).endswith("released at an unknown time")


def test_one_that_is_not_fine_fails_the_command_behind_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [
        Verdict("a", "cancelled", 1, 5),
        Verdict("b", "expired", 2, None),
        Verdict("c", "cancelled", 3, 5),
    ]
    with pytest.raises(typer.Exit) as left:
        report_ends(verdicts, success_verdicts={"cancelled"}, as_json=True)
    assert left.value.exit_code == ExitCode.CHECK_FAILED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["verdict"] for line in lines] == ["cancelled", "expired", "cancelled"]
    report_ends(verdicts, success_verdicts={"cancelled", "expired"}, as_json=False)
    assert capsys.readouterr().out.splitlines()[0] == "a: cancelled"
