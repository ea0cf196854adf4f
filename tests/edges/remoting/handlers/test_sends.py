"""Sends over a real connection: answers, stored messages, and refusals."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Command
from timeball.edges.remoting.codec.records import BatchRecord, encode_batch, parse_offset_msg_id
from timeball.model import limits
from timeball.model.message import decode_properties, encode_properties

V2, LONG, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_MESSAGE, RequestCode.SEND_BATCH_MESSAGE
BORN_MS = 1_761_000_000_000


@pytest.fixture
def delay_properties() -> str:
    return "TIMING,__STARTDELIVERTIME"


def send(wire: Wire, body: bytes = b"body", *, code: int = V2, topic: str = "orders", **more: object) -> int:
    """Send a message as Java's client does. Return its opaque."""
    properties = {"UNIQ_KEY": "AB" * 16, "WAIT": "true", "TAGS": "A", **more.pop("properties", {})}  # type: ignore[dict-item]
    fields = {
        "a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": BORN_MS, "h": 0,
        "i": encode_properties(properties), "j": 0, "k": False, "m": False, **more,
    }  # fmt: skip
    return wire.send(code, body, **fields)


def sent(wire: Wire, body: bytes = b"body", **more: object) -> Command:
    return wire.answer_to(send(wire, body, **more))


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
        answer = sent(wire, e=2, h=9, properties={"KEYS": "k1 k2"})
    assert (answer.code, answer.serialisation) == (0, serialisation)
    [row] = rows(node)
    host, seq = parse_offset_msg_id(answer.ext["msgId"])
    assert (host.port, seq) == (node.node.remoting_port, row["seq"])
    assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("2", "0")
    assert answer.ext["transactionId"] == row["unique_key"] == "AB" * 16
    assert (row["tag"], row["keys"], row["body"], row["flag"]) == ("A", "k1 k2", b"body", 9)
    assert (row["queue_id"], row["born_ms"]) == (2, BORN_MS)
    assert "WAIT\x01true" in str(row["properties"])


def test_sends_with_long_names_are_accepted(node: RunningNode, wire: Wire) -> None:
    answer = wire.ask_ok(
        LONG, b"x", producerGroup="g", topic="orders", defaultTopic="TBW102", defaultTopicQueueNums=4, queueId=1,
        sysFlag=0, bornTimestamp=BORN_MS, flag=0, properties="", reconsumeTimes=0,
    )  # fmt: skip
    [row] = rows(node)
    assert answer.ext["transactionId"] == row["unique_key"]
    assert len(str(row["unique_key"])) == 32, "the broker names what its producer did not"
    assert f"UNIQ_KEY\x01{row['unique_key']}" in str(row["properties"])


def test_a_created_topic_has_the_requested_number_of_queues(node: RunningNode, wire: Wire) -> None:
    sent(wire, d=3)
    assert len(node.broker.queues("orders")) == 3
    sent(wire, topic="many", d=100)
    assert len(node.broker.queues("many")) == node.settings.queues_per_topic


def test_a_thousand_in_flight_keep_their_answers_and_their_order(node: RunningNode, wire: Wire) -> None:
    opaques = [send(wire, b"%d" % n, e=n % 4) for n in range(1_000)]
    answers = [wire.answer_to(opaque) for opaque in opaques]
    assert all(answer.code == 0 for answer in answers)
    for queue in range(4):
        mine = [int(a.ext["queueOffset"]) for a in answers if a.ext["queueId"] == str(queue)]
        assert mine == list(range(250))
    by_place = {(r["queue_id"], r["queue_offset"]): r["body"] for r in rows(node)}
    for n, answer in enumerate(answers):
        assert by_place[int(answer.ext["queueId"]), int(answer.ext["queueOffset"])] == b"%d" % n


