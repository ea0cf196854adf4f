"""Push subscriptions as rows: they survive a restart with their secrets, and their number is limited."""

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


def test_a_subscription_and_its_secret_survive_a_restart() -> None:
    log = StateRows()
    secret = log.opened(PushSubscriptions).put("a", subscription(rate_per_s=2.5), now_ms=0)
    assert secret is not None and len(secret) == SECRET_BYTES
    restored = log.opened(PushSubscriptions)
    assert restored.all() == {"a": subscription(rate_per_s=2.5)}
    assert restored.secrets("a", 0) == [secret]
    assert restored.put("a", subscription(in_flight_max=3), now_ms=0) is None, "it keeps its secret"
    assert log.opened(PushSubscriptions).secrets("a", 0) == [secret]


def test_an_unchanged_subscription_appends_no_row() -> None:
    log = StateRows()
    kept = log.opened(PushSubscriptions)
    kept.put("a", subscription(), now_ms=0)
    count = log.count
    kept.put("a", subscription(), now_ms=0)
    assert log.count == count


def test_after_a_rotation_the_old_secret_signs_for_another_day() -> None:
    log = StateRows()
    kept = log.opened(PushSubscriptions)
    first = kept.put("a", subscription(), now_ms=1_000)
    second = kept.put("a", subscription(), now_ms=5_000, rotates=True)
    assert second not in (None, first)
    kept = log.opened(PushSubscriptions)
    assert kept.secrets("a", 5_000 + OVERLAP_MS - 1) == [second, first]
    assert kept.secrets("a", 5_000 + OVERLAP_MS) == [second]


def test_a_removed_subscription_is_forgotten_and_a_new_one_gets_another_secret() -> None:
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
def test_an_invalid_field_is_refused_and_appends_no_row(
    error: type[Exception], wrong: dict[str, Any]
) -> None:
    log = StateRows()
    with pytest.raises(error):
        log.opened(PushSubscriptions).put("a", subscription(**wrong), now_ms=0)
    assert log.count == 0


def test_a_name_that_is_no_group_name_is_refused() -> None:
    with pytest.raises(InvalidName):
        StateRows().opened(PushSubscriptions).put("a/b", subscription(), now_ms=0)


def test_at_the_limit_a_new_subscription_is_refused_until_one_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PUSH_SUBSCRIPTIONS_MAX", 2)
    kept = StateRows().opened(PushSubscriptions)
    kept.put("a", subscription(), now_ms=0)
    kept.put("b", subscription(), now_ms=0)
    with pytest.raises(OverLimit):
        kept.put("c", subscription(), now_ms=0)
    kept.put("b", subscription(in_flight_max=2), now_ms=0)
    kept.remove("a")
    kept.put("c", subscription(), now_ms=0)


def test_a_secret_is_shown_as_prefixed_base64() -> None:
    text = secret_text(b"x" * 32)
    assert text.startswith("whsec_") and base64.b64decode(text.removeprefix("whsec_")) == b"x" * 32
