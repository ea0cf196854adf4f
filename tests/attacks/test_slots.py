"""Clients without an account that occupy slots, each beside a steady stream from another address.

All input is harmless: headers, beginnings of requests, and columns of a type that the broker refuses.
"""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.flight
import pytest
from tests.accounts import ACCESS_FILE
from tests.attacks.beside import AttackedBroker, attacked_broker, steady_stream
from tests.bounds import BOUND_S
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.rounds import rounds

from timeball.edges.flight import codec
from timeball.edges.flight.exchange import framed
from timeball.edges.flight.server import SERVICE
from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.shared import arrow_ipc

pytestmark = [pytest.mark.slow, pytest.mark.siege]

NO_GRANTS = '\n[[accounts]]\naccess_key = "nothing"\nsecret_key = "nothing secret 4"\n'
NOTHING, SHOP = "Bearer nothing:nothing secret 4", "Bearer shop:shop secret 1"
ATTACKER = "127.0.0.2"  # the steady stream comes from 127.0.0.1
PEAK_MIB_MAX = 600
ROUNDS = rounds(10, 50)  # of the steady stream while the slots are occupied, at least 0.1 s each


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedBroker]:
    """Run one broker for all attacks, with as many descriptors as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with attacked_broker(tmp_path_factory.mktemp("attacked"), ACCESS_FILE + NO_GRANTS) as attacked:
            yield attacked
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


Attack = Callable[[AttackedBroker, ExitStack], None]


def _port(address: str) -> int:
    """Return the port of "host:port"."""
    return int(address.rpartition(":")[2])


def _send_streams(authorization: str, *messages: bytes) -> Attack:
    """Send streams that begin with these messages and then stay open."""

    def hold(broker: AttackedBroker, held: ExitStack) -> None:
        for _ in range(8):
            client = held.enter_context(RawClient(None, port=_port(broker.endpoint), source=ATTACKER))
            for _ in range(100):
                number = client.headers(headers=fields(f"{SERVICE}DoExchange", authorization=authorization))
                for part in messages:
                    client.data(number, part, ends=False)

    return hold


def _grpc_calls(name: str, authorization: str) -> Attack:
    """Begin calls and never send their requests."""

    def hold(broker: AttackedBroker, held: ExitStack) -> None:
        extra = {"authorization": authorization} if authorization else {}
        for number in range(20):
            client = held.enter_context(RawClient(None, port=_port(broker.grpc), source=ATTACKER))
            headers = fields(f"/{SERVICE_NAME}/{name}", x_mq_client_id=f"attacker-{number}", **extra)
            try:
                for _ in range(900):
                    client.headers(headers=headers)
            except OSError:
                continue  # the connection was closed because of refused calls

    return hold


def _connections(name: str, first_bytes: bytes) -> Attack:
    """Open connections that send these bytes and nothing more."""

    def hold(broker: AttackedBroker, held: ExitStack) -> None:
        address = ("127.0.0.1", _port(getattr(broker, name)))
        for _ in range(3_000):
            try:
                connection = socket.create_connection(address, timeout=BOUND_S, source_address=(ATTACKER, 0))
            except OSError:
                continue  # the connection was refused
            held.enter_context(connection)
            try:
                connection.sendall(first_bytes)
            except OSError:
                pass  # the connection was closed meanwhile

    return hold


def _schema(*columns: tuple[str, pa.DataType]) -> bytes:
    """Encode the first message of a send stream with these columns."""
    descriptor = pa.flight.FlightDescriptor.for_path(b"send").serialize()
    head = codec.encode_data(arrow_ipc.schema_header(pa.schema(columns)))
    return framed(bytes([0x0A, len(descriptor)]) + descriptor, *head)


PLAIN = _schema(("topic", pa.string()), ("body", pa.binary()))
VIEWS = _schema(("topic", pa.string_view()), ("body", pa.binary_view()))
ATTACKS: dict[str, Attack] = {
    "send streams without a message, without grants": _send_streams(NOTHING),
    "send streams without a message": _send_streams(SHOP),
    "send streams with a schema": _send_streams(SHOP, PLAIN),
    "send streams with the beginning of a batch": _send_streams(
        SHOP, PLAIN, message(bytes(4_000_000))[:9_000]
    ),
    "send streams of view columns": _send_streams(SHOP, VIEWS),
    "calls of gRPC by strangers": _grpc_calls("Telemetry", ""),
    "calls of gRPC without grants": _grpc_calls("Telemetry", NOTHING),
    "calls of gRPC without a request": _grpc_calls("SendMessage", NOTHING),
    "connections to Flight": _connections("endpoint", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "connections to gRPC": _connections("grpc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "connections to remoting": _connections("remoting", bytes(4)[:2]),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ATTACKS)
def test_held_slots_leave_room_for_others(broker: AttackedBroker, name: str, record_property: Any) -> None:
    with ExitStack() as held:
        with steady_stream(broker) as figures:
            ATTACKS[name](broker, held)
            figures.wait_rounds(ROUNDS)
    record_property("measured", f"{name}: {figures}")
    print(f"{name}: {figures}")
    figures.check(PEAK_MIB_MAX)


@pytest.mark.timeout(600)
def test_slow_uploads_end_by_their_own_fault(broker: AttackedBroker) -> None:
    """Send the beginnings of 2,000 requests. Each ends with 408 or 429, none with an internal error."""
    head = (
        "POST /v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: 8000000\r\nConnection: close\r\nAuthorization: {SHOP}\r\n\r\n{{"
    ).encode()
    address = ("127.0.0.1", _port(broker.http))
    with ExitStack() as held:
        with steady_stream(broker) as figures:
            uploads = []
            for _ in range(2_000):
                connection = socket.create_connection(address, timeout=BOUND_S, source_address=(ATTACKER, 0))
                held.enter_context(connection)
                connection.sendall(head)
                uploads.append(connection)
            answers = Counter(_status(upload) for upload in uploads)
    print(f"slow uploads: {figures}; {answers}")
    assert answers.keys() <= {"408", "429"} and answers.total() == 2_000
    figures.check(PEAK_MIB_MAX)


def _status(connection: socket.socket) -> str:
    """Read the status of an answer."""
    return connection.recv(16).split(b" ")[1].decode()
