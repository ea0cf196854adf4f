"""Answers as JSON: decoding gives the encoded value, and wire.py exports all of them."""

import msgspec

from timeball.model import answers, wire

KINDS = {
    name: kind
    for name, kind in vars(answers).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}


def test_wire_has_every_answer() -> None:
    assert len(KINDS) > 10
    for name, kind in KINDS.items():
        assert getattr(wire, name) is kind


def test_an_answer_survives_the_way() -> None:
    verdict = answers.Verdict("order-17", "cancelled", 3, at_ms=5)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=answers.Verdict) == verdict
    assert verdict.cancelled and verdict.verdict in answers.VERDICTS
    assert not answers.Verdict("order-17", "released").cancelled
