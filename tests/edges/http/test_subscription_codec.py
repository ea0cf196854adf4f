"""Subscriptions as JSON: requests and answers."""

from __future__ import annotations

import msgspec
import pytest
from tests.broker.registry.test_push_subscriptions import subscription

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.edges.http.subscription_codec import Subscribing, show_subscription
from timeball.io.clock import ManualClock
from timeball.model.errors import InvalidDelay
from timeball.monitoring.figures import PushFigures


def test_a_shown_subscription_is_a_valid_request_for_the_same() -> None:
    asked = Subscribing(topic="t", group="g", url="u", filter="a", rate_per_s=1.5, timeout="PT20S")
    stored = asked.to_subscription()
    assert stored == PushSubscription(
        topic="t", group="g", url="u", filter="a", rate_per_s=1.5, timeout_ms=20_000
    )
    fields = msgspec.to_builtins(show_subscription("a", stored, None))
    again = {name: value for name, value in fields.items() if name in Subscribing.__struct_fields__}
    assert msgspec.convert(again, Subscribing).to_subscription() == stored


def test_an_invalid_timeout_is_refused() -> None:
    with pytest.raises(InvalidDelay):
        Subscribing(topic="t", group="g", url="u", timeout="soon").to_subscription()


def test_the_state_depends_on_the_subscription_and_its_receiver() -> None:
    figures = PushFigures(ManualClock())
    assert show_subscription("a", subscription(), figures).state == "delivering"
    figures.is_held, figures.failures, figures.last_failure = True, 12, "timeout: no answer in time"
    shown = show_subscription("a", subscription(), figures)
    assert (shown.state, shown.failures_in_row, shown.last_failure) == (
        "failing",
        12,
        "timeout: no answer in time",
    )
    assert show_subscription("a", subscription(paused=True), figures).state == "paused"
    assert show_subscription("a", subscription(paused=True, paused_by="receiver"), figures).state == "gone"


def test_the_secret_is_only_shown_when_it_was_created() -> None:
    assert b"secret" not in msgspec.json.encode(show_subscription("a", subscription(), None))
    assert b'"secret":"whsec_x"' in msgspec.json.encode(
        show_subscription("a", subscription(), None, "whsec_x")
    )
