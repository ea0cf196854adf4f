"""A certificate and accounts: the gRPC clients connect with both, and get an error if one is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.certificates import Certificate, certificate
from tests.interop.drivers import ClientError, Driver, Json
from tests.interop.grpc_conversation import ALL, WITH_GO, GrpcConversation
from tests.interop.stock_broker import StockBroker, stock_broker
from tests.interop.stock_clients import command

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("grpc_security")]  # one set of brokers and clients

UNAUTHORIZED, FORBIDDEN = 40100, 40300
SHOP = {"tls": True, "access_key": "shop", "secret_key": "the shop's own secret"}
ACCOUNTS = """
[[accounts]]
access_key = "shop"
secret_key = "the shop's own secret"
topics = { "*" = "PUB|SUB", "payroll" = "DENY" }
groups = { "*" = "SUB" }
"""
Start = Callable[..., GrpcConversation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secured")


@pytest.fixture(scope="module")
def tls(folder: Path) -> Certificate:
    return certificate(folder / "tls")


@pytest.fixture(scope="module")
def secured(folder: Path, tls: Certificate) -> Iterator[StockBroker]:
    """A broker whose ports all have TLS. Each client needs an account."""
    accounts = folder / "access.toml"
    accounts.touch(0o600)
    accounts.write_text(ACCOUNTS)
    with stock_broker(
        folder / "data", "--tls-cert", tls.cert, "--tls-key", tls.key, "--access-file", str(accounts)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def trusting(folder: Path, tls: Certificate, secured: StockBroker) -> Iterator[Callable[[str], Driver]]:
    """The client programs by name. They trust the tests' certificate authority, which a variable of gRPC names."""
    running: dict[str, Driver] = {}

    def client(which: str) -> Driver:
        if which not in running:
            with_roots = ["env", f"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH={tls.roots}"]
            running[which] = Driver([*with_roots, *command(which)], secured.grpc, folder / which)
        return running[which]

    yield client
    for driver in running.values():
        driver.close()


@pytest.fixture
def start(
    request: pytest.FixtureRequest,
    trusting: Callable[[str], Driver],
    secured: StockBroker,
    name: str,
) -> Start:
    """Return a function that starts a conversation with an account. The client is the parameter of the test."""
    return lambda account: GrpcConversation(
        request.param, trusting(request.param), secured, name, queues=0, **account
    )


@pytest.mark.parametrize("start", WITH_GO, indirect=True)
def test_a_client_with_valid_credentials_sends_and_receives(start: Start) -> None:
    talk = start(SHOP)
    consumer = talk.simple()
    talk.send("immediate")
    talk.send("delayed", due_ms=(int(time.time()) + 2) * 1_000)
    talk.ack(consumer, *talk.receive(consumer, {"immediate", "delayed"}))


@pytest.mark.parametrize("start", ALL, indirect=True)
@pytest.mark.parametrize(
    "account", [{**SHOP, "secret_key": "another secret"}, {"tls": True}], ids=["secret", "account"]
)
def test_a_client_without_valid_credentials_is_refused(start: Start, account: Json) -> None:
    """The producer already fails when it is created.

    The Python client then raises only "failed to fetch topic". It logs the reason.
    """
    with pytest.raises(ClientError, match=rf"{UNAUTHORIZED}|failed to fetch topic"):
        start(account).send("body")


@pytest.mark.parametrize("start", ALL, indirect=True)
def test_a_send_to_a_forbidden_topic_is_refused(start: Start) -> None:
    talk = start(SHOP)
    with pytest.raises(ClientError, match=rf"{FORBIDDEN}|failed to fetch topic:payroll"):
        talk.call("send", topic="payroll", body="body")


@pytest.mark.parametrize("start", ALL, indirect=True)
def test_a_local_client_may_use_the_same_port_without_tls(start: Start) -> None:
    """A client on another machine gets no answer without TLS, as tests/edges/shared/test_first_byte.py shows."""
    start({**SHOP, "tls": False}).send("body")
