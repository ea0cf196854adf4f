"""Sends over a real connection: answers, stored messages, and refusals."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.edges.remoting.codec.codes import MessageFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Command
from timeball.edges.remoting.codec.records import BatchRecord, encode_batch, parse_offset_msg_id
from timeball.edges.remoting.codec.sends import SHORT_NAMES
from timeball.model import limits
from timeball.model.message import decode_properties, encode_properties

V2, LONG, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_MESSAGE, RequestCode.SEND_BATCH_MESSAGE
BORN_MS = 1_761_000_000_000


@pytest.fixture
def delay_properties() -> str:
    return "TIMING,__STARTDELIVERTIME"


def send(
    wire: Wire,
    body: bytes = b"body",
    *,
    code: int = V2,
    topic: str = "orders",
    properties: dict[str, str] | None = None,
    properties_text: str | None = None,
    **fields: object,
) -> int:
    """Send a message as Java's client does, and return its opaque.

    `properties` are added to the usual ones. `properties_text` replaces all of them. `fields` has the names of
    SendFields, or other names as they are sent.
    """
    if properties_text is None:
        usual = {"UNIQ_KEY": "AB" * 16, "WAIT": "true", "TAGS": "A"}
        properties_text = encode_properties({**usual, **(properties or {})})
    header = {
        "group": "producers", "topic": topic, "default_topic": "TBW102", "default_queues": 4, "queue_id": 0,
        "sys_flag": 0, "born_ms": BORN_MS, "flag": 0, "properties": properties_text, "reconsume_times": 0,
        "unit_mode": False, "batch": False, **fields,
    }  # fmt: skip
    return wire.send(code, body, **{SHORT_NAMES.get(name, name): value for name, value in header.items()})


def sent(wire: Wire, body: bytes = b"body", **fields: object) -> Command:
    """Send a message as `send` does, and return its answer."""
    return wire.answer_to(send(wire, body, **fields))  # type: ignore[arg-type]


def rows(node: RunningNode, topic: str = "orders") -> list[dict[str, object]]:
    """Return every visible message of a topic."""
    result: list[dict[str, object]] = []
    for queue, (low, high) in node.broker.queues(topic).items():
        result += node.run(node.broker.read_queue(topic, queue, low, high - low)).to_pylist()
    return result


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_a_message_is_stored_as_sent_and_its_id_is_in_the_answer(
    node: RunningNode, serialisation: int
) -> None:
    with Wire.to(node, serialisation) as wire:
        answer = sent(wire, queue_id=2, flag=9, properties={"KEYS": "k1 k2"})
    assert (answer.code, answer.serialisation) == (0, serialisation)
    [row] = rows(node)
    host, seq = parse_offset_msg_id(answer.ext["msgId"])
    assert (host.port, seq) == (node.node.remoting_port, row["seq"])
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["transactionId"] == row["unique_key"] == "AB" * 16
    assert (row["tag"], row["keys"], row["body"], row["flag"]) == ("A", "k1 k2", b"body", 9)
    assert (row["queue_id"], row["born_ms"]) == (2, BORN_MS)
    assert "WAIT\x01true" in str(row["properties"])


def test_a_send_with_long_field_names_and_no_unique_key_gets_one(node: RunningNode, wire: Wire) -> None:
    answer = wire.ask_ok(
        LONG, b"x", producerGroup="g", topic="orders", defaultTopic="TBW102", defaultTopicQueueNums=4, queueId=1,
        sysFlag=0, bornTimestamp=BORN_MS, flag=0, properties="", reconsumeTimes=0,
    )  # fmt: skip
    [row] = rows(node)
    assert answer.ext["transactionId"] == row["unique_key"]
    assert len(str(row["unique_key"])) == 32, "the broker has created the unique key"
    assert f"UNIQ_KEY\x01{row['unique_key']}" in str(row["properties"])


def test_a_created_topic_has_the_requested_number_of_queues_up_to_the_setting(
    node: RunningNode, wire: Wire
) -> None:
    sent(wire, default_queues=3)
    assert len(node.broker.queues("orders")) == 3
    sent(wire, topic="many", default_queues=100)
    assert len(node.broker.queues("many")) == node.settings.queues_per_topic


def test_a_thousand_pending_sends_are_stored_in_order_and_get_their_own_answers(
    node: RunningNode, wire: Wire
) -> None:
    opaques = [send(wire, b"%d" % number, queue_id=number % 4) for number in range(1_000)]
    answers = [wire.answer_to(opaque) for opaque in opaques]
    assert all(answer.code == 0 for answer in answers)
    for queue in range(4):
        offsets = [
            int(answer.ext["queueOffset"]) for answer in answers if answer.ext["queueId"] == str(queue)
        ]
        assert offsets == list(range(250))
    bodies = {(row["queue_id"], row["queue_offset"]): row["body"] for row in rows(node)}
    for number, answer in enumerate(answers):
        assert bodies[int(answer.ext["queueId"]), int(answer.ext["queueOffset"])] == b"%d" % number


def test_a_one_way_send_is_stored_and_not_answered(node: RunningNode, wire: Wire) -> None:
    send(wire, b"one-way", one_way=True)
    assert sent(wire, b"two-way").code == 0
    assert not wire._answers, "the only answer was that of the second send"
    assert [row["body"] for row in rows(node)] == [b"one-way", b"two-way"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, ResponseCode.NO_PERMISSION),
        ({"topic": "rmq_sys_wheel_timer"}, ResponseCode.NO_PERMISSION),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, ResponseCode.NO_PERMISSION),
        ({"topic": "../../etc/passwd"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "x" * 128}, ResponseCode.INVALID_PARAMETER),
        ({"queue_id": 99}, ResponseCode.INVALID_PARAMETER),
        ({"properties": {"x": "y" * 32_768}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TAGS": "y" * 256}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"KEYS": "k " * limits.KEYS_PER_MESSAGE_MAX + "k"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"DELAY": "soon"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMER_DELIVER_MS": "99999999999999"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMER_DELAY_SEC": "1x"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMING": "8:00"}}, ResponseCode.MESSAGE_ILLEGAL),
    ],
)
def test_an_invalid_send_is_refused_and_the_sends_around_it_are_accepted(
    node: RunningNode, wire: Wire, fields: dict[str, Any], code: int
) -> None:
    before, invalid, after = send(wire), send(wire, **fields), send(wire)
    answer = wire.answer_to(invalid)
    assert (answer.code, bool(answer.remark)) == (code, True)
    assert wire.answer_to(before).code == wire.answer_to(after).code == 0
    assert len(rows(node)) == 2
    topics = {topic.name for topic in node.broker.tables.topics.all()}
    assert topics <= {"orders", "SCHEDULE_TOPIC_XXXX"}, "the refused send has created no topic"


def test_a_body_that_is_too_large_is_refused(wire: Wire) -> None:
    answer = sent(wire, bytes(4 * 1024 * 1024 + 1))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "4194304" in str(answer.remark)
    assert sent(wire, bytes(4 * 1024 * 1024)).code == 0


def test_without_automatic_topics_a_send_to_an_unknown_topic_is_refused(
    node: RunningNode, wire: Wire
) -> None:
    object.__setattr__(node.broker.settings, "auto_create_topics", False)
    assert sent(wire).code == ResponseCode.TOPIC_NOT_EXIST
    assert "orders" not in node.broker.topics()


def sent_batch(wire: Wire, records: list[BatchRecord] | bytes, **fields: object) -> Command:
    """Send a batch in one request, and return its answer."""
    body = records if isinstance(records, bytes) else encode_batch(records)
    return sent(wire, body, code=BATCH, batch=True, **fields)


def test_a_batch_has_one_answer_with_all_ids_in_order(node: RunningNode, wire: Wire) -> None:
    records = [
        BatchRecord(0, b"%d" % number, encode_properties({"UNIQ_KEY": f"K{number}", "TAGS": tag}))
        for number, tag in enumerate("ABABA")
    ]
    answer = sent_batch(wire, records, queue_id=1)
    assert (answer.code, answer.ext["queueId"], answer.ext["queueOffset"]) == (0, "1", "0")
    assert answer.ext["transactionId"] == "K0,K1,K2,K3,K4"
    seqs = [parse_offset_msg_id(text)[1] for text in answer.ext["msgId"].split(",")]
    stored = rows(node)
    assert [(row["seq"], row["queue_offset"]) for row in stored] == list(zip(seqs, range(5), strict=True))
    assert [row["body"] for row in stored] == [b"0", b"1", b"2", b"3", b"4"]
    assert [row["tag"] for row in stored] == list("ABABA")


def test_a_batch_without_a_queue_is_in_one_queue_and_the_next_batch_in_another(
    node: RunningNode, wire: Wire
) -> None:
    records = [BatchRecord(0, b"%d" % number, "") for number in range(6)]
    answers = [sent_batch(wire, records, queue_id=-1, default_queues=4) for _ in range(3)]
    assert [answer.code for answer in answers] == [0, 0, 0]
    queue_ids = [int(answer.ext["queueId"]) for answer in answers]
    assert len(set(queue_ids)) == 3, "the queues take turns"
    for queue_id, (low, high) in node.broker.queues("orders").items():
        assert high - low == 6 * queue_ids.count(queue_id)


def test_a_batch_with_too_many_messages_is_refused(wire: Wire) -> None:
    answer = sent_batch(wire, [BatchRecord(0, b"", "")] * 8_193)
    assert (answer.code, "8192" in str(answer.remark)) == (ResponseCode.MESSAGE_ILLEGAL, True)


DELAYS = [
    {"DELAY": "1"}, {"DELAY": "999"}, {"TIMER_DELAY_SEC": "5"}, {"TIMER_DELAY_MS": "5000"}, {"TIMER_DELAY_MS": "0"},
    {"TIMER_DELIVER_MS": "1000"}, {"TIMER_DELIVER_MS": "4000000000000"}, {"TIMING": "08:00:00"},
    {"__STARTDELIVERTIME": "4000000000000"}, {"DELAY": "0", "TIMER_DELAY_SEC": "5"}, {"TIMER_DELAY_SEC": "soon"},
]  # fmt: skip


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize("is_of_batch", [True, False], ids=["of the batch", "of one message"])
def test_a_batch_with_a_delay_is_refused(node: RunningNode, is_of_batch: bool, serialisation: int) -> None:
    """The delay is in the properties of the MessageBatch itself, or in those of one of its messages."""
    first, second = "UNIQ_KEY\x01A\x02", "UNIQ_KEY\x01B\x02"
    with Wire.to(node, serialisation) as wire:
        for delay in DELAYS:
            delay_text = encode_properties({"WAIT": "true", **delay})
            if is_of_batch:
                records = [BatchRecord(0, b"a", first), BatchRecord(0, b"b", second)]
                answer = sent_batch(wire, records, queue_id=1, properties_text=delay_text)
            else:
                records = [BatchRecord(0, b"a", first), BatchRecord(0, b"b", second + delay_text)]
                answer = sent_batch(wire, records, queue_id=1)
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL, delay
    assert rows(node) == []


def test_a_batch_with_delay_properties_without_effect_is_accepted(node: RunningNode, wire: Wire) -> None:
    for properties in ({"DELAY": "0"}, {"DELAY": "-1"}, {"TIMER_OUT_MS": "5", "TIMER_DELAY_SEC": "5"}):
        text = encode_properties({"UNIQ_KEY": "A", **properties})
        answer = sent_batch(wire, [BatchRecord(0, b"a", text)], queue_id=1, properties_text=text)
        assert answer.code == 0, properties
    assert len(rows(node)) == 3


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x00\x00\x20" + bytes(40)])
def test_an_invalid_batch_is_refused(wire: Wire, body: bytes) -> None:
    assert sent_batch(wire, body).code == ResponseCode.MESSAGE_ILLEGAL


def only_scheduled_row(node: RunningNode) -> dict[str, Any]:
    """Return the only row of the log with a due time."""
    batches = node.broker.read_log(1, 1 << 60)
    [row] = [row for batch in batches for row in batch.to_pylist() if row["due_ms"]]
    return dict(row)


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "__STARTDELIVERTIME"])
def test_a_message_with_a_due_time_is_not_visible_and_gets_a_recall_handle(
    node: RunningNode, wire: Wire, name: str
) -> None:
    due_ms = node.broker.clock.now_ms() + 3_600_000
    answer = sent(wire, properties={name: str(due_ms)})
    assert answer.code == 0
    assert answer.ext["recallHandle"]
    assert rows(node) == []
    assert only_scheduled_row(node)["due_ms"] == due_ms


@pytest.mark.parametrize(("utc_offset_hours", "zone_text"), [(0, ""), (9, " Asia/Tokyo"), (9, "+09:00")])
def test_a_message_with_a_time_of_day_is_due_when_that_zone_shows_it_next(
    node: RunningNode, wire: Wire, utc_offset_hours: int, zone_text: str
) -> None:
    zone = timezone(timedelta(hours=utc_offset_hours))
    in_an_hour = datetime.fromtimestamp(node.broker.clock.now_ms() // 1000 + 3_600, zone)
    text = f"{in_an_hour:%H:%M:%S}{zone_text}"
    assert sent(wire, properties={"TIMING": text}).ext["recallHandle"]
    row = only_scheduled_row(node)
    assert row["due_ms"] == round(in_an_hour.timestamp() * 1000)
    assert f"TIMING\x01{text}\x02" in row["properties"]


@pytest.mark.parametrize("delay_properties", [""])
def test_user_delay_properties_that_are_not_enabled_are_ordinary_properties(
    node: RunningNode, wire: Wire
) -> None:
    """With any text: an application may use these names for other purposes."""
    properties_list = [
        {"TIMING": "08:00:00"}, {"TIMING": "at noon"}, {"__STARTDELIVERTIME": "4000000000000"},
    ]  # fmt: skip
    for properties in properties_list:
        answer = sent(wire, properties=properties)
        assert (answer.code, "recallHandle" in answer.ext) == (0, False)
    records = [
        BatchRecord(0, b"a", encode_properties({"UNIQ_KEY": "A", **properties}))
        for properties in properties_list
    ]
    assert sent_batch(wire, records, queue_id=1).code == 0
    stored = [decode_properties(str(row["properties"])) for row in rows(node)]
    assert len(stored) == 6
    for properties in properties_list:
        assert sum(properties.items() <= each.items() for each in stored) == 2, (
            "once alone, once in the batch"
        )


def test_user_delay_properties_do_not_delay_a_dead_letter(node: RunningNode, wire: Wire) -> None:
    """The properties applied to the first delivery of the message. The 17th attempt of 16 makes it a dead letter."""
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g"})
    properties = {"TIMING": "08:00:00", "__STARTDELIVERTIME": "4000000000000"}
    answer = sent(wire, topic="%RETRY%g", properties=properties, reconsume_times=17, max_reconsume_times=16)
    assert answer.code == 0
    assert [row["body"] for row in rows(node, "%DLQ%g")] == [b"body"]


def test_a_due_time_in_the_past_is_due_at_once(node: RunningNode, wire: Wire) -> None:
    answer = sent(wire, properties={"TIMER_DELIVER_MS": "1000"})
    assert (answer.code, "recallHandle" in answer.ext) == (0, True)
    eventually(lambda: len(rows(node)) == 1, "it is delivered")


def test_a_priority_selects_the_queue_of_its_number_or_the_last_queue(node: RunningNode, wire: Wire) -> None:
    """As in RocketMQ 5.5. The queue in the request does not count."""
    for priority, queue in [("0", "0"), ("2", "2"), ("3", "3"), ("99", "3")]:
        answer = sent(wire, queue_id=1, default_queues=4, properties={"_SYS_MSG_PRIORITY_": priority})
        assert (answer.code, answer.ext["queueId"]) == (0, queue)
    assert sorted(int(str(row["queue_id"])) for row in rows(node)) == [0, 2, 3, 3]


@pytest.mark.parametrize(
    "properties",
    [
        {"_SYS_MSG_PRIORITY_": "2", "__SHARDINGKEY": "k"},  # a FIFO message
        {"_SYS_MSG_PRIORITY_": "-1"},
        {"_SYS_MSG_PRIORITY_": "high"},
    ],
)
def test_a_priority_that_is_invalid_or_of_another_type_of_message_is_ignored(
    node: RunningNode, wire: Wire, properties: dict[str, str]
) -> None:
    answer = sent(wire, queue_id=1, default_queues=4, properties=properties)
    assert (answer.code, answer.ext["queueId"]) == (0, "1")
    assert [row["queue_id"] for row in rows(node)] == [1]


def test_a_message_to_a_lite_topic_is_refused_alone_and_in_a_batch(node: RunningNode, wire: Wire) -> None:
    lite = {"UNIQ_KEY": "A", "__LITE_TOPIC": "of-one-chat"}
    answer = sent(wire, properties=lite)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert answer.remark == "'of-one-chat': Timeball has no lite topics; send to a topic"
    in_batch = sent_batch(wire, [BatchRecord(0, b"a", encode_properties(lite))], queue_id=1)
    assert in_batch.code == ResponseCode.MESSAGE_ILLEGAL
    assert rows(node) == []


# ---- unique keys ---------------------------------------------------------------------------------------------------

KEYED = {"TIMER_DELAY_SEC": "3600", "TIMEBALL_UNIQUE_KEY": "order-17"}


def test_a_unique_key_in_use_refuses_the_send_or_keeps_or_replaces_the_pending_message(
    node: RunningNode, wire: Wire
) -> None:
    first = sent(wire, properties={**KEYED, "UNIQ_KEY": "FIRST", "KEYS": "k1"})
    refused = sent(wire, properties={**KEYED, "UNIQ_KEY": "SECOND"})
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert "'FIRST' with the unique key 'order-17'" in str(refused.remark)
    kept = sent(wire, properties={**KEYED, "UNIQ_KEY": "SECOND", "TIMEBALL_ON_PENDING": "keep"})
    for name in ("transactionId", "msgId", "recallHandle"):
        assert kept.ext[name] == first.ext[name], f"{name}: the answer names the pending message"
    replaced = sent(wire, properties={**KEYED, "UNIQ_KEY": "THIRD", "TIMEBALL_ON_PENDING": "replace"})
    assert replaced.code == 0 and replaced.ext["transactionId"] == "THIRD"
    with node.client() as ball:
        assert [ball.get(name).state for name in ("FIRST", "THIRD")] == ["cancelled", "waiting"]
        # The unique key is also a key by which messages are cancelled.
        assert ball.cancel(key="unique:order-17")[0].verdict == "cancelled"
        assert ball.cancel(key="k1")[0].verdict == "already_cancelled"


def test_the_unique_key_of_a_retried_message_has_no_effect(node: RunningNode, wire: Wire) -> None:
    sent(wire, properties=KEYED)
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b'{"groupName":"readers"}')
    retried = {"UNIQ_KEY": "AGAIN", "TIMEBALL_UNIQUE_KEY": "order-17", "RETRY_TOPIC": "orders"}
    assert sent(wire, topic="%RETRY%readers", reconsume_times=1, properties=retried).code == 0
    assert node.broker.unique_sends.counts["created"] == 1, (
        "only the first message was sent with its unique key"
    )


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMEBALL_UNIQUE_KEY": "two words"},
        {"TIMEBALL_UNIQUE_KEY": "x" * 249},
        {"TIMEBALL_UNIQUE_KEY": "a", "TIMEBALL_ON_PENDING": "drop"},
        {"TIMEBALL_ON_PENDING": "keep"},
    ],
)
def test_an_invalid_unique_key_is_refused(wire: Wire, properties: dict[str, str]) -> None:
    assert sent(wire, properties=properties).code == ResponseCode.MESSAGE_ILLEGAL


def test_a_half_message_or_a_batch_with_a_unique_key_is_refused(wire: Wire) -> None:
    half_properties = {**KEYED, "PGROUP": "producers", "TRAN_MSG": "true"}
    half = sent(wire, sys_flag=int(MessageFlag.TRANSACTION_PREPARED), properties=half_properties)
    assert half.code == ResponseCode.MESSAGE_ILLEGAL and "transaction" in str(half.remark)
    in_batch = sent_batch(wire, [BatchRecord(0, b"x", encode_properties({"UNIQ_KEY": "A", **KEYED}))])
    assert in_batch.code == ResponseCode.MESSAGE_ILLEGAL and "one by one" in str(in_batch.remark)