def test_a_one_way_send_is_stored_and_not_answered(node: RunningNode, wire: Wire) -> None:
    fields = {"a": "g", "b": "orders", "c": "TBW102", "d": 4, "e": 0, "i": ""}
    wire.send(V2, b"quiet", one_way=True, **fields)
    assert sent(wire, b"loud").code == 0
    assert not wire._answers
    assert [row["body"] for row in rows(node)] == [b"quiet", b"loud"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, ResponseCode.NO_PERMISSION),
        ({"topic": "rmq_sys_wheel_timer"}, ResponseCode.NO_PERMISSION),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, ResponseCode.NO_PERMISSION),
        ({"topic": "../../etc/passwd"}, ResponseCode.INVALID_PARAMETER),
        ({"topic": "x" * 128}, ResponseCode.INVALID_PARAMETER),
        ({"e": 99}, ResponseCode.INVALID_PARAMETER),
        ({"properties": {"x": "y" * 32_768}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TAGS": "y" * 256}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"KEYS": "k " * limits.KEYS_PER_MESSAGE_MAX + "k"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"DELAY": "soon"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMER_DELIVER_MS": "99999999999999"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMER_DELAY_SEC": "1x"}}, ResponseCode.MESSAGE_ILLEGAL),
        ({"properties": {"TIMING": "8:00"}}, ResponseCode.MESSAGE_ILLEGAL),
    ],
)
def test_an_invalid_send_is_refused_and_others_are_accepted(
    node: RunningNode, wire: Wire, more: dict[str, object], code: int
) -> None:
    before, bad, after = send(wire), send(wire, **more), send(wire)
    answer = wire.answer_to(bad)
    assert (answer.code, bool(answer.remark)) == (code, True)
    assert wire.answer_to(before).code == wire.answer_to(after).code == 0
    assert len(rows(node)) == 2
    assert {topic.name for topic in node.broker.tables.topics.all()} <= {"orders", "SCHEDULE_TOPIC_XXXX"}


def test_a_body_that_is_too_large_is_refused(wire: Wire) -> None:
    answer = sent(wire, bytes(4 * 1024 * 1024 + 1))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "4194304" in str(answer.remark)
    assert sent(wire, bytes(4 * 1024 * 1024)).code == 0


def test_no_topic_is_created_if_this_is_disabled(node: RunningNode, wire: Wire) -> None:
    object.__setattr__(node.broker.settings, "auto_create_topics", False)
    assert sent(wire).code == ResponseCode.TOPIC_NOT_EXIST


def test_a_batch_has_one_answer_and_consecutive_offsets(node: RunningNode, wire: Wire) -> None:
    records = [
        BatchRecord(0, b"%d" % n, encode_properties({"UNIQ_KEY": f"K{n}", "TAGS": "AB"[n % 2]}))
        for n in range(5)
    ]
    answer = wire.answer_to(send(wire, encode_batch(records), code=BATCH, m=True, e=1))
    assert (answer.code, answer.ext["queueId"], answer.ext["queueOffset"]) == (0, "1", "0")
    assert answer.ext["transactionId"] == "K0,K1,K2,K3,K4"
    seqs = [parse_offset_msg_id(text)[1] for text in answer.ext["msgId"].split(",")]
    result = rows(node)
    assert [row["seq"] for row in result] == seqs
    assert [(row["body"], row["tag"]) for row in result] == [(b"%d" % n, "AB"[n % 2]) for n in range(5)]


def test_a_batch_is_in_one_queue_and_batches_take_turns(node: RunningNode, wire: Wire) -> None:
    body = encode_batch([BatchRecord(0, b"%d" % n, "") for n in range(6)])
    answers = [wire.answer_to(send(wire, body, code=BATCH, m=True, e=-1, d=4)) for _ in range(3)]
    assert [answer.code for answer in answers] == [0, 0, 0]
    assert len({answer.ext["queueId"] for answer in answers}) == 3, "batches go round"
    for queue, (low, high) in node.broker.queues("orders").items():
        here = [answer for answer in answers if answer.ext["queueId"] == str(queue)]
        assert high - low == 6 * len(here)


def test_a_batch_with_too_many_messages_is_refused(wire: Wire) -> None:
    body = encode_batch([BatchRecord(0, b"", "")] * 8_193)
    answer = wire.answer_to(send(wire, body, code=BATCH, m=True))
    assert (answer.code, "8192" in str(answer.remark)) == (ResponseCode.MESSAGE_ILLEGAL, True)


LATER = [
    {"DELAY": "1"}, {"DELAY": "999"}, {"TIMER_DELAY_SEC": "5"}, {"TIMER_DELAY_MS": "5000"}, {"TIMER_DELAY_MS": "0"},
    {"TIMER_DELIVER_MS": "1000"}, {"TIMER_DELIVER_MS": "4000000000000"}, {"TIMING": "08:00:00"},
    {"__STARTDELIVERTIME": "4000000000000"}, {"DELAY": "0", "TIMER_DELAY_SEC": "5"}, {"TIMER_DELAY_SEC": "soon"},
]  # fmt: skip


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize("of_all", [True, False])
def test_a_batch_with_a_delayed_message_is_refused(
    node: RunningNode, of_all: bool, serialisation: int
) -> None:
    """A delay in one message, or in the properties of the MessageBatch itself."""
    first, second = "UNIQ_KEY\x01A\x02", "UNIQ_KEY\x01B\x02"
    with Wire.to(node, serialisation) as wire:
        for property in LATER:
            later = encode_properties({"WAIT": "true", **property})
            body = encode_batch(
                [BatchRecord(0, b"a", first), BatchRecord(0, b"b", second if of_all else second + later)]
            )
            more = {"i": later} if of_all else {}
            answer = wire.answer_to(send(wire, body, code=BATCH, m=True, e=1, **more))
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL, property
    assert rows(node) == []


