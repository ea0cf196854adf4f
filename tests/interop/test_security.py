"""A broker with accounts, and one with TLS: the remoting clients sign, and are accepted or refused."""

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
    """Every client needs an account. The tests' own requests use the administrator's."""
    with (
        as_root(),
        stock_broker(folder / "data", "--access-file", str(access_file(folder, ACCOUNTS))) as running,
    ):
        yield running


@contextmanager
def as_root(**more: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        known = {"TIMEBALL_ACCESS_KEY": "root", "TIMEBALL_SECRET_KEY": "the secret of root", **more}
        for name, value in known.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def signing(folder: Path, guarded: StockBroker) -> Iterator[Start]:
    """Clients that know the shop's secret."""
    yield from started(lambda which: signed(which, SECRET), guarded, folder / "signing")


@pytest.fixture(scope="module")
def guessing(folder: Path, guarded: StockBroker) -> Iterator[Start]:
    """Clients that do not."""
    yield from started(lambda which: signed(which, "what it may be"), guarded, folder / "guessing")


def signed(which: str, secret: str) -> list[str]:
    return ["env", "STOCK_ACCESS_KEY=shop", f"STOCK_SECRET_KEY={secret}", *command(which)]


def started(starts: Callable[[str], list[str]], broker: StockBroker, home: Path) -> Iterator[Start]:
    running: dict[str, Driver] = {}

    def client(which: str) -> Driver:
        if which not in running:
            running[which] = Driver(starts(which), broker.name_server, home / which)
        return running[which]

    yield client
    for driver in running.values():
        driver.close()


@pytest.mark.parametrize("which", ALL)
def test_who_signs_sends_and_consumes(guarded: StockBroker, signing: Start, which: str, name: str) -> None:
    talk = Conversation(signing(which), guarded, name)
    consumer = talk.listen(fail=1)
    now_ms = guarded.now_ms()
    talk.send("now", tag="A", keys="k")
    talk.send("later", level=2)
    got = by_body(talk.client.wait_deliveries(consumer, 2, done=True))
    assert got.keys() == {"now", "later"}
    assert not is_early(got["later"], now_ms + 2_000)


@pytest.mark.parametrize("which", ALL)
def test_who_guesses_does_not(guarded: StockBroker, guessing: Start, which: str, name: str) -> None:
    guarded.create_topic(f"{name}-topic", 1)
    with pytest.raises(ClientError):
        # Some clients are refused when they start, the others with their first message.
        Conversation(guessing(which), guarded, name, queues=0).send("forged")
    assert guarded.bodies(f"{name}-topic") == []


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_a_topic_that_is_denied(guarded: StockBroker, signing: Start, which: str, name: str) -> None:
    guarded.create_topic("payroll")
    talk = Conversation(signing(which), guarded, name)
    with pytest.raises(ClientError, match="payroll") as refusal:
        talk.call("send", topic="payroll", body="x")
    assert refusal.value.code == DENIED
    assert guarded.bodies("payroll") == []


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_questions_and_transactions_are_signed_too(
    guarded: StockBroker, signing: Start, which: str, name: str
) -> None:
    talk = Conversation(signing(which), guarded, name, transactions=True)
    sent = talk.send("by key", keys=f"key-{name}")
    found = talk.call("query_key", topic=talk.topic, key=f"key-{name}")
    assert [message["body"] for message in found] == ["by key"]
    assert talk.call("view", topic=talk.topic, message_id=sent["offset_id"])["body"] == "by key"
    both = {"local": "COMMIT_MESSAGE", "check": "UNKNOWN"}
    talk.call("send_transaction", topic=talk.topic, body="half", properties=both)
    consumer = talk.listen()
    assert by_body(talk.client.wait_deliveries(consumer, 2)).keys() == {"by key", "half"}


def test_a_recall_is_signed_too(guarded: StockBroker, signing: Start, name: str) -> None:
    talk = Conversation(signing(JAVA5), guarded, name)
    handle = talk.send("never", timer="TIMER_DELAY_SEC", timer_value=60)["recall_handle"]
    assert talk.call("recall", topic=talk.topic, handle=handle)


def test_a_consumer_that_pops_signs_too(
    guarded: StockBroker, signing: Start, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it says of a message that has come back, which names the group's retry topic."""
    talk = Conversation(signing(JAVA5), guarded, name)
    how = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    with tool_of(tmp_path, monkeypatch, "root", "the secret of root") as mqadmin:
        mqadmin(guarded, "setConsumeMode", "-b", guarded.remoting, *how)
    consumer = talk.listen(server_rebalance=True, fail=1)
    talk.send("twice")
    [again] = talk.client.wait_deliveries(consumer, 1, done=True)
    assert again["body"] == "twice" and "POP_CK" in again["properties"]
    retried = f"%RETRY%{talk.group}_{talk.topic}"
    eventually(lambda: guarded.offsets(talk.group, retried) == {0: 1}, "it is acknowledged")


def test_the_administration_tool_signs_too(
    guarded: StockBroker, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("updateTopic", "-t", name, "-c", "DefaultCluster")
    with tool_of(tmp_path, monkeypatch, "shop", SECRET) as mqadmin:
        with pytest.raises(AssertionError, match="administer the broker"):
            mqadmin(guarded, *asked)
    with tool_of(tmp_path, monkeypatch, "root", "the secret of root") as mqadmin:
        assert "success" in mqadmin(guarded, *asked)


@contextmanager
def tool_of(home: Path, patch: pytest.MonkeyPatch, account: str, secret: str) -> Iterator[AdminTool]:
    """RocketMQ's tool, with an account in the file where it looks for one when it starts."""
    patch.setenv("ROCKETMQ_HOME", str(home))
    (home / "conf").mkdir(exist_ok=True)
    (home / "conf/tools.yml").write_text(f"accessKey: {account}\nsecretKey: {secret}\n")
    with admin_tool(home) as tool:
        yield tool


def test_a_client_that_signs_may_talk_to_a_broker_that_does_not_ask(
    broker: StockBroker, name: str, tmp_path: Path
) -> None:
    client = Driver(signed(ALI_ONS, SECRET), broker.name_server, tmp_path)
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
    """Of these clients only Java supports TLS. It checks the certificate only outside its test mode."""
    properties = {
        "tls.enable": "true", "tls.test.mode.enable": "false", "tls.client.authServer": "true",
        "tls.client.trustCertPath": roots,
    }  # fmt: skip
    whole = signed(which, SECRET)
    at = whole.index("-cp")
    return [*whole[:at], *(f"-D{name}={value}" for name, value in properties.items()), *whole[at:]]


@pytest.mark.parametrize("which", [JAVA4, JAVA5])
def test_java_over_tls(
    encrypted: StockBroker, tls: Certificate, which: str, name: str, tmp_path: Path
) -> None:
    client = Driver(over_tls(which, tls.roots), encrypted.name_server, tmp_path)
    try:
        talk = Conversation(client, encrypted, name)
        consumer = talk.listen()
        talk.send("secret")
        talk.send("secret, later", level=1)
        assert by_body(client.wait_deliveries(consumer, 2)).keys() == {"secret", "secret, later"}
    finally:
        client.close()


def test_java_does_not_believe_another_s_certificate(
    encrypted: StockBroker, name: str, tmp_path: Path
) -> None:
    """The control: the clients above have looked at it."""
    client = Driver(
        over_tls(JAVA5, certificate(tmp_path / "stranger").roots), encrypted.name_server, tmp_path / "home"
    )
    try:
        encrypted.create_topic(f"{name}-topic", 1)
        with pytest.raises(ClientError):
            Conversation(client, encrypted, name, queues=0).send("x")
    finally:
        client.close()
