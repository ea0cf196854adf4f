"""Calls with credentials: a real node with an access file, the client of pyarrow, and Timeball's client."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.accounts import ACCESS_FILE, access_file, guarded_node, keys
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.client.exchange import SendExchange
from timeball.edges.flight import codec
from timeball.model import wire
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Forbidden, RequestError, Unauthorized

ROWS = pa.table(
    {"topic": ["orders"], "body": [b"x"]}, pa.schema([("topic", pa.string()), ("body", pa.binary())])
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with guarded_node(tmp_path_factory.mktemp("guarded")) as running:
        for topic in ("orders", "news"):
            running.run(running.broker.create_topic(topic, 2))
        yield running


@pytest.fixture
def shop(node: RunningNode) -> Iterator[Timeball]:
    with node.client(**keys("shop")) as ball:
        yield ball


@pytest.fixture
def other(node: RunningNode) -> Iterator[Timeball]:
    with node.client(**keys("other")) as ball:
        yield ball


@pytest.fixture
def root(node: RunningNode) -> Iterator[Timeball]:
    with node.client(**keys("root")) as ball:
        yield ball


def signature_headers(secret: str = "shop secret 1") -> list[tuple[bytes, bytes]]:
    """Return the headers of a call that the account `shop` signs as RocketMQ's gRPC clients do."""
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    text = f"MQv2-HMAC-SHA1 Credential=shop, SignedHeaders=x-mq-date-time, Signature={digest}"
    return [(b"authorization", text.encode()), (b"x-mq-date-time", date.encode())]


def status(node: RunningNode, headers: list[tuple[bytes, bytes]]) -> Any:
    """Return the broker's status, requested by a client of pyarrow with these headers."""
    with flight.FlightClient(node.endpoint) as client:
        options = flight.FlightCallOptions(headers=headers)
        (result,) = client.do_action(flight.Action("status", b"{}"), options)
        return json.loads(result.body.to_pybytes())


def test_a_client_of_pyarrow_is_admitted_with_a_signature_or_the_secret_only(node: RunningNode) -> None:
    assert status(node, signature_headers())["pid"]
    assert status(node, [(b"authorization", b"Bearer shop:shop secret 1")])["pid"]
    for headers in (
        [],
        signature_headers("wrong"),
        signature_headers()[:1],
        [(b"authorization", b"Bearer shop:wrong")],
    ):
        with pytest.raises(flight.FlightServerError) as refusal:
            status(node, headers)
        assert refusal.value.extra_info == b"unauthorized"
        assert "secret 1" not in str(refusal.value) and ".py" not in str(refusal.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: list(client.do_action(flight.Action("status", b"{}"))),
        lambda client: list(client.do_action(flight.Action("no such verb", b"{}"))),
        lambda client: client.do_get(flight.Ticket(b'{"read":"log","from_seq":1,"to_seq":1}')).read_all(),
        lambda client: client.do_get(flight.Ticket(b"no ticket")).read_all(),
        lambda client: exchange_rows(client, b"send"),
        lambda client: exchange_rows(client, b"release"),
        lambda client: exchange_rows(client, b"no such path"),
    ],
    ids=["action", "no action", "log", "no ticket", "send", "release", "no path"],
)
def test_any_call_without_credentials_is_unauthorized(node: RunningNode, call: Callable[[Any], Any]) -> None:
    before = node.broker.log.writer.next_seq
    with flight.FlightClient(node.endpoint) as client, pytest.raises(flight.FlightServerError) as refusal:
        call(client)
    assert refusal.value.extra_info == b"unauthorized"
    assert node.broker.log.writer.next_seq == before


