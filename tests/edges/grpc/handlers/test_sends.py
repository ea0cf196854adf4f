"""SendMessage over a real connection: responses, stored rows, and refusals that do not affect other messages."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from tests.edges.grpc.sending import BORN_MS, message, refused, rows, send_request, sent
from tests.edges.grpc.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.topics import READ, WRITE, TopicConfig
from timeball.broker.revoking.cancel import decode_handle
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc.handlers.sends import MESSAGES_MAX
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.message import Kind, decode_properties

Code, Type = definition.Code, definition.MessageType


def test_a_message_is_stored_as_sent_and_answered_with_its_id(node: RunningNode, wire: Wire) -> None:
    sent_message = message(
        tag="A", keys=["k1", "k2"], born_host="10.1.2.3", trace_context="00-ab-cd-01", properties={"who": "Ada"},
        body_digest=definition.Digest(type=definition.DigestType.CRC32, checksum=f"{crc32(b'body'):08X}"),
    )  # fmt: skip
    [entry] = sent(wire, sent_message)
    [row] = rows(node)
    assert entry.message_id == sent_message.system_properties.message_id == row["unique_key"]
    assert (entry.offset, entry.transaction_id, entry.recall_handle) == (0, entry.message_id, "")
    assert (row["tag"], row["keys"], row["body"], row["sys_flag"]) == ("A", "k1 k2", b"body", 0)
    assert (row["born_ms"], row["born_host"], row["due_ms"]) == (BORN_MS, "10.1.2.3", None)
    assert decode_properties(row["properties"]) == {
        "who": "Ada", "TAGS": "A", "KEYS": "k1 k2", "UNIQ_KEY": entry.message_id, "TRACE_CONTEXT": "00-ab-cd-01",
    }  # fmt: skip


def test_a_message_without_born_host_gets_the_peer_s_address(node: RunningNode, wire: Wire) -> None:
    sent(wire, message())
    assert rows(node)[0]["born_host"] == "127.0.0.1"


def test_a_namespace_becomes_a_part_of_the_topic_s_name(node: RunningNode, wire: Wire) -> None:
    sent(wire, message(namespace="shop"))
    assert len(rows(node, "shop%orders")) == 1


def test_messages_of_one_call_use_all_queues_and_are_answered_in_order(node: RunningNode, wire: Wire) -> None:
    messages = [message(b"%d" % n) for n in range(20)]
    entries = sent(wire, *messages)
    assert [e.message_id for e in entries] == [m.system_properties.message_id for m in messages]
    by_id = {row["unique_key"]: row for row in rows(node)}
    assert [by_id[e.message_id]["queue_offset"] for e in entries] == [e.offset for e in entries]
    assert len({row["queue_id"] for row in by_id.values()}) == node.settings.queues_per_topic
    seqs = [by_id[e.message_id]["seq"] for e in entries]
    assert seqs == list(range(seqs[0], seqs[0] + 20)), "the messages are neighbours in the log"


def test_several_delayed_messages_in_one_call_are_accepted(node: RunningNode, wire: Wire) -> None:
    """RocketMQ 5.5.0 answers such a call with INTERNAL_SERVER_ERROR."""
    due_ms = node.broker.clock.now_ms() + 3_600_000
    one, other = sent(wire, message(b"1", due_ms=due_ms), message(b"2", due_ms=due_ms + 1))
    assert one.recall_handle and other.recall_handle and one.recall_handle != other.recall_handle
    with node.client() as ball:
        pending = [ball.get(entry.message_id) for entry in (one, other)]
    assert [scheduled.due_ms - due_ms for scheduled in pending] == [0, 1]


def test_a_gzip_body_is_stored_as_zlib_which_remoting_consumers_read(node: RunningNode, wire: Wire) -> None:
    sent(wire, message(gzip.compress(b"hello " * 1_000), body_encoding=definition.Encoding.GZIP))
    [row] = rows(node)
    assert (zlib.decompress(row["body"]), row["sys_flag"]) == (b"hello " * 1_000, 1)


@pytest.mark.parametrize("body", [b"\x1f\x8b...", b"text", zlib.compress(b"text")])
def test_a_body_that_is_no_gzip_is_refused(node: RunningNode, wire: Wire, body: bytes) -> None:
    response = wire.ask("SendMessage", send_request(message(body, body_encoding=definition.Encoding.GZIP)))
    assert response.status.code == definition.Code.BAD_REQUEST and "no gzip" in response.status.message


def test_a_local_time_stays_beside_the_delivery_timestamp(node: RunningNode, wire: Wire) -> None:
    due_ms = node.broker.clock.now_ms() + 3_600_000
    local = {"TIMEBALL_LOCAL_TIME": "2030-01-31T09:00 Europe/Berlin"}
    [entry] = sent(wire, message(due_ms=due_ms, properties=local))
    with node.client() as ball:
        pending = ball.get(entry.message_id)
        assert pending.due_ms == due_ms and pending.content is not None
        assert pending.content.properties["TIMEBALL_LOCAL_TIME"] == "2030-01-31T09:00:00 Europe/Berlin"


@pytest.mark.parametrize(
    ("local", "delay_ms", "code"),
    [
        ("2030-01-31T09:00 Europe/Berlin", None, definition.Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ("tomorrow", 3_600_000, definition.Code.ILLEGAL_DELIVERY_TIME),
        ("2030-01-31T09:00 Europe/Nowhere", 3_600_000, definition.Code.ILLEGAL_DELIVERY_TIME),
    ],
)
def test_a_local_time_without_a_delay_or_of_another_form_is_refused(
    node: RunningNode, wire: Wire, local: str, delay_ms: int | None, code: definition.Code
) -> None:
    due_ms = None if delay_ms is None else node.broker.clock.now_ms() + delay_ms
    each = message(due_ms=due_ms, properties={"TIMEBALL_LOCAL_TIME": local})
    assert wire.ask("SendMessage", send_request(each)).status.code == code


# ---- FIFO ---------------------------------------------------------------------------------------------------


def test_a_message_group_has_the_same_queue_for_all_clients(node: RunningNode) -> None:
    groups = [f"customer-{n}" for n in range(40)]
    for client in ("one", "two"):
        with Wire.to(node, client) as wire:
            for group in groups:
                sent(wire, message(group.encode(), message_type=Type.FIFO, message_group=group))
    queues_by_group: dict[bytes, set[int]] = {}
    for row in rows(node):
        queues_by_group.setdefault(row["body"], set()).add(row["queue_id"])
        assert decode_properties(row["properties"])["__SHARDINGKEY"] == row["body"].decode()
    assert len(queues_by_group) == 40 and all(len(queues) == 1 for queues in queues_by_group.values())
    assert len(set.union(*queues_by_group.values())) == node.settings.queues_per_topic, (
        "the groups use all queues"
    )


def test_message_groups_use_only_writable_queues(node: RunningNode, wire: Wire) -> None:
    node.broker.tables.topics.configure("orders", TopicConfig(8, 2))
    for n in range(30):
        sent(wire, message(message_type=Type.FIFO, message_group=f"g{n}"))
    assert {row["queue_id"] for row in rows(node)} == {0, 1}


# ---- delays -------------------------------------------------------------------------------------------------


def test_a_delayed_message_is_delivered_at_its_due_millisecond(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        due_ms = clock.wall_ms() + 5_077
        [entry] = sent(wire, message(due_ms=due_ms))
        handle = decode_handle(entry.recall_handle)
        assert handle == ("orders", node.settings.broker_name, due_ms, entry.message_id)
        assert rows(node) == []
        clock.advance(5_076)
        assert node.broker.queues("orders")[0] == (0, 0)
        clock.advance(1)
        eventually(lambda: rows(node), "the message is delivered")
        [row] = rows(node)
        assert (row["kind"], row["due_ms"]) == (Kind.RELEASE, due_ms)
        assert decode_properties(row["properties"])["TIMER_DELIVER_MS"] == str(due_ms)


def test_a_fraction_of_a_millisecond_is_rounded_up(node: RunningNode, wire: Wire) -> None:
    sent_message = message(message_type=Type.DELAY)
    at_s = node.broker.status()["now_ms"] // 1_000 + 600  # type: ignore[operator]
    sent_message.system_properties.delivery_timestamp.seconds = at_s
    sent_message.system_properties.delivery_timestamp.nanos = 7_000_001
    [entry] = sent(wire, sent_message)
    assert decode_handle(entry.recall_handle).timestamp_ms == at_s * 1_000 + 8


@pytest.mark.parametrize("due_ms", [0, 1, -62_135_596_800_000, 1_500_000_000_000])
def test_a_message_that_is_due_already_is_delivered_at_once(
    node: RunningNode, wire: Wire, due_ms: int
) -> None:
    [entry] = sent(wire, message(due_ms=due_ms))
    assert (entry.recall_handle == "") == (due_ms <= 0)
    eventually(lambda: len(rows(node)) == 1, "the message is delivered")


def test_the_answer_has_the_fields_of_rocketmq_s_proxy(wire: Wire) -> None:
    response = wire.ask("SendMessage", send_request(message(message_id="id-1")))
    assert (response.status.code, response.status.message) == (Code.OK, "OK")
    [entry] = response.entries
    assert (entry.status.message, entry.message_id, entry.transaction_id) == ("OK", "id-1", "id-1")


def test_a_delay_of_more_than_ten_years_is_refused(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        sent(wire, message(due_ms=clock.wall_ms() + limits.DELAY_MS_MAX))
        code, sentence = refused(wire, message(due_ms=clock.wall_ms() + limits.DELAY_MS_MAX + 1))
    assert code == Code.ILLEGAL_DELIVERY_TIME
    assert str(limits.DELAY_MS_MAX) in sentence and "3653 days" in sentence


# ---- refused messages -----------------------------------------------------------------------------------------

LONG = "é" * 128  # 256 bytes
REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"topic": ""}, Code.ILLEGAL_TOPIC),
    ({"topic": "../etc"}, Code.ILLEGAL_TOPIC),
    ({"topic": "t" * 128}, Code.ILLEGAL_TOPIC),
    ({"topic": "SCHEDULE_TOPIC_XXXX"}, Code.FORBIDDEN),
    ({"topic": "rmq_sys_wheel_timer"}, Code.FORBIDDEN),
    ({"topic": "%RETRY%nobody"}, Code.CONSUMER_GROUP_NOT_FOUND),
    ({"message_id": ""}, Code.ILLEGAL_MESSAGE_ID),
    ({"message_id": " "}, Code.ILLEGAL_MESSAGE_ID),
    ({"message_id": "a\x01b"}, Code.ILLEGAL_MESSAGE_ID),
    ({"message_id": "i" * 256}, Code.ILLEGAL_MESSAGE_ID),
    ({"body": b""}, Code.MESSAGE_BODY_EMPTY),
    ({"body": b"x" * (limits.BODY_BYTES_MAX + 1)}, Code.MESSAGE_BODY_TOO_LARGE),
    ({"body_encoding": 7}, Code.BAD_REQUEST),
    ({"body_digest": definition.Digest(type=definition.DigestType.CRC32, checksum="0")}, Code.MESSAGE_CORRUPTED),
    ({"body_digest": definition.Digest(type=definition.DigestType.MD5, checksum="ff")}, Code.MESSAGE_CORRUPTED),
    ({"body_digest": definition.Digest(type=definition.DigestType.SHA1)}, Code.MESSAGE_CORRUPTED),
    ({"body_digest": definition.Digest(type=9, checksum="ff")}, Code.BAD_REQUEST),
    ({"tag": "a|b"}, Code.ILLEGAL_MESSAGE_TAG),
    ({"tag": " "}, Code.ILLEGAL_MESSAGE_TAG),
    ({"tag": "a\nb"}, Code.ILLEGAL_MESSAGE_TAG),
    ({"tag": LONG}, Code.ILLEGAL_MESSAGE_TAG),
    ({"keys": ["k", " "]}, Code.ILLEGAL_MESSAGE_KEY),
    ({"keys": ["k\x02"]}, Code.ILLEGAL_MESSAGE_KEY),
    ({"keys": ["k"] * (limits.KEYS_PER_MESSAGE_MAX + 1)}, Code.ILLEGAL_MESSAGE_KEY),
    ({"keys": [""] * (limits.KEYS_PER_MESSAGE_MAX + 1)}, Code.ILLEGAL_MESSAGE_KEY),
    ({"keys": ["a b"] * (limits.KEYS_PER_MESSAGE_MAX // 2 + 1)}, Code.ILLEGAL_MESSAGE_KEY),
    ({"keys": ["k" * (limits.KEYS_BYTES_MAX // 2 + 1)] * 2}, Code.ILLEGAL_MESSAGE_KEY),
    ({"message_type": Type.FIFO, "message_group": "g" * 65}, Code.ILLEGAL_MESSAGE_GROUP),
    ({"message_type": Type.FIFO, "message_group": "g\n"}, Code.ILLEGAL_MESSAGE_GROUP),
    ({"message_type": Type.FIFO, "message_group": " "}, Code.ILLEGAL_MESSAGE_GROUP),
    ({"properties": {f"p{n}": "v" for n in range(129)}}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
    ({"properties": {"p": "v" * 16_384}}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
    ({"properties": {"TAGS": "v"}}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"properties": {"TIMER_DELAY_SEC": "5"}}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"properties": {"": "v"}}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"properties": {"p\x01q": "v"}}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"properties": {"p": "v\x02DELAY\x011"}}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"trace_context": "\x02DELAY\x011"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
    ({"trace_context": "t" * 32_000, "properties": {"p": "v" * 16_000}}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
    ({"due_ms": limits.INSTANT_MS_MAX}, Code.ILLEGAL_DELIVERY_TIME),
    ({"message_type": Type.DELAY}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"message_type": Type.FIFO}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"due_ms": 1, "message_group": "g"}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"message_group": "g"}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"message_type": Type.TRANSACTION, "message_group": "g"}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"message_type": Type.LITE}, Code.UNSUPPORTED),
    ({"message_type": Type.PRIORITY}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"message_type": 77}, Code.UNSUPPORTED),  # no member of the enumeration
    ({"lite_topic": "l"}, Code.UNSUPPORTED),
    ({"priority": 1, "message_type": Type.NORMAL}, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ({"priority": -1, "message_type": Type.PRIORITY}, Code.BAD_REQUEST),
]  # fmt: skip


def test_an_invalid_message_is_refused_with_its_code(node: RunningNode, wire: Wire) -> None:
    for fields, code in REFUSED:
        actual_code, sentence = refused(wire, message(**fields))
        assert (definition.Code.Name(actual_code), fields) == (definition.Code.Name(code), fields), sentence
    sent(wire, message())
    assert len(rows(node)) == 1
    assert [name for name in node.broker.topics() if name != "orders"] == [], (
        "refused messages create no topic"
    )


def test_concurrent_valid_and_invalid_messages_get_their_own_answers(node: RunningNode, wire: Wire) -> None:
    good = [wire.later("SendMessage", send_request(message(b"%d" % n))) for n in range(200)]
    calls = [(wire.later("SendMessage", send_request(message(**fields))), code) for fields, code in REFUSED]
    good += [wire.later("SendMessage", send_request(message(b"%d" % n))) for n in range(200, 400)]
    assert [call.result().status.code for call, _ in calls] == [code for _, code in calls]
    assert {call.result().status.code for call in good} == {Code.OK}
    assert {row["body"] for row in rows(node)} == {b"%d" % n for n in range(400)}


def test_one_invalid_message_refuses_the_whole_call(node: RunningNode, wire: Wire) -> None:
    code, _ = refused(wire, message(), message(tag="a|b"), message())
    assert code == Code.ILLEGAL_MESSAGE_TAG
    assert refused(wire, message(), message(topic="others"))[0] == Code.BAD_REQUEST
    assert refused(wire, message(), message(message_type=Type.TRANSACTION))[0] == Code.BAD_REQUEST
    assert refused(wire)[0] == Code.BAD_REQUEST
    assert refused(wire, *(message() for _ in range(MESSAGES_MAX + 1)))[0] == Code.BAD_REQUEST
    assert node.broker.topics() == {}
    assert len(sent(wire, *(message() for _ in range(MESSAGES_MAX)))) == MESSAGES_MAX


def test_a_too_large_request_is_refused_before_it_is_decoded(wire: Wire) -> None:
    """The HTTP/2 layer refuses the request before it is decoded, and the connection continues."""
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
        wire.ask("SendMessage", send_request(message(b"x" * (5 * 1024 * 1024))))
    sent(wire, message())


CRC = crc32(b"body")


@pytest.mark.parametrize(
    ("digest_type", "checksum"),
    [
        ("CRC32", f"{CRC:08X}"),
        ("CRC32", f"{CRC:x}"),
        ("CRC32", f"00{CRC:X}"),
        ("CRC32", str(CRC)),  # in decimal, as RocketMQ's Node client writes it
        ("MD5", hashlib.md5(b"body").hexdigest().upper()),
        ("SHA1", hashlib.sha1(b"body").hexdigest()),
    ],
)
def test_a_correct_digest_in_the_form_of_any_client_is_accepted(
    wire: Wire, digest_type: str, checksum: str
) -> None:
    sent(wire, message(body_digest=definition.Digest(type=digest_type, checksum=checksum)))


# ---- topics ---------------------------------------------------------------------------------------------------


def test_without_auto_creation_a_send_to_an_unknown_topic_is_refused(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", auto_create_topics=False) as node, Wire.to(node) as wire:
        assert refused(wire, message())[0] == Code.TOPIC_NOT_FOUND
        node.run(node.broker.create_topic("orders", 1))
        sent(wire, message())
        assert len(rows(node)) == 1


def test_only_an_accepted_message_creates_its_topic(node: RunningNode, wire: Wire) -> None:
    before = node.broker.topics()
    for n, (fields, _) in enumerate(REFUSED):
        refused(wire, message(**{"topic": f"topic-{n}", **fields}))
    assert node.broker.topics() == before
    later_ms = node.broker.status()["now_ms"] + 60_000  # type: ignore[operator]
    fields_of_sends: list[dict[str, Any]] = [
        {}, {"due_ms": later_ms}, {"message_type": Type.FIFO, "message_group": "g"}, {"message_type": Type.TRANSACTION},
    ]  # fmt: skip
    for n, fields in enumerate(fields_of_sends):
        sent(wire, message(topic=f"new-{n}", **fields))
        assert node.broker.topics()[f"new-{n}"] == {"queues": node.settings.queues_per_topic}


def test_changed_permissions_of_a_topic_apply_to_the_next_message(node: RunningNode, wire: Wire) -> None:
    sent(wire, message())
    node.broker.tables.topics.configure("orders", TopicConfig(perm=READ))
    assert refused(wire, message())[0] == Code.FORBIDDEN
    node.broker.tables.topics.configure("orders", TopicConfig(perm=READ | WRITE))
    sent(wire, message())


FIELDS_OF_TYPE: dict[int, dict[str, Any]] = {
    Type.NORMAL: {},
    Type.FIFO: {"message_group": "g"},
    Type.DELAY: {"due_ms": 1},
    Type.TRANSACTION: {},
}


@pytest.mark.parametrize("name", ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "UNSPECIFIED", ""])
def test_a_topic_accepts_messages_of_its_type(tmp_path: Path, name: str) -> None:
    attributes = {"message.type": name} if name else {}
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        node.broker.tables.topics.configure("orders", TopicConfig(attributes=attributes))
        for message_type, fields in FIELDS_OF_TYPE.items():
            sent_message = message(**{"message_type": message_type, **fields})
            if name in ("MIXED", "UNSPECIFIED", "", Type.Name(message_type)):
                sent(wire, sent_message)
                continue
            code, sentence = refused(wire, sent_message)
            assert code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
            assert name in sentence and "--no-check-message-types" in sentence


def test_without_type_checks_a_topic_accepts_all_types(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", check_message_types=False) as node, Wire.to(node) as wire:
        node.broker.tables.topics.configure("orders", TopicConfig(attributes={"message.type": "NORMAL"}))
        for message_type, fields in FIELDS_OF_TYPE.items():
            sent(wire, message(**{"message_type": message_type, **fields}))


def test_an_unspecified_type_is_derived_from_the_fields(node: RunningNode, wire: Wire) -> None:
    node.broker.tables.topics.configure("fifo", TopicConfig(attributes={"message.type": "FIFO"}))
    sent(wire, message(topic="fifo", message_type=Type.MESSAGE_TYPE_UNSPECIFIED, message_group="g"))
    assert (
        refused(wire, message(topic="fifo", message_type=Type.MESSAGE_TYPE_UNSPECIFIED))[0]
        == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    )


# ---- many at a time -------------------------------------------------------------------------------------------


def test_concurrent_clients_get_their_own_answers(node: RunningNode) -> None:
    def produce(client: int) -> dict[str, bytes]:
        with Wire.to(node, f"client-{client}") as wire:
            messages = [message(b"%d/%d" % (client, n)) for n in range(100)]
            calls = [wire.later("SendMessage", send_request(each)) for each in messages]
            answers = [call.result() for call in calls]
        assert {a.status.code for a in answers} == {Code.OK}
        assert [a.entries[0].message_id for a in answers] == [
            m.system_properties.message_id for m in messages
        ]
        return {m.system_properties.message_id: m.body for m in messages}

    with ThreadPoolExecutor(8) as pool:
        expected = {id_: body for part in pool.map(produce, range(8)) for id_, body in part.items()}
    assert {row["unique_key"]: row["body"] for row in rows(node)} == expected
    assert node.broker.status()["log"]["commits"] < 800, "calls share commits"  # type: ignore[index]


def test_acknowledged_messages_are_there_after_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        ids = [sent(wire, message())[0].message_id for _ in range(5)]
    with running_node(tmp_path / "data") as node:
        assert {row["unique_key"] for row in rows(node)} == set(ids)


# ---- unique keys ---------------------------------------------------------------------------------------------------


def keyed_message(node: RunningNode, on_pending: str = "", **more: Any) -> definition.Message:
    """Return a message that is due in an hour, with a unique key as a user property."""
    properties = {
        "TIMEBALL_UNIQUE_KEY": "order-17",
        **({"TIMEBALL_ON_PENDING": on_pending} if on_pending else {}),
    }
    return message(due_ms=node.broker.clock.now_ms() + 3_600_000, properties=properties, **more)


def test_a_unique_key_is_a_user_property(node: RunningNode, wire: Wire) -> None:
    [first] = sent(wire, keyed_message(node))
    code, text = refused(wire, keyed_message(node))
    assert code == Code.BAD_REQUEST and "is pending" in text
    [kept] = sent(wire, keyed_message(node, "keep"))
    assert (kept.message_id, kept.recall_handle) == (first.message_id, first.recall_handle)
    [new] = sent(wire, keyed_message(node, "replace"))
    with node.client() as ball:
        states = [ball.get(entry.message_id).state for entry in (first, new)]
    assert states == ["cancelled", "waiting"] and new.message_id != first.message_id


def test_a_unique_key_is_of_a_single_message_outside_of_transactions(node: RunningNode, wire: Wire) -> None:
    assert "sent alone" in refused(wire, keyed_message(node), keyed_message(node))[1]
    half = message(message_type=Type.TRANSACTION, properties={"TIMEBALL_UNIQUE_KEY": "a"})
    assert "transaction" in refused(wire, half)[1]
