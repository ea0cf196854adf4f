"""Answers as JSON are read as they were written."""

import msgspec

from timeball.model import answers


def test_an_answer_survives_the_way() -> None:
    verdict = answers.Verdict("order-17", "cancelled", 3, at_ms=5)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=answers.Verdict) == verdict
    assert verdict.cancelled and verdict.verdict in answers.VERDICTS
    assert not answers.Verdict("order-17", "released").cancelled