def test_a_batch_without_delays_is_accepted(node: RunningNode, wire: Wire) -> None:
    for property in ({"DELAY": "0"}, {"DELAY": "-1"}, {"TIMER_OUT_MS": "5", "TIMER_DELAY_SEC": "5"}):
        text = encode_properties({"UNIQ_KEY": "A", **property})
        body = encode_batch([BatchRecord(0, b"a", text)])
        assert wire.answer_to(send(wire, body, code=BATCH, m=True, e=1, i=text)).code == 0
    assert len(rows(node)) == 3


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00\x00\x00\x20" + bytes(40)])
def test_an_invalid_batch_is_refused(wire: Wire, body: bytes) -> None:
    assert wire.answer_to(send(wire, body, code=BATCH, m=True)).code == ResponseCode.MESSAGE_ILLEGAL


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "__STARTDELIVERTIME"])
def test_a_message_with_a_due_time_is_pending_and_can_be_recalled(
    node: RunningNode, wire: Wire, name: str
) -> None:
    due_ms = node.broker.clock.now_ms() + 3_600_000
    answer = sent(wire, properties={name: str(due_ms)})
    assert answer.code == 0
    assert answer.ext["recallHandle"]
    assert rows(node) == []
    [scheduled_row] = [r for b in node.broker.read_log(1, 1 << 60) for r in b.to_pylist() if r["due_ms"]]
    assert scheduled_row["due_ms"] == due_ms


