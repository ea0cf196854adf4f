"""The client's records decode what the broker's codec encodes, field by field."""

import msgspec

from timeball.broker.revoking.cancel import Verdict as BrokerVerdict
from timeball.client import answers
from timeball.protocols.flight import codec
from timeball.table.attachment import Attached


def test_both_sides_have_the_same_fields() -> None:
    pairs = [
        (answers.SendAck, codec.SendAck),
        (answers.Verdict, BrokerVerdict),
        (answers.Attached, Attached),
    ]
    for ours, theirs in pairs:
        assert ours.__struct_fields__ == theirs.__struct_fields__


def test_verdicts() -> None:
    made = codec.encode([BrokerVerdict("a", "cancelled", 5, 7), BrokerVerdict("b", "not_found")])
    cancelled, missing = msgspec.json.decode(made, type=list[answers.Verdict])
    assert cancelled == answers.Verdict("a", "cancelled", 5, 7) and cancelled.cancelled
    assert missing == answers.Verdict("b", "not_found", None, None) and not missing.cancelled
