"""The receiver of docs/push.md runs as shown, and accepts only requests that the broker has signed."""

from __future__ import annotations

import http.client
import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.edges.http.client import Client
from tests.edges.push.test_worker import send
from tests.node_fixture import RunningNode, eventually

PAGE = Path(__file__).parents[3] / "docs" / "push.md"


def test_the_receiver_of_the_page_accepts_only_signed_messages(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    wanted = {"topic": "shown", "group": "shown", "url": "http://127.0.0.1:1024/", "rate_per_s": 0.001}
    secret = client.ask("PUT", "/v1/subscriptions/shown", wanted).value["secret"]
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    shown: dict[str, object] = {"__name__": "shown"}
    exec(compile(code, str(PAGE), "exec"), shown)
    handler = shown["Receiver"]
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        port = server.server_address[1]
        client.ask(
            "PUT", "/v1/subscriptions/shown",
            {"topic": "shown", "group": "shown", "url": f"http://127.0.0.1:{port}/"},
        )  # fmt: skip
        send(client, "shown", 3)
        delivered = node.node.metrics.push["shown"].outcomes
        eventually(lambda: delivered.get("delivered") == 3, "it accepts the signed messages")
        stranger = http.client.HTTPConnection("127.0.0.1", port)
        forged = {"webhook-id": "x", "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"}
        stranger.request("POST", "/", b"forged", forged)
        assert stranger.getresponse().status == 401
        stranger.close()
    finally:
        client.ask("DELETE", "/v1/subscriptions/shown")
        server.shutdown()
        server.server_close()
        thread.join()
    printed = capsys.readouterr().out
    assert sorted(printed.split()) == sorted(
        ["received", "shown-0", "received", "shown-1", "received", "shown-2"]
    )
