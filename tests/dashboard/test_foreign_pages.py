"""A page of another site in a real browser tries every permitted request, and the broker carries out none of them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Response, expect
from tests.dashboard.browser import chromium
from tests.edges.http.client import Client
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.http.requests import ForeignPageCheck

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]

REBOUND = "evil.example"  # a name that its owner lets point to this machine
# Each request would change the broker, or read from it.
ATTACK = """async broker => {
  const receive = `${broker}/v1/topics/letters/receive?group=thieves`;
  const quietly = (url, options) => fetch(url, options).then(() => true, () => false);
  const shown = (tag, name, url) => new Promise(resolve => {
    const element = document.createElement(tag);
    element.onload = element.onerror = resolve;
    element[name] = url;
    document.body.append(element);
    setTimeout(resolve, 2000);
  });
  const posted = (url, type) => {
    const frame = document.createElement('iframe');
    frame.name = `frame${document.forms.length}`;
    document.body.append(frame);
    const form = document.createElement('form');
    Object.assign(form, { method: 'POST', action: url, enctype: type, target: frame.name });
    document.body.append(form);
    const done = new Promise(resolve => { frame.onload = resolve; setTimeout(resolve, 2000); });
    form.submit();
    return done;
  };
  const read = await Promise.all([
    quietly(receive, { method: 'POST' }),
    quietly(receive, { method: 'POST', headers: { 'content-type': 'application/json' }, body: '{}' }),
    quietly(`${broker}/v1/messages/letter-1`, { method: 'DELETE' }),
    quietly(`${broker}/v1/topics`),
    quietly(`${broker}/metrics`),
    quietly(`${broker}/dashboard/`),
  ]);
  await Promise.all([
    quietly(receive, { method: 'POST', mode: 'no-cors' }),
    quietly(receive, { method: 'POST', mode: 'no-cors', body: '{}' }),
    quietly(`${broker}/v1/subscriptions/letters/pause`, { method: 'POST', mode: 'no-cors' }),
    quietly(`${broker}/v1/topics/letters/messages?group=thieves`, { mode: 'no-cors' }),
    shown('img', 'src', `${broker}/v1/topics/letters/messages?group=thieves`),
    shown('script', 'src', `${broker}/v1/topics`),
    shown('iframe', 'src', `${broker}/v1/topics`),
    posted(`${broker}/v1/subscriptions/letters/pause`, 'text/plain'),
    posted(receive, 'application/x-www-form-urlencoded'),
  ]);
  navigator.sendBeacon(receive);
  return read;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1") as running:
        yield running


@contextmanager
def other_site() -> Iterator[int]:
    """A server with an empty page. Yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with an empty page."""
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title><body>")

        def log_message(self, format: str, *args: object) -> None:
            """Write no log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path / "data", http_port=0, push_allow="127.0.0.1") as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def broker(node: RunningNode, client: Client) -> str:
    """A broker with a pending message, a visible one, and a subscription. Yields its address."""
    client.ask("PUT", "/v1/topics/letters", {})
    client.send("letters", {"id": "letter-1", "body": "x", "after": "1h"})
    client.send("letters", {"body": "x"})
    subscription = {"topic": "letters", "group": "pushed", "url": "http://127.0.0.1:9/"}
    client.ask("PUT", "/v1/subscriptions/letters", subscription)
    return f"127.0.0.1:{node.node.http_port}"


def attack(page: Page, site: str, broker: str) -> tuple[list[bool], set[tuple[str, int]]]:
    """Run the attack from a page of a site. Return which answers it could read, and each (path, status) of the broker.

    A browser reports no answer to a request that it was not allowed to send.
    """
    answers: set[tuple[str, int]] = set()

    def record(response: Response) -> None:
        url = urlsplit(response.url)
        if url.netloc == broker:
            answers.add((url.path, response.status))

    page.goto(f"http://{site}/")
    page.on("response", record)
    read = page.evaluate(ATTACK, f"http://{broker}")
    return read, answers


def check_unharmed(client: Client) -> None:
    """Check that the attack has created no group, paused no subscription and cancelled no message."""
    assert client.ask("GET", "/v1/groups/thieves").status == 404
    assert client.ask("GET", "/v1/subscriptions/letters").value["state"] != "paused"
    messages = client.ask("GET", "/v1/messages/letter-1").value["messages"]
    assert [message["state"] for message in messages] == ["waiting"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_requests_from_a_page_of_another_site_or_port_are_refused(
    page: Page, broker: str, client: Client, host: str
) -> None:
    with other_site() as port:
        could_read, answers = attack(page, f"{host}:{port}", broker)
    assert not any(could_read)
    assert {status for _, status in answers} == {403}
    assert {path for path, _ in answers} >= {
        "/v1/topics/letters/receive", "/v1/topics/letters/messages", "/v1/subscriptions/letters/pause", "/v1/topics",
    }  # fmt: skip
    check_unharmed(client)


def test_requests_under_a_foreign_host_name_that_points_to_the_broker_are_refused(
    page: Page, broker: str, client: Client
) -> None:
    port = broker.rpartition(":")[2]
    could_read, answers = attack(page, f"{REBOUND}:{port}", f"{REBOUND}:{port}")
    assert all(could_read), "the browser takes the broker for the page's own site"
    assert {status for _, status in answers} == {403}
    assert {path for path, _ in answers} >= {"/metrics", "/dashboard/", "/v1/topics", "/v1/messages/letter-1"}
    check_unharmed(client)


def test_the_attack_succeeds_at_a_broker_without_the_check(
    page: Page, broker: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the requests of the page do reach the broker."""
    monkeypatch.setattr(ForeignPageCheck, "check", lambda *_: None)
    with other_site() as port:
        attack(page, f"localhost:{port}", broker)
    eventually(lambda: client.ask("GET", "/v1/groups/thieves").status == 200, "the page has made a group")
    assert client.ask("GET", "/v1/subscriptions/letters").value["state"] == "paused"


def test_a_link_from_another_site_opens_the_dashboard(page: Page, broker: str) -> None:
    with other_site() as port:
        page.goto(f"http://localhost:{port}/")
        page.evaluate(
            "url => { const a = document.createElement('a'); a.href = url; a.id = 'to'; a.text = 'to'; "
            "document.body.append(a); }",
            f"http://{broker}/",
        )
        page.click("#to")
        expect(page.locator("h1")).to_have_text("Punctual")
        expect(page.get_by_text("letters").first).to_be_visible()
