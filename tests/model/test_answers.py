"""Answers as JSON are read as they were written."""

import msgspec

from timeball.model import answers


def test_an_encoded_verdict_is_decoded_to_an_equal_one() -> None:
    verdict = answers.Verdict("order-17", "cancelled", 3, at_ms=5)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=answers.Verdict) == verdict


def test_only_verdicts_of_a_cancelled_message_are_cancelled() -> None:
    verdict = answers.Verdict("order-17", "cancelled", 3, at_ms=5)
    assert verdict.cancelled and verdict.verdict in answers.VERDICTS
    assert not answers.Verdict("order-17", "released").cancelled
