"""Remoting clients sign their requests for a broker with accounts, and use TLS with a broker that has both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.accounts import access_file
from tests.certificates import Certificate, certificate
from tests.interop.admin_tool import AdminTool, admin_tool
from tests.interop.conversation import ALI_ONS, ALL, JAVA4, JAVA5, Conversation, by_body, is_early
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import StockBroker, stock_broker
from tests.interop.stock_clients import command
from tests.node_fixture import eventually

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("security")]  # one set of brokers and clients

DENIED = 16  # NO_PERMISSION
SECRET = "the secret of the shop"
ACCOUNTS = f"""
[[accounts]]
access_key = "shop"
secret_key = "{SECRET}"
topics = {{ "payroll" = "DENY", "*" = "PUB|SUB" }}
groups = {{ "*" = "SUB" }}

[[accounts]]
access_key = "root"
secret_key = "the secret of root"
admin = true
"""
Start = Callable[[str], Driver]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[StockBroker]:
    """A broker whose clients need an account. The requests of the tests themselves use that of the administrator."""
    with (
        as_root(),
        stock_broker(folder / "data", "--access-file", str(access_file(folder, ACCOUNTS))) as running,
    ):
        yield running


@contextmanager
def as_root(**more: str) -> Iterator[None]:
    """Let Timeball's own client use the administrator's account, and set more variables of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        variables = {"TIMEBALL_ACCESS_KEY": "root", "TIMEBALL_SECRET_KEY": "the secret of root", **more}
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def signing(folder: Path, guarded: StockBroker) -> Iterator[Start]:
    """The client programs by name. They have the secret of the account `shop`."""
    yield from start_when_called(lambda which: signing_command(which, SECRET), guarded, folder / "signing")


@pytest.fixture(scope="module")
def wrongly_signing(folder: Path, guarded: StockBroker) -> Iterator[Start]:
    """The client programs by name. They have a wrong secret of the account `shop`."""
    yield from start_when_called(
        lambda which: signing_command(which, "another secret"), guarded, folder / "wrongly-signing"
    )


def signing_command(which: str, secret: str) -> list[str]:
    """Return the command of a client program that signs as the account `shop` with a secret."""
    return ["env", "STOCK_ACCESS_KEY=shop", f"STOCK_SECRET_KEY={secret}", *command(which)]


def start_when_called(
    command_of: Callable[[str], list[str]], broker: StockBroker, home: Path
) -> Iterator[Start]:
    """Yield a function that returns a client program by name, and starts it at the first call. Then stop them all."""
    running: dict[str, Driver] = {}

    def client(which: str) -> Driver:
        if which not in running:
            running[which] = Driver(command_of(which), broker.name_server, home / which)
        return running[which]

    yield client
    for driver in running.values():
        driver.close()


@pytest.mark.parametrize("which", ALL)
def test_a_client_with_the_right_secret_sends_and_receives(
    guarded: StockBroker, signing: Start, which: str, name: str
) -> None:
    talk = Conversation(signing(which), guarded, name)
    consumer = talk.listen(fail=1)
    now_ms = guarded.now_ms()
    talk.send("immediate", tag="A", keys="k")
    talk.send("delayed", level=2)
    received = by_body(talk.client.wait_deliveries(consumer, 2, done=True))
    assert received.keys() == {"immediate", "delayed"}
    assert not is_early(received["delayed"], now_ms + 2_000)


@pytest.mark.parametrize("which", ALL)
def test_a_client_with_a_wrong_secret_is_refused(
    guarded: StockBroker, wrongly_signing: Start, which: str, name: str
) -> None:
    guarded.create_topic(f"{name}-topic", 1)
    with pytest.raises(ClientError):
        # Some clients are refused when they start, the others when they send their first message.
        Conversation(wrongly_signing(which), guarded, name, queues=0).send("body")
    assert guarded.bodies(f"{name}-topic") == []


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_a_remoting_send_to_a_forbidden_topic_is_refused(
    guarded: StockBroker, signing: Start, which: str, name: str
) -> None:
    guarded.create_topic("payroll")
    talk = Conversation(signing(which), guarded, name)
    with pytest.raises(ClientError, match="payroll") as refusal:
        talk.call("send", topic="payroll", body="x")
    assert refusal.value.code == DENIED
    assert guarded.bodies("payroll") == []


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_queries_and_transactions_are_signed(
    guarded: StockBroker, signing: Start, which: str, name: str
) -> None:
    talk = Conversation(signing(which), guarded, name, transactions=True)
    sent = talk.send("by key", keys=f"key-{name}")
    found = talk.call("query_key", topic=talk.topic, key=f"key-{name}")
    assert [message["body"] for message in found] == ["by key"]
    assert talk.call("view", topic=talk.topic, message_id=sent["offset_id"])["body"] == "by key"
    states = {"local": "COMMIT_MESSAGE", "check": "UNKNOWN"}
    talk.call("send_transaction", topic=talk.topic, body="committed", properties=states)
    consumer = talk.listen()
    assert by_body(talk.client.wait_deliveries(consumer, 2)).keys() == {"by key", "committed"}


