"""Receipts, and the outcomes of a `send_many`."""

import pytest

from timeball import InvalidMessage, RequestError, Unavailable
from timeball.client.attempts import Lost, refusal
from timeball.client.receipts import AcceptedRows, Outcomes, Receipt, SendKeys, build_receipt, spans
from timeball.model.answers import SendAck, SentState


def test_a_receipt_has_the_due_time_and_the_state_of_its_message() -> None:
    def receipt_of(ack: SendAck, due_ms: int | None = None, past_ms: int = 0) -> Receipt:
        return build_receipt("a", ack, due_ms, past_ms)

    now_ms = 1_800_000_000_000
    ack = SendAck(5, 1, now_ms)
    assert receipt_of(ack) == Receipt("a", 5, None, now_ms, "created", "visible")
    assert receipt_of(ack, now_ms + 5_000) == Receipt("a", 5, now_ms + 5_000, now_ms, "created", "waiting")
    assert receipt_of(ack, now_ms - 3, 3) == Receipt("a", 5, now_ms - 3, now_ms, "created", "visible", 3)
    existing = SendAck(5, 1, now_ms, "exists", [SentState("cancelled", 9)])
    assert receipt_of(existing, now_ms + 5_000) == Receipt("a", 5, 9, now_ms, "exists", "cancelled")


def test_adjacent_ranges_of_rows_are_joined_and_only_ten_are_listed() -> None:
    assert spans([AcceptedRows(5, 1, 0), AcceptedRows(0, 2, 0), AcceptedRows(2, 2, 0)]) == "rows 0 to 3, 5"
    assert spans([AcceptedRows(2 * number, 1, 0) for number in range(12)]).endswith(
        "2 more spans, which the error's summary lists"
    )


def test_a_refusal_ends_a_call_unless_refusals_are_collected() -> None:
    with pytest.raises(InvalidMessage, match="rows 0 to 1: x"):
        Outcomes(collect=False).fail(0, 2, InvalidMessage("x"))
    outcomes = Outcomes(collect=True)
    outcomes.add_rows(4)
    outcomes.fail(0, 2, InvalidMessage("x"))
    with pytest.raises(Unavailable):
        outcomes.fail(2, 1, Unavailable("x"))
    outcomes.fail(3, 1, Lost("x"), is_last=True)
    error = outcomes.error(Unavailable("why"), ["a"] * 4)
    assert "no row is known to be accepted; may or may not be accepted: rows 2 to 3" in str(error)
    assert [batch.first_row for batch in error.summary.refused] == [0] and error.summary.rows == 4


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ("unavailable", True),
        ("over_limit", True),
        ("forbidden", True),
        ("invalid_message", True),
        ("not_leader", False),
        ("disk_failed", False),
        ("answer_lost", False),
        ("error", False),
    ],
)
def test_rows_are_refused_only_if_the_broker_has_none_of_them(code: str, is_refused: bool) -> None:
    """A disk may fail, and a node lose its lead, after the rows were written."""
    outcomes = Outcomes(collect=True)
    outcomes.fail(0, 1, refusal(code, "x"), is_last=True)
    summary = outcomes.summary(["a"])
    assert (len(summary.refused), len(summary.unknown)) == ((1, 0) if is_refused else (0, 1))


def test_all_idempotency_keys_of_a_call_have_the_same_attempt() -> None:
    assert SendKeys("keep", is_used=False).key_for("t", "a") is None
    keys = SendKeys("send", is_used=True)
    first, second = keys.key_for("t", "a"), keys.key_for("t", "b")
    assert first is not None and second is not None
    assert (first.idempotency_key, first.if_settled) == ("t/a", "send") and first.attempt == second.attempt


def test_if_settled_is_refused_without_keys_or_with_an_unknown_value() -> None:
    for wrong, is_used in (("send", False), ("never", True)):
        with pytest.raises(RequestError, match="if_settled"):
            SendKeys(wrong, is_used=is_used)  # type: ignore[arg-type]
