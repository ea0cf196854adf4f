"""Push subscriptions as rows: kept through a start, bounded, and their secrets with them."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.push_subscriptions import (
    OVERLAP_MS,
    SECRET_BYTES,
    PushSubscription,
    PushSubscriptions,
    secret_text,
)
from timeball.model import limits
from timeball.model.errors import InvalidName, NotFound, OutOfRange, OverLimit


def subscription(**fields: Any) -> PushSubscription:
    return PushSubscription(**{"topic": "orders", "group": "hooks", "url": "https://a.example/", **fields})


def test_one_is_kept_with_its_secret() -> None:
    log = StateRows()
    made = log.opened(PushSubscriptions).put("a", subscription(rate_per_s=2.5), now_ms=0)
    assert made is not None and len(made) == SECRET_BYTES
    again = log.opened(PushSubscriptions)
    assert again.all() == {"a": subscription(rate_per_s=2.5)}
    assert again.secrets("a", 0) == [made]
    assert again.put("a", subscription(in_flight_max=3), now_ms=0) is None
    assert log.opened(PushSubscriptions).secrets("a", 0) == [made]


def test_what_has_not_changed_is_no_row() -> None:
    log = StateRows()
    kept = log.opened(PushSubscriptions)
    kept.put("a", subscription(), now_ms=0)
    count = log.count
    kept.put("a", subscription(), now_ms=0)
    assert log.count == count


def test_a_secret_that_was_replaced_signs_beside_the_new_one_for_a_day() -> None:
    log = StateRows()
    kept = log.opened(PushSubscriptions)
    first = kept.put("a", subscription(), now_ms=1_000)
    second = kept.put("a", subscription(), now_ms=5_000, rotates=True)
    assert second not in (None, first)
    kept = log.opened(PushSubscriptions)
    assert kept.secrets("a", 5_000 + OVERLAP_MS - 1) == [second, first]
    assert kept.secrets("a", 5_000 + OVERLAP_MS) == [second]


def test_one_that_is_removed_leaves_nothing_and_its_successor_has_another_secret() -> None:
    log = StateRows()
    kept = log.opened(PushSubscriptions)
    before = kept.put("a", subscription(), now_ms=0)
    kept.remove("a")
    kept = log.opened(PushSubscriptions)
    assert kept.find("a") is None
    for call in (kept.get, kept.remove):
        with pytest.raises(NotFound):
            call("a")
    assert kept.put("a", subscription(), now_ms=0) != before


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (InvalidName, {"topic": "a/b"}), (InvalidName, {"group": ""}), (OutOfRange, {"in_flight_max": 0}),
        (OutOfRange, {"in_flight_max": limits.PUSH_IN_FLIGHT_MAX + 1}), (OutOfRange, {"timeout_ms": 999}),
        (OutOfRange, {"timeout_ms": limits.PUSH_TIMEOUT_MS_MAX + 1}), (OutOfRange, {"rate_per_s": 0.0}),
        (OutOfRange, {"rate_per_s": float("nan")}), (OutOfRange, {"rate_per_s": float("inf")}),
    ],
)  # fmt: skip
def test_what_no_subscription_may_have(error: type[Exception], wrong: dict[str, Any]) -> None:
    log = StateRows()
    with pytest.raises(error):
        log.opened(PushSubscriptions).put("a", subscription(**wrong), now_ms=0)
    assert log.count == 0


def test_a_name_is_as_a_group_s() -> None:
    with pytest.raises(InvalidName):
        StateRows().opened(PushSubscriptions).put("a/b", subscription(), now_ms=0)


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PUSH_SUBSCRIPTIONS_MAX", 2)
    kept = StateRows().opened(PushSubscriptions)
    kept.put("a", subscription(), now_ms=0)
    kept.put("b", subscription(), now_ms=0)
    with pytest.raises(OverLimit):
        kept.put("c", subscription(), now_ms=0)
    kept.put("b", subscription(in_flight_max=2), now_ms=0)
    kept.remove("a")
    kept.put("c", subscription(), now_ms=0)


def test_a_secret_as_receivers_are_given_it() -> None:
    text = secret_text(b"x" * 32)
    assert text.startswith("whsec_") and base64.b64decode(text.removeprefix("whsec_")) == b"x" * 32
