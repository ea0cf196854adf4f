"""Typed access to requests, response codes of errors, addresses, and tables with object keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.remoting.wire import Wire, json_body
from tests.loop_turns import LoopTurns
from tests.node_fixture import RunningNode, running_node

from timeball.broker.registry.rates import GROUPS_AT_ONCE
from timeball.edges.remoting.calls import (
    Call,
    data_version,
    decode_object_keys,
    encode_by_name,
    encode_with_object_keys,
    response_code,
    store_host,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, Command
from timeball.edges.remoting.codec.records import Host
from timeball.edges.remoting.connection import Connection
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import InvalidDelay, NotFound, OutOfRange, SetupError, StorageError, Unavailable


class Fields(msgspec.Struct):
    topic: str
    queueId: int = -1  # noqa: N815
    oway: bool = False


def call(**command: object) -> Call:
    """Return a call with request code 10 and these fields of its command. Its connection has no client."""
    loop = asyncio.new_event_loop()
    try:
        return Call(Connection(lambda *_: None, set(), loop), Command(code=10, **command))  # type: ignore[arg-type]
    finally:
        loop.close()


def test_ext_fields_are_converted_to_the_type_of_the_field() -> None:
    result = call(ext={"topic": "t", "queueId": "3", "oway": "true", "unknown": "x"}).fields(Fields)
    assert result == Fields("t", 3, True)


@pytest.mark.parametrize("ext", [{}, {"topic": "t", "queueId": "three"}])
def test_the_refusal_of_an_invalid_field_names_it(ext: dict[str, str]) -> None:
    with pytest.raises(Refused, match=r"topic|queueId") as error:
        call(ext=ext).fields(Fields)
    assert error.value.protocol_code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"topic": 7}', b"\xff", b"[" * 100_000])
def test_an_invalid_body_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="code 10: the body"):
        call(body=body).body(Fields)


def test_an_answer_repeats_opaque_and_serialisation() -> None:
    answer = call(opaque=77, serialisation=BINARY).answer(ext={"a": "b"})
    assert (answer.opaque, answer.serialisation, answer.is_response, answer.ext) == (
        77,
        BINARY,
        True,
        {"a": "b"},
    )


def test_errors_have_response_codes() -> None:
    assert response_code(NotFound("x")) == ResponseCode.TOPIC_NOT_EXIST
    assert response_code(InvalidDelay("x")) == ResponseCode.MESSAGE_ILLEGAL
    assert response_code(OutOfRange("x")) == ResponseCode.INVALID_PARAMETER
    assert response_code(Unavailable("x")) == ResponseCode.SERVICE_NOT_AVAILABLE
    assert response_code(StorageError("x")) == response_code(ValueError()) == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("", "127.0.0.1:{port}"),
        ("10.1.2.3", "10.1.2.3:{port}"),
        ("10.1.2.3:999", "10.1.2.3:999"),
        ("[fe80::1]:999", "[fe80::1]:999"),
        ("fe80::1", "[fe80::1]:{port}"),
        ("localhost", "localhost:{port}"),
    ],
)
def test_the_advertised_address_is_in_routes(tmp_path: Path, advertise: str, address: str) -> None:
    with running_node(tmp_path, advertise=advertise) as node, Wire.to(node) as wire:
        route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102"))
        assert route["brokerDatas"][0]["brokerAddrs"]["0"] == address.format(port=node.node.remoting_port)


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("10.1.2.3:999", bytes([10, 1, 2, 3])),
        ("[::1]:999", bytes(15) + b"\x01"),
        ("localhost:999", bytes([127, 0, 0, 1])),
    ],
)
def test_the_store_host_is_the_advertised_address_as_bytes(
    tmp_path: Path, advertise: str, address: bytes
) -> None:
    with running_node(tmp_path, advertise=advertise) as node, Wire.to(node) as wire:
        wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
        remoting = node.node.edges.remoting
        assert remoting is not None
        [connection] = remoting._connections
        assert store_host(remoting.context, connection) == Host(address, 999)


def test_an_advertised_host_that_cannot_be_resolved_is_refused_at_the_start(tmp_path: Path) -> None:
    running = RunningNode(tmp_path, advertise="no.such.host.invalid:1")
    with pytest.raises(SetupError, match=r"--advertise no\.such\.host\.invalid:1"):
        running.start()


def test_a_disabled_port_is_not_in_routes(tmp_path: Path) -> None:
    with running_node(tmp_path, remoting_port=-1) as node:
        remoting = node.node.edges.remoting
        assert remoting is not None and node.node.remoting_port == -1
        with Wire(node.node.name_server_port) as wire:
            route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102"))
            address = route["brokerDatas"][0]["brokerAddrs"]["0"]
            assert address == f"127.0.0.1:{node.node.name_server_port}"


def test_a_table_with_object_keys_is_encoded_as_by_fastjson() -> None:
    queue = {"brokerName": "b0", "queueId": 0, "topic": "t"}
    table = encode_with_object_keys([(queue, {"maxOffset": 7}), ({**queue, "queueId": 1}, {"maxOffset": 8})])
    assert msgspec.json.encode({"tps": 0.0, "offsetTable": table}) == (
        b'{"tps":0.0,"offsetTable":{'
        b'{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7},'
        b'{"brokerName":"b0","queueId":1,"topic":"t"}:{"maxOffset":8}}}'
    )


@pytest.mark.parametrize("count", [0, 1, 3_000])
def test_a_long_table_is_encoded_in_several_turns_of_the_event_loop(count: int) -> None:
    turns = LoopTurns()

    def entry(number: int) -> tuple[str, object]:
        turns.count()
        return f"t{number}", {"queues": number}

    table, entries_per_turn_max = asyncio.run(turns.most(encode_by_name(range(count), entry)))
    assert msgspec.json.decode(msgspec.json.encode({"table": table})) == {
        "table": {f"t{number}": {"queues": number} for number in range(count)}
    }
    assert entries_per_turn_max == min(count, GROUPS_AT_ONCE)


def test_an_empty_table_is_an_empty_object() -> None:
    assert msgspec.json.encode({"offsetTable": encode_with_object_keys([])}) == b'{"offsetTable":{}}'


def decode_table(body: bytes) -> list[tuple[object, int]]:
    """Decode the entries of the field `table`: (key, value) of each, in order."""
    return list(decode_object_keys(body, "table"))


def test_an_encoded_table_with_object_keys_is_decoded_to_the_same() -> None:
    queues = [({"brokerName": "b0", "queueId": n, "topic": "t"}, n * 7 - 1) for n in range(3)]
    body = msgspec.json.encode(
        {"other": encode_with_object_keys([({"x": 1}, 2)]), "table": encode_with_object_keys(queues)}
    )
    assert decode_table(body) == queues
    assert decode_table(body.replace(b":", b" : ").replace(b",", b" ,\n ")) == queues
    assert decode_table(b'{"table":{}}') == decode_table(b'{"other":{}}') == decode_table(b"") == []


@given(st.binary(max_size=40))
def test_decoding_a_table_ends_at_an_invalid_entry(junk: bytes) -> None:
    for key, value in decode_table(b'{"table":{{"q":1}:5,' + junk):
        assert isinstance(key, dict) and isinstance(value, int)
    assert decode_table(b'{"table":{{"q":1}:5,{\xff}:6}}') == [({"q": 1}, 5)]
    assert decode_table(b'{"table":{{"q":1}:5,{"q":2}:"x"}}') == [({"q": 1}, 5)]
    assert decode_table(b'{"table":{{"q":1}:5,{"q":' + b"[" * 3_000 + b"}:6}}") == [({"q": 1}, 5)]


def test_a_version_has_rocketmqs_names() -> None:
    assert data_version(3, 1_700) == {"stateVersion": 0, "timestamp": 1_700, "counter": 3}