def exchange_rows(client: Any, path: bytes) -> None:
    """Send a table over a stream with this path, and read the first answer. Raise the error of the broker."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(path))
    with writer:
        writer.begin(ROWS.schema)
        try:
            writer.write_table(ROWS)
        except pa.ArrowException:
            pass  # the broker has ended the stream already. The reader gets the reason
        reader.read_chunk()


@pytest.mark.parametrize("method", ["DoAction", "DoGet", "DoExchange", "DoPut", "ListActions", "GetSchema"])
def test_the_caller_is_checked_before_a_message_is_received(node: RunningNode, method: str) -> None:
    """The client sends only headers. With valid credentials, the call waits for a message."""
    never = threading.Event()
    with grpc.insecure_channel(node.endpoint.removeprefix("grpc://")) as channel:
        call = channel.stream_stream(f"/arrow.flight.protocol.FlightService/{method}")
        answers = call(iter(never.wait, True), metadata=[("authorization", "Bearer shop:wrong")])
        assert dict(answers.trailing_metadata())["grpc-status-details-bin"] == b"unauthorized"
        if method in ("DoAction", "DoGet", "DoExchange"):
            admitted = call(iter(never.wait, True), metadata=[("authorization", "Bearer shop:shop secret 1")])
            with pytest.raises(grpc.FutureTimeoutError):
                admitted.result(0.2)
            admitted.cancel()
        never.set()


# ---- every verb ---------------------------------------------------------------------------------------------

BODIES: dict[str, Any] = {
    "occurrences": {"from_ms": 0, "to_ms": 60_000, "width_ms": 1_000},
    "queues": {"topic": "orders"},
    "cancel_range": {"ranges": [[1 << 40, 1]]},
    "reserve": {"rows": 1},
    "campaign": {"campaign": "x", "change": "pause"},
    "compactor": {"lease_ms": 0},
    "dispatcher": {"lease_ms": 0},
    "source_positions": {"source": "kafka"},  # a source belongs to its account
    "drain": {"heir": "g2"},
}
OTHER_MAY = {"status", "source_positions"}
SHOP_MAY = {*OTHER_MAY, "queues"}


def may(ball: Timeball, verb: str) -> bool:
    """Check whether an account may perform an action."""
    try:
        if verb == "attach":
            ball.attach(
                b'{"job": "bulk", "job_id": "x", "epoch": 0, "from_seq": 0, "to_seq": 0, "files": []}'
            )
        else:
            ball._columns("it").action(verb, BODIES.get(verb, {}), dict[str, Any])
    except Forbidden:
        return False
    except RequestError:
        pass  # it may, but the request is invalid
    return True


@pytest.mark.parametrize("verb", codec.ACTIONS)
def test_each_action_needs_its_permission(shop: Timeball, other: Timeball, root: Timeball, verb: str) -> None:
    assert may(root, verb)
    assert may(shop, verb) is (verb in SHOP_MAY)
    assert may(other, verb) is (verb in OTHER_MAY)


@pytest.mark.parametrize("verb", codec.LARGE_ADMIN_ACTIONS)
def test_a_large_body_is_decoded_for_admins_only(shop: Timeball, root: Timeball, verb: str) -> None:
    nonsense = b"[" * (codec.body_bytes_max(verb) - 1)
    with pytest.raises(Forbidden):
        shop._columns("it").action(verb, nonsense, dict[str, Any])
    with pytest.raises(RequestError) as refused:
        root._columns("it").action(verb, nonsense, dict[str, Any])
    assert not isinstance(refused.value, Forbidden)


def test_each_read_needs_its_permission(
    node: RunningNode, shop: Timeball, other: Timeball, root: Timeball
) -> None:
    seq = shop.send("orders", "read me").seq
    assert root.read_log(seq, seq + 1).read_all().num_rows == 1
    for ball in (shop, other):
        with pytest.raises(Forbidden):
            ball.read_log(seq, seq + 1).read_all()
    assert b"read me" in [m.body for m in shop.browse("orders")]
    assert shop.read_queue("orders", 0, 0, 10)
    for forbidden in (
        lambda: other.read_queue("orders", 0, 0, 10),
        lambda: other.browse("orders"),
        lambda: other._columns("it").rows(wire.Pull(topic="orders", offsets={0: 0}, rows=1)),
    ):
        with pytest.raises(Forbidden):
            forbidden()


# ---- sending ------------------------------------------------------------------------------------------------


def table(**topics: str) -> pa.Table:
    """Return messages: the keywords are their bodies, and the values their topics."""
    return pa.table({"body": [body.encode() for body in topics], "topic": list(topics.values())})


def test_a_batch_with_a_forbidden_topic_is_refused_and_the_stream_continues(
    node: RunningNode, shop: Timeball
) -> None:
    shop.send_many(table(a="orders"))
    before = node.broker.log.writer.next_seq
    with pytest.raises(Forbidden, match="news"):
        shop.send_many(table(b="news"))
    with pytest.raises(Forbidden, match="news"):
        shop.send_many(table(c="orders", d="news"))
    assert node.messages_since(before) == []
    summary = shop.send_many(table(e="news", f="orders"), batch_rows=1, on_refused="collect")
    assert [each.first_row for each in summary.refused] == [0]
    assert summary.ranges == [(seq, 1) for seq in node.messages_since(before)] and len(summary.ranges) == 1


def test_a_forbidden_send_does_not_create_the_topic(node: RunningNode, shop: Timeball) -> None:
    with pytest.raises(Forbidden):
        shop.send_many(table(a="made-up"))
    with pytest.raises(Forbidden):
        shop.browse("made-up", wait="0.1s")
    assert "made-up" not in node.broker.topics()


def test_a_removed_account_is_refused_on_its_open_stream(tmp_path: Path) -> None:
    path = access_file(tmp_path)
    with running_node(tmp_path / "data", access_file=str(path)) as node:
        with node.client(**keys("shop")) as shop:
            schema = ROWS.schema
            exchange = SendExchange(
                shop._columns("it").flight, schema, node.endpoint, open_s=BOUND_S, limit_s=BOUND_S
            )
            exchange.submit(ROWS.to_batches()[0]).result(BOUND_S)
            access_file(tmp_path, ACCESS_FILE.replace("shop secret 1", "shop secret 9"))
            node.loop.call_soon_threadsafe(node.node.security.reload)

            def refused() -> bool:
                try:
                    exchange.submit(ROWS.to_batches()[0]).result(BOUND_S)
                except Unauthorized:
                    return True
                return False

            eventually(refused, "the open stream is refused")
            with pytest.raises(Unauthorized):
                shop.read_queue("orders", 0, 0, 1)
            exchange.close()


# ---- without an access file -----------------------------------------------------------------------------------


def test_without_an_access_file_no_credentials_are_needed(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        edge = node.node.edges.flight
        assert edge is not None and edge.caller({}) is ANONYMOUS
        with node.client(access_key="any", secret_key="any") as ball:
            assert ball.send_many(ROWS).ranges == [(2, 1)]  # one row with seq 2, after the row of the topic