def test_a_recall_is_signed(guarded: StockBroker, signing: Start, name: str) -> None:
    talk = Conversation(signing(JAVA5), guarded, name)
    handle = talk.send("recalled", timer="TIMER_DELAY_SEC", timer_value=60)["recall_handle"]
    assert talk.call("recall", topic=talk.topic, handle=handle)


def test_the_requests_of_a_pop_consumer_are_signed(
    guarded: StockBroker, signing: Start, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acknowledgement of a message that failed once names the retry topic of the group."""
    talk = Conversation(signing(JAVA5), guarded, name)
    mode = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    with tool_of(tmp_path, monkeypatch, "root", "the secret of root") as mqadmin:
        mqadmin(guarded, "setConsumeMode", "-b", guarded.remoting, *mode)
    consumer = talk.listen(server_rebalance=True, fail=1)
    talk.send("failed once")
    [second] = talk.client.wait_deliveries(consumer, 1, done=True)
    assert second["body"] == "failed once" and "POP_CK" in second["properties"]
    retry_topic = f"%RETRY%{talk.group}_{talk.topic}"
    eventually(lambda: guarded.offsets(talk.group, retry_topic) == {0: 1}, "the message is acknowledged")


def test_the_administration_tool_signs_its_requests(
    guarded: StockBroker, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("updateTopic", "-t", name, "-c", "DefaultCluster")
    with tool_of(tmp_path, monkeypatch, "shop", SECRET) as mqadmin:
        with pytest.raises(AssertionError, match="administer the broker"):
            mqadmin(guarded, *arguments)
    with tool_of(tmp_path, monkeypatch, "root", "the secret of root") as mqadmin:
        assert "success" in mqadmin(guarded, *arguments)


@contextmanager
def tool_of(home: Path, patch: pytest.MonkeyPatch, account: str, secret: str) -> Iterator[AdminTool]:
    """Run RocketMQ's administration tool with an account, in the file in which it looks for one when it starts."""
    patch.setenv("ROCKETMQ_HOME", str(home))
    (home / "conf").mkdir(exist_ok=True)
    (home / "conf/tools.yml").write_text(f"accessKey: {account}\nsecretKey: {secret}\n")
    with admin_tool(home) as tool:
        yield tool


def test_a_broker_without_accounts_accepts_signed_requests(
    broker: StockBroker, name: str, tmp_path: Path
) -> None:
    client = Driver(signing_command(ALI_ONS, SECRET), broker.name_server, tmp_path)
    try:
        Conversation(client, broker, name).send("x")
    finally:
        client.close()


# ---- TLS ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(folder: Path) -> Certificate:
    return certificate(folder / "tls")


@pytest.fixture(scope="module")
def encrypted(folder: Path, tls: Certificate) -> Iterator[StockBroker]:
    """A broker with TLS whose clients need an account."""
    options = [
        "--tls-cert",
        tls.cert,
        "--tls-key",
        tls.key,
        "--access-file",
        str(access_file(folder, ACCOUNTS)),
    ]
    with as_root(TIMEBALL_TLS_ROOTS=tls.roots), stock_broker(folder / "encrypted", *options) as running:
        yield running


def over_tls(which: str, roots: str) -> list[str]:
    """Return the command of a Java client that uses TLS and trusts a certificate authority.

    Of these clients only Java supports TLS. It checks the certificate only outside its test mode.
    """
    properties = {
        "tls.enable": "true", "tls.test.mode.enable": "false", "tls.client.authServer": "true",
        "tls.client.trustCertPath": roots,
    }  # fmt: skip
    arguments = signing_command(which, SECRET)
    at = arguments.index("-cp")
    return [*arguments[:at], *(f"-D{name}={value}" for name, value in properties.items()), *arguments[at:]]


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_a_java_client_sends_and_receives_over_tls(
    encrypted: StockBroker, tls: Certificate, which: str, name: str, tmp_path: Path
) -> None:
    client = Driver(over_tls(which, tls.roots), encrypted.name_server, tmp_path)
    try:
        talk = Conversation(client, encrypted, name)
        consumer = talk.listen()
        talk.send("immediate")
        talk.send("delayed", level=1)
        assert by_body(client.wait_deliveries(consumer, 2)).keys() == {"immediate", "delayed"}
    finally:
        client.close()


def test_java_does_not_believe_another_s_certificate(
    encrypted: StockBroker, name: str, tmp_path: Path
) -> None:
    """The negative control: it shows that the clients above check the certificate."""
    other_roots = certificate(tmp_path / "other").roots
    client = Driver(over_tls(JAVA5, other_roots), encrypted.name_server, tmp_path / "home")
    try:
        encrypted.create_topic(f"{name}-topic", 1)
        with pytest.raises(ClientError):
            Conversation(client, encrypted, name, queues=0).send("x")
    finally:
        client.close()