@pytest.mark.parametrize(("hours", "zone"), [(0, ""), (9, " Asia/Tokyo"), (9, "+09:00")])
def test_a_message_with_a_time_of_day_is_due_at_its_next_occurrence(
    node: RunningNode, wire: Wire, hours: int, zone: str
) -> None:
    clock_there = timezone(timedelta(hours=hours))  # the broker's own is UTC
    wall = datetime.fromtimestamp(node.broker.clock.now_ms() // 1000 + 3_600, clock_there)
    text = f"{wall:%H:%M:%S}{zone}"
    assert sent(wire, properties={"TIMING": text}).ext["recallHandle"]
    [scheduled_row] = [r for b in node.broker.read_log(1, 1 << 60) for r in b.to_pylist() if r["due_ms"]]
    assert scheduled_row["due_ms"] == round(wall.timestamp() * 1000)
    assert f"TIMING\x01{text}\x02" in scheduled_row["properties"]


@pytest.mark.parametrize("delay_properties", [""])
def test_user_properties_do_not_delay_unless_enabled(node: RunningNode, wire: Wire) -> None:
    texts = [{"TIMING": "08:00:00"}, {"TIMING": "at noon"}, {"__STARTDELIVERTIME": "4000000000000"}]
    for properties in texts:
        answer = sent(wire, properties=properties)
        assert (answer.code, "recallHandle" in answer.ext) == (0, False)
    body = encode_batch(
        [BatchRecord(0, b"a", encode_properties({"UNIQ_KEY": "A", **each})) for each in texts]
    )
    assert wire.answer_to(send(wire, body, code=BATCH, m=True, e=1)).code == 0
    kept = [decode_properties(str(row["properties"])) for row in rows(node)]
    assert len(kept) == 6
    for properties in texts:
        assert sum(properties.items() <= each.items() for each in kept) == 2


def test_a_retried_message_is_delayed_only_by_its_level(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g"})
    later = {"TIMING": "08:00:00", "__STARTDELIVERTIME": "4000000000000"}
    assert sent(wire, topic="%RETRY%g", properties=later, j=17, l=16, e=0).code == 0
    assert [row["body"] for row in rows(node, "%DLQ%g")] == [b"body"]


def test_a_due_time_in_the_past_is_due_at_once(node: RunningNode, wire: Wire) -> None:
    answer = sent(wire, properties={"TIMER_DELIVER_MS": "1000"})
    assert (answer.code, "recallHandle" in answer.ext) == (0, True)
    eventually(lambda: len(rows(node)) == 1, "it is delivered")


def test_a_priority_selects_the_queue(node: RunningNode, wire: Wire) -> None:
    """As in RocketMQ 5.5: priority 0 is queue 0, and priorities above the last queue go to the last queue."""
    for priority, queue in [("0", "0"), ("2", "2"), ("3", "3"), ("99", "3")]:
        answer = sent(wire, e=1, d=4, properties={"_SYS_MSG_PRIORITY_": priority})
        assert (answer.code, answer.ext["queueId"]) == (0, queue)
    for other in ({"__SHARDINGKEY": "k"}, {"_SYS_MSG_PRIORITY_": "-1"}, {"_SYS_MSG_PRIORITY_": "high"}):
        answer = sent(wire, e=1, properties={"_SYS_MSG_PRIORITY_": "2", **other})
        assert answer.ext["queueId"] == "1"
    assert sorted(int(str(row["queue_id"])) for row in rows(node)) == [0, 1, 1, 1, 2, 3, 3]


def test_a_lite_topic_is_refused(node: RunningNode, wire: Wire) -> None:
    lite = {"UNIQ_KEY": "A", "__LITE_TOPIC": "of-one-chat"}
    answer = sent(wire, properties=lite)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert answer.remark == "'of-one-chat': Timeball has no lite topics; send to a topic"
    body = encode_batch([BatchRecord(0, b"a", encode_properties(lite))])
    assert wire.answer_to(send(wire, body, code=BATCH, m=True, e=1)).code == ResponseCode.MESSAGE_ILLEGAL
    assert rows(node) == []


# ---- unique keys ---------------------------------------------------------------------------------------------------

KEYED = {"TIMER_DELAY_SEC": "3600", "TIMEBALL_UNIQUE_KEY": "order-17"}


def test_a_unique_key_is_a_property(node: RunningNode, wire: Wire) -> None:
    first = sent(wire, properties={**KEYED, "UNIQ_KEY": "FIRST", "KEYS": "k1"})
    rejected = sent(wire, properties={**KEYED, "UNIQ_KEY": "SECOND"})
    assert (
        rejected.code == ResponseCode.MESSAGE_ILLEGAL
        and "'FIRST' with the unique key 'order-17'" in rejected.remark
    )
    kept = sent(wire, properties={**KEYED, "UNIQ_KEY": "SECOND", "TIMEBALL_ON_PENDING": "keep"})
    for name in ("transactionId", "msgId", "recallHandle"):
        assert kept.ext[name] == first.ext[name], name
    replaced = sent(wire, properties={**KEYED, "UNIQ_KEY": "THIRD", "TIMEBALL_ON_PENDING": "replace"})
    assert replaced.code == 0 and replaced.ext["transactionId"] == "THIRD"
    with node.client() as ball:
        assert [ball.get(name).state for name in ("FIRST", "THIRD")] == ["cancelled", "waiting"]
        assert ball.cancel(key="unique:order-17")[0].verdict == "cancelled"
        assert ball.cancel(key="k1")[0].verdict == "already_cancelled"


def test_a_retry_of_a_message_with_a_unique_key_is_an_ordinary_send(node: RunningNode, wire: Wire) -> None:
    sent(wire, properties=KEYED)
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b'{"groupName":"readers"}')
    again = {"UNIQ_KEY": "AGAIN", "TIMEBALL_UNIQUE_KEY": "order-17", "RETRY_TOPIC": "orders"}
    assert sent(wire, topic="%RETRY%readers", j=1, properties=again).code == 0
    assert node.broker.unique_sends.counts["created"] == 1


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMEBALL_UNIQUE_KEY": "two words"},
        {"TIMEBALL_UNIQUE_KEY": "x" * 249},
        {"TIMEBALL_UNIQUE_KEY": "a", "TIMEBALL_ON_PENDING": "drop"},
        {"TIMEBALL_ON_PENDING": "keep"},
    ],
)
def test_a_bad_unique_key_is_refused(wire: Wire, properties: dict[str, str]) -> None:
    assert sent(wire, properties=properties).code == ResponseCode.MESSAGE_ILLEGAL


def test_half_messages_and_batches_have_no_unique_keys(wire: Wire) -> None:
    half = sent(wire, f=4, properties={**KEYED, "PGROUP": "producers", "TRAN_MSG": "true"})
    assert half.code == ResponseCode.MESSAGE_ILLEGAL and "transaction" in half.remark
    record = BatchRecord(0, b"x", encode_properties({"UNIQ_KEY": "A", **KEYED}))
    refused = sent(wire, encode_batch([record]), code=BATCH, m=True)
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL and "one by one" in refused.remark
