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
    """All its ports use TLS, and every client needs an account."""
    accounts = folder / "access.toml"
    accounts.touch(0o600)
    accounts.write_text(ACCOUNTS)
    with stock_broker(
        folder / "data", "--tls-cert", tls.cert, "--tls-key", tls.key, "--access-file", str(accounts)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def trusting(folder: Path, tls: Certificate, secured: StockBroker) -> Iterator[Callable[[str], Driver]]:
    """Clients that trust our authority; gRPC's own way to say so."""
    running: dict[str, Driver] = {}

    def client(which: str) -> Driver:
        if which not in running:
            trust = ["env", f"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH={tls.roots}"]
            running[which] = Driver([*trust, *command(which)], secured.grpc, folder / which)
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
    """A conversation as this account, with the client that the test is parametrised with."""
    return lambda account: GrpcConversation(
        request.param, trusting(request.param), secured, name, queues=0, **account
    )


@pytest.mark.parametrize("start", WITH_GO, indirect=True)
def test_who_is_known_comes_in(start: Start) -> None:
    talk = start(SHOP)
    consumer = talk.simple()
    talk.send("now")
    talk.send("late", due_ms=(int(time.time()) + 2) * 1_000)
    talk.ack(consumer, *talk.receive(consumer, {"now", "late"}))


@pytest.mark.parametrize("start", ALL, indirect=True)
@pytest.mark.parametrize("lack", ["secret", "account"])
def test_who_is_not_is_told_so(start: Start, lack: str) -> None:
    """At the start; the Python client keeps the reason for its log."""
    account: Json = {**SHOP, "secret_key": "somebody else's"} if lack == "secret" else {"tls": True}
    with pytest.raises(ClientError, match=rf"{UNAUTHORIZED}|failed to fetch topic"):
        start(account).send("in")


@pytest.mark.parametrize("start", ALL, indirect=True)
def test_ungranted_requests_are_refused(start: Start) -> None:
    talk = start(SHOP)
    with pytest.raises(ClientError, match=rf"{FORBIDDEN}|failed to fetch topic:payroll"):
        talk.call("send", topic="payroll", body="a rise")


@pytest.mark.parametrize("start", ALL, indirect=True)
def test_plain_text_of_this_machine_comes_by_the_same_port(start: Start) -> None:
    """From another machine it gets no answer: tests/edges/shared/test_first_byte.py."""
    start({**SHOP, "tls": False}).send("in")
