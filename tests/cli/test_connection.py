"""The way to a broker: nobody there is a sentence, everything else is left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.certificates import certificate
from tests.node_fixture import running_node

from timeball.cli.connection import connect
from timeball.errors import NotFound, Unavailable

NOWHERE = "grpc://127.0.0.1:1"  # a port that nothing may listen on


def test_nobody_there_says_where_and_what_to_do() -> None:
    """With the endpoint that was tried."""
    with (
        pytest.raises(Unavailable, match=rf"{NOWHERE}: start one with 'timeball up'"),
        connect(NOWHERE) as ball,
    ):
        ball.status()


def test_another_error_passes_as_it_is(endpoint: str) -> None:
    """Also one of the same class with another text, such as a broker that stops."""
    with pytest.raises(NotFound), connect(endpoint) as ball:
        ball.queues("nowhere")
    with pytest.raises(Unavailable, match=r"^stopping$"), connect(endpoint):
        raise Unavailable("stopping")


def test_a_broker_that_speaks_tls_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain text to it, and a certificate nobody has been told to believe: two mistakes, and both are named."""
    monkeypatch.delenv("TIMEBALL_TLS_ROOTS", raising=False)
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        with pytest.raises(Unavailable, match=r"write grpc\+tls://"), connect(node.endpoint) as ball:
            ball.create_topic("orders")
        secure = node.endpoint.replace("grpc:", "grpc+tls:")
        with pytest.raises(Unavailable, match="certificate verify failed"), connect(secure) as ball:
            ball.create_topic("orders")
