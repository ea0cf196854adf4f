"""Subscriptions as JSON: what is asked is what is kept, and what is kept is shown."""

from __future__ import annotations

import msgspec
import pytest
from tests.broker.registry.test_push_subscriptions import subscription

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.edges.http.subscription_codec import Subscribing, subscribed
from timeball.io.clock import ManualClock
from timeball.model.errors import InvalidDelay
from timeball.monitoring.push_figures import PushFigures


def test_what_is_asked_is_what_is_kept_and_may_be_asked_again_as_it_is_shown() -> None:
    asked = Subscribing(topic="t", group="g", url="u", filter="a", rate_per_s=1.5, timeout="PT20S")
    kept = asked.wanted()
    assert kept == PushSubscription(
        topic="t", group="g", url="u", filter="a", rate_per_s=1.5, timeout_ms=20_000
    )
    fields = msgspec.to_builtins(subscribed("a", kept, None))
    again = {name: value for name, value in fields.items() if name in Subscribing.__struct_fields__}
    assert msgspec.convert(again, Subscribing).wanted() == kept


def test_a_timeout_that_is_none() -> None:
    with pytest.raises(InvalidDelay):
        Subscribing(topic="t", group="g", url="u", timeout="soon").wanted()


def test_the_state_is_the_subscription_s_or_its_receiver_s() -> None:
    figures = PushFigures(ManualClock())
    assert subscribed("a", subscription(), figures).state == "delivering"
    figures.is_held, figures.failures, figures.last_failure = True, 12, "timeout: no answer in time"
    shown = subscribed("a", subscription(), figures)
    assert (shown.state, shown.failures_in_row, shown.last_failure) == (
        "failing",
        12,
        "timeout: no answer in time",
    )
    assert subscribed("a", subscription(paused=True), figures).state == "paused"
    assert subscribed("a", subscription(paused=True, paused_by="receiver"), figures).state == "gone"


def test_the_secret_is_shown_when_it_was_made_and_not_as_null_otherwise() -> None:
    assert b"secret" not in msgspec.json.encode(subscribed("a", subscription(), None))
    assert b'"secret":"whsec_x"' in msgspec.json.encode(subscribed("a", subscription(), None, "whsec_x"))
