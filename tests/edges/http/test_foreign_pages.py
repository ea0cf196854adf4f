"""Requests for pages of other sites are refused. Requests of programs and of the dashboard are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode

from timeball.edges.http.requests import ForeignPageCheck
from timeball.model.config import Settings
from timeball.model.errors import Forbidden, SetupError

LOCAL = ForeignPageCheck(Settings(), has_accounts=False)
LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document", "sec-fetch-site": "cross-site"}


def is_answered(
    pages: ForeignPageCheck, method: str = "POST", path: str = "/v1/topics/t/messages", **headers: str
) -> bool:
    """Check that a request with these headers is not refused. An underscore in a keyword is a hyphen."""
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        pages.check(method, path, {"host": "localhost:7480"} | named)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True), ("LOCALHOST:7480", True), ("localhost.", True), ("broker.localhost:7480", True),
        ("127.0.0.1:7480", True), ("[::1]:7480", True), ("10.1.2.3", True), ("", True),
        ("evil.example:7480", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False),
        ("notlocalhost", False), ("[evil.example]", False),
    ],
)  # fmt: skip
def test_a_broker_without_accounts_accepts_local_names_and_ip_addresses(host: str, is_known: bool) -> None:
    assert is_answered(LOCAL, host=host) is is_known
    assert is_answered(LOCAL, "GET", "/dashboard/", host=host) is is_known
    assert is_answered(LOCAL, "GET", "/metrics", host=host) is is_known
    assert is_answered(LOCAL, "GET", "/health/ready", host=host), "a probe has names of its own"
    assert is_answered(ForeignPageCheck(Settings(), has_accounts=True), host=host)


def test_configured_host_names_are_accepted() -> None:
    settings = Settings(
        host="inside.example",
        allow_plaintext=True,
        advertise="Outside.example:10911",
        http_hosts="a.example, B.example",
    )
    pages = ForeignPageCheck(settings, has_accounts=False, cluster_hosts=lambda: {"node-b"})
    for name in (
        "inside.example",
        "outside.example",
        "a.example",
        "b.example:7480",
        "node-b:7480",
        "localhost",
    ):
        assert is_answered(pages, host=name), name
    assert not is_answered(pages, host="c.example")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "10.0.0.1", "a b", "*.example"])
def test_an_invalid_host_name_is_a_setup_error(name: str) -> None:
    with pytest.raises(SetupError, match="--http-hosts"):
        Settings(http_hosts=name)


@pytest.mark.parametrize("has_accounts", [False, True])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_a_page_of_another_site_is_refused(method: str, has_accounts: bool) -> None:
    pages = ForeignPageCheck(Settings(), has_accounts=has_accounts)
    for headers in (
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},  # another port of this machine
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"origin": "http://localhost:7480.evil.example"},
    ):
        for path in ("/v1/topics/t/receive", "/metrics", "/dashboard/", "/openapi.json"):
            assert not is_answered(pages, method, path, **headers), headers


def test_requests_of_own_pages_and_of_programs_are_accepted() -> None:
    assert is_answered(LOCAL)
    assert is_answered(LOCAL, sec_fetch_site="same-origin", origin="http://localhost:7480")
    assert is_answered(LOCAL, "GET", sec_fetch_site="none")
    assert is_answered(LOCAL, origin="http://localhost:7480")
    assert is_answered(LOCAL, host="localhost", origin="https://localhost"), "a proxy has ended TLS"
    assert is_answered(LOCAL, host="localhost:80", origin="http://localhost")
    # A proxy that writes its own Host: the browser vouches for the page.
    assert is_answered(LOCAL, sec_fetch_site="same-origin", origin="https://broker.example")


def test_a_link_may_lead_to_the_dashboard_but_not_to_the_api() -> None:
    named = {name.replace("-", "_"): value for name, value in LINK.items()}
    assert is_answered(LOCAL, "GET", "/dashboard/", **named)
    assert is_answered(LOCAL, "GET", "/", **named)
    for method, path in (("GET", "/v1/topics"), ("GET", "/metrics"), ("POST", "/dashboard/")):
        assert not is_answered(LOCAL, method, path, **named)
    assert not is_answered(LOCAL, "GET", "/dashboard/", **{**named, "sec_fetch_dest": "iframe"})


def test_a_refused_request_changes_nothing(node: RunningNode, client: Client) -> None:
    client.send("watched", {"body": "x"})
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec_fetch_site": "cross-site"},
    ):
        answer = client.ask("POST", "/v1/topics/watched/receive", query={"group": "thieves"}, **headers)
        assert (answer.status, answer.value["code"]) == (403, "forbidden")
        assert client.ask("GET", "/v1/topics", **headers).status == 403
        assert client.ask("GET", "/dashboard/", **headers).status == 403
    assert "evil.example" in client.ask("GET", "/v1/topics", host="evil.example").value["detail"]
    assert client.ask("GET", "/v1/groups/thieves").status == 404
    assert len(client.receive("watched").value["messages"]) == 1


def test_with_accounts_any_host_is_accepted_but_no_foreign_page(tmp_path: Path) -> None:
    with (
        guarded_node(tmp_path, http_port=0) as node,
        client_of(node, f"Bearer root:{SECRETS['root']}") as root,
    ):
        assert root.ask("GET", "/v1/topics", host="evil.example").status == 200
        assert root.ask("GET", "/v1/topics", sec_fetch_site="cross-site").status == 403


def every_form() -> list[tuple[str, dict[str, Any]]]:
    """Return each content type that a form of a page can have, and the header for it."""
    kinds = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain")
    return [(kind, {"content_type": kind}) for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "headers"), every_form(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_form_is_refused_for_its_content_type(client: Client, kind: str, headers: dict[str, str]) -> None:
    """This protects also users of a browser that sends neither Origin nor Sec-Fetch-Site."""
    client.send("formed", {"body": "x"})
    subscription = {"topic": "formed", "group": "pushed", "url": "http://127.0.0.1:9/"}
    client.ask("PUT", "/v1/subscriptions/formed", subscription)
    for path in (
        "/v1/topics/formed/receive?group=g", "/v1/topics/formed/ack?group=g", "/v1/topics/formed/nack?group=g",
        "/v1/topics/formed/extend?group=g", "/v1/topics/formed/dead-letter?group=g", "/v1/topics/formed/messages",
        "/v1/groups/g/dead-letters/resend", "/v1/groups/g/dead-letters/delete", "/v1/campaigns/c/pause",
        "/v1/campaigns/c/resume", "/v1/campaigns/c/cancel", "/v1/subscriptions/formed/pause",
        "/v1/subscriptions/formed/resume", "/v1/topics/formed/stream?group=g",
        "/v1/cancel", "/v1/reschedule", "/v1/preview", "/v1/schedules/formed/pause", "/v1/schedules/formed/resume",
        "/v1/schedules/formed/run", "/v1/selections", "/v1/selections/dry-run", "/v1/selections/s/undo",
    ):  # fmt: skip
        for body in (b"", b"{}"):
            answer = client.ask("POST", path, body, **headers)
            assert answer.status == 415, (path, answer)
            assert "application/json" in answer.value["detail"]
    assert client.ask("GET", "/v1/groups/g").status == 404


def test_the_forms_are_all_posts_of_the_document(client: Client) -> None:
    """If this test fails, add the new POST to the test above.

    Two POSTs are not in it: a broker without a cluster answers 404 to the one for other nodes, and test_clock.py tests
    the one for a manual clock.
    """
    document = client.ask("GET", "/openapi.json").value
    assert sum("post" in methods for methods in document["paths"].values()) == 25
