"""The paths of push subscriptions: answers, refusals and permissions. tests/edges/push tests the delivery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.accounts import SECRETS, guarded_node
from tests.broker.registry.test_push_subscriptions import subscription
from tests.edges.http.client import Client, client_of

from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.edges.http.handlers.operators import Subscribing, show_subscription
from timeball.io.clock import ManualClock
from timeball.model.errors import InvalidDelay
from timeball.monitoring.figures import PushFigures

PATH = "/v1/subscriptions"
WANTED = {"topic": "orders", "group": "hooks", "url": "https://receiver.example/hook?x=1"}


def put(client: Client, name: str, **fields: Any) -> Any:
    """Put a subscription that has the fields of WANTED, changed by `fields`."""
    return client.ask("PUT", f"{PATH}/{name}", {**WANTED, **fields})


def test_a_subscription_is_created_shown_changed_and_deleted(client: Client) -> None:
    created = put(client, "a", timeout="20s", rate_per_s=2.5, filter="x || y")
    assert created.status == 201 and created.value.pop("secret").startswith("whsec_")
    assert created.value.pop("last_failure", None) in (
        None,
        "topic 'orders' does not exist; its first message makes it",
    )
    assert created.value == {
        "name": "a", **WANTED, "filter": "x || y", "filter_type": "tag", "in_flight_max": 16, "rate_per_s": 2.5,
        "timeout": "20s", "state": "delivering", "in_flight": 0, "delivered": 0, "failed": 0, "failures_in_row": 0,
    }  # fmt: skip
    assert client.ask("POST", f"{PATH}/a/pause").value["state"] == "paused"
    changed = put(client, "a", in_flight_max=3)
    assert changed.status == 200 and "secret" not in changed.value
    assert (changed.value["state"], changed.value["in_flight_max"]) == ("paused", 3)
    assert changed.value["rate_per_s"] is None and changed.value["filter"] == "*"
    rotated = put(client, "a", rotate_secret=True)
    assert rotated.status == 200 and rotated.value["secret"].startswith("whsec_")
    assert client.ask("GET", f"{PATH}/a").value["name"] == "a"
    assert [item["name"] for item in client.ask("GET", PATH).value["subscriptions"]] == ["a"]
    assert client.ask("DELETE", f"{PATH}/a").value == {"name": "a", "verdict": "deleted"}
    assert client.ask("GET", PATH).value == {"subscriptions": []}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume")):
        answer = client.ask(method, f"{PATH}/a{path}")
        assert (answer.status, answer.value["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("invalid_message", {"url": "http://127.0.0.1/"}), ("invalid_message", {"url": "http://169.254.169.254/latest"}),
        ("invalid_message", {"url": "http://2130706433/"}), ("invalid_message", {"url": "http://u:p@a.example/"}),
        ("invalid_message", {"url": "file:///etc/passwd"}), ("invalid_message", {"url": "http://a.example:25/"}),
        ("invalid_message", {"url": 7}), ("invalid_message", {"surprise": 1}),
        ("invalid_message", {"filter_type": "x"}),
        ("invalid_name", {"topic": "a b"}), ("invalid_name", {"group": ""}), ("out_of_range", {"in_flight_max": 0}),
        ("out_of_range", {"timeout": "1h"}), ("invalid_delay", {"timeout": "soon"}),
        ("out_of_range", {"rate_per_s": -1}),
        ("invalid_filter", {"filter": "a = (", "filter_type": "sql"}),
    ],
)  # fmt: skip
def test_a_refused_request_creates_no_subscription(client: Client, code: str, wrong: dict[str, Any]) -> None:
    answer = put(client, "wrong", **wrong)
    assert (answer.status // 100, answer.value["code"]) == (4, code)
    assert client.ask("GET", f"{PATH}/wrong").status == 404


def test_a_subscription_that_is_not_json_is_refused(client: Client) -> None:
    assert client.ask("PUT", f"{PATH}/a", b"{}", content_type="text/plain").status == 415


def test_only_administrators_may_change_subscriptions(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:

        def client(name: str) -> Any:
            return client_of(node, f"Bearer {name}:{SECRETS[name]}")

        with client("root") as operator, client("shop") as shop:
            assert put(operator, "a").status == 201
            assert put(shop, "b").status == 403
            assert shop.ask("DELETE", f"{PATH}/a").status == 403
            assert shop.ask("POST", f"{PATH}/a/pause").status == 403
            assert [item["name"] for item in operator.ask("GET", PATH).value["subscriptions"]] == ["a"]
            assert shop.ask("GET", PATH).value == {"subscriptions": []}
            assert shop.ask("GET", f"{PATH}/a").status == 404
        with client_of(node) as stranger:
            assert stranger.ask("GET", PATH).status == 401


# ---- subscriptions as JSON --------------------------------------------------------------------------------------


def test_a_shown_subscription_is_a_valid_request_for_an_equal_subscription() -> None:
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


def test_the_shown_state_depends_on_the_subscription_and_its_receiver() -> None:
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
