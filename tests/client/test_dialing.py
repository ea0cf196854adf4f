"""Credentials and trusted certificates: from arguments, from the environment, and never shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.accounts import guarded_node, keys
from tests.certificates import Certificate, certificate
from tests.node_fixture import RunningNode

from timeball import Timeball
from timeball.client.attempts import RETRY_PAUSES_S
from timeball.client.credentials import ACCESS_KEY, SECRET_KEY, TLS_NAME, TLS_ROOTS
from timeball.model.errors import Unauthorized, Unavailable
from timeball.spark.endpoint import Endpoint

ROW = pa.table({"body": [b"x"]})


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ACCESS_KEY, SECRET_KEY, TLS_ROOTS, TLS_NAME):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, issued: Certificate) -> Iterator[RunningNode]:
    with guarded_node(tmp_path_factory.mktemp("guarded"), **issued.settings) as running:
        yield running


def tls(node: RunningNode, host: str = "127.0.0.1") -> str:
    return f"grpc+tls://{host}:{node.node.port}"


def test_our_clients_over_tls_with_the_environment_s_keys(
    node: RunningNode, issued: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_ROOTS, issued.roots)
    with Timeball(tls(node)) as ball, pytest.raises(Unauthorized):
        ball.send_many(ROW, topic="orders")
    root = keys("root")
    monkeypatch.setenv(ACCESS_KEY, root["access_key"])
    monkeypatch.setenv(SECRET_KEY, root["secret_key"])
    with Timeball(tls(node)) as ball:
        ((seq, _),) = ball.send_many(ROW, topic="orders").ranges
        assert ball.send_many(pa.table({"body": [b"x"] * 100}), topic="orders").rows == 100
        assert ball.read_log(seq, seq + 101).read_all().num_rows == 101
    with Endpoint(tls(node)) as there:
        assert there.status().log.durable_seq >= seq
        assert sum(batch.num_rows for batch in there.read_log(seq, seq + 101)) == 101


def test_the_name_in_a_certificate_may_be_another_than_the_one_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = certificate(tmp_path / "tls", "broker.example")
    with guarded_node(tmp_path, **issued.settings) as node:
        monkeypatch.setenv(TLS_NAME, "broker.example")
        with Timeball(tls(node), tls_roots=Path(issued.roots).read_bytes(), **keys("shop")) as ball:
            assert ball.send_many(ROW, topic="orders").ranges == [(2, 1)]


def test_another_s_certificate_is_not_believed_and_plain_text_is_not_answered(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.client.attempts.RETRY_PAUSES_S", RETRY_PAUSES_S[:0])
    stranger = Path(certificate(tmp_path).roots).read_bytes()
    with Timeball(tls(node), tls_roots=stranger, **keys("shop")) as ball:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            ball.reserve(1)
    with Timeball(node.endpoint, **keys("shop")) as ball, pytest.raises(Unavailable):
        ball.reserve(1)
