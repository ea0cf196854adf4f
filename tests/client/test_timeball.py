"""The class Timeball against a real node: each operation once, from end to end."""

import pickle
from datetime import datetime

import msgspec
import pyarrow as pa
import pytest
from tests.client.awaited import Dial
from tests.node_fixture import RunningNode

import timeball
from timeball import Timeball
from timeball.model import errors, limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, RequestError
from timeball.model.message import READ_SCHEMA, Kind

BOTH_CLIENTS = True


def test_a_receipt_has_the_values_of_the_row_in_the_log(columns: Timeball) -> None:
    receipt = columns.send(
        "receipts", "x", tag="t", keys=["a", "b"], properties={"p": "q"}, after="1h", message_id="my-id"
    )
    (row,) = columns.read_log(receipt.seq, receipt.seq + 1).read_all().to_pylist()
    assert receipt.id == row["unique_key"] == "my-id"
    assert receipt.due_ms == row["due_ms"] == receipt.store_ms + 3_600_000
    assert row["kind"] == Kind.SCHEDULED and row["store_ms"] == receipt.store_ms
    assert (row["tag"], row["keys"], row["properties"]) == ("t", "a b", "p\x01q\x02")
    assert columns.send("receipts", "now").due_ms is None
    at_ms = receipt.store_ms + 100_000
    assert columns.send("receipts", "at", at=at_ms).due_ms == at_ms


def test_a_local_time_is_due_by_the_rules_of_its_zone_and_keeps_its_text(ball: Timeball) -> None:
    local, due_ms = datetime(2030, 1, 31, 9), 1_896_076_800_000  # noqa: DTZ001 - a local time
    for at in (local, "2030-01-31T09:00"):
        receipt = ball.send("local", "x", at=at, zone="Europe/Berlin")
        assert receipt.due_ms == due_ms
        place = ball.get(receipt.id)
        assert place.content is not None
        assert place.content.properties == {"TIMEBALL_LOCAL_TIME": "2030-01-31T09:00:00 Europe/Berlin"}
    summary = ball.send_many([{"body": "x", "at": local, "zone": "Asia/Tokyo"}], topic="local")
    (place,) = [ball.get(message_id) for message_id in summary.ids]
    assert place.due_ms == due_ms - 8 * 3_600_000
    zones = ball.schedules.zones()
    assert {"Europe/Berlin", "Asia/Tokyo"} <= {zone.zone for zone in zones.zones}
    for wrong in ({"at": due_ms}, {"after": "1h"}, {}, {"at": "2030-01-31T09:00Z"}):
        with pytest.raises(InvalidDelay, match="local time"):
            ball.send("local", "x", zone="Europe/Berlin", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"topic": "a/b"}, InvalidMessage),
        ({"topic": ""}, InvalidMessage),
        ({"tag": "t" * 300}, InvalidMessage),
        ({"after": -1}, InvalidDelay),
        ({"after": "1h", "at": 2**41}, InvalidDelay),
        ({"after": "3652d"}, None),
        ({"body": bytes(5 * 1024 * 1024)}, InvalidMessage),
    ],
)
def test_a_send_refuses_invalid_fields_and_accepts_the_longest_delay(
    ball: Timeball, fields: dict[str, object], error: type[Exception] | None
) -> None:
    arguments = {"topic": "t", "body": b"x", **fields}
    if error is None:  # the longest delay
        assert ball.send(**arguments).due_ms  # type: ignore[arg-type]
        return
    with pytest.raises(error):
        ball.send(**arguments)  # type: ignore[arg-type]


def test_messages_are_cancelled_by_id_by_ids_and_by_key(ball: Timeball) -> None:
    first = ball.send("cancels", "x", after="1h", keys="order-1")
    second = ball.send("cancels", "y", after="1h", keys=["order-1", "other"])
    assert [verdict.verdict for verdict in ball.cancel(ids=[first.id, "unknown"])] == [
        "cancelled",
        "not_found",
    ]
    by_key = {verdict.seq: verdict.verdict for verdict in ball.cancel(key="order-1")}
    assert by_key == {first.seq: "already_cancelled", second.seq: "cancelled"}
    verdict = ball.cancel(second.id)
    assert verdict.verdict == "already_cancelled" and verdict.cancelled
    assert ball.cancel(ids=[]) == []
    visible = ball.send("cancels", "now", after="0.05s")
    assert [message.id for message in ball.pull("cancels", "g", wait="60s")] == [visible.id]
    assert ball.cancel(visible.id).verdict == "released"


def test_a_cancel_needs_exactly_one_of_id_ids_and_key(ball: Timeball) -> None:
    with pytest.raises(RequestError, match="one of"):
        ball.cancel()  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="one of"):
        ball.cancel("a", key="b")  # type: ignore[call-overload]


def test_a_text_in_the_place_of_a_list_is_refused(columns: Timeball) -> None:
    rule = {"every": "1h"}
    for call in (
        lambda: columns.schedules.put("texts", rule, topic="abc", body="x", keys="abc"),
        lambda: columns.cancel(ids="abc"),
        lambda: columns.reschedule(ids="abc", after="1h"),
        lambda: columns.resend_dead_letters("abc", "abc"),
        lambda: columns.delete_dead_letters("abc", "abc"),
        lambda: columns.read_log(1, 2, columns="seq"),
    ):
        with pytest.raises(InvalidMessage, match=r"give a list, as in \w+=\['(abc|seq)'\]"):
            call()


def test_messages_are_rescheduled_by_id_by_ids_and_by_key(ball: Timeball) -> None:
    first = ball.send("moves", "x", after="1h", keys="order-2")
    second = ball.send("moves", "y", after="1h", keys=["order-2", "another"])
    at_ms = first.store_ms + 7_200_000
    moved = ball.reschedule(second.id, at=at_ms)
    assert (moved.subject, moved.verdict, moved.due_ms) == (second.id, "rescheduled", at_ms)
    assert moved.seq == second.seq and not moved.cancelled
    assert [verdict.verdict for verdict in ball.reschedule(ids=[first.id, "unknown"], after="30s")] == [
        "rescheduled",
        "not_found",
    ]
    assert {verdict.due_ms for verdict in ball.reschedule(key="order-2", at=at_ms)} == {at_ms}
    assert [verdict.verdict for verdict in ball.reschedule(key="another", after="50ms")] == ["rescheduled"]
    assert [message.id for message in ball.pull("moves", "g", wait="60s")] == [second.id]
    assert ball.reschedule(second.id, after="5s").verdict == "released"
    assert ball.cancel(first.id).verdict == "cancelled"
    assert ball.reschedule(first.id, after="5s").verdict == "already_cancelled"


def test_a_reschedule_needs_exactly_one_name_and_one_time(ball: Timeball) -> None:
    with pytest.raises(RequestError, match="one of"):
        ball.reschedule(after="5s")  # type: ignore[call-overload]
    with pytest.raises(InvalidDelay, match="after= or at="):
        ball.reschedule("a")
    with pytest.raises(InvalidDelay, match="one of them"):
        ball.reschedule("a", after="5s", at=5_000_000_000_000)
    with pytest.raises(InvalidDelay, match="due_ms"):
        ball.reschedule("a", at=250_000_000_000_000)


def test_rows_of_the_log_and_of_a_queue_are_read_as_tables(columns: Timeball) -> None:
    columns.create_topic("tables", 1)
    summary = columns.send_many(
        [{"body": str(i)} | ({"after": "1h"} if i % 2 else {}) for i in range(10)], topic="tables"
    )
    first, rows = summary.ranges[0]
    log = columns.read_log(first, first + rows, coalesce_rows=3)
    assert log.schema == READ_SCHEMA
    assert log.read_all().column("seq").to_pylist() == list(range(first, first + rows))
    due = columns.read_log(first, first + rows, kinds=[Kind.SCHEDULED], columns=["due_ms", "seq"]).read_all()
    assert due.column_names == ["due_ms", "seq"]
    scheduled_rows = columns.read_log(first, first + rows, kinds=[Kind.SCHEDULED]).read_all()
    assert scheduled_rows.select(due.column_names) == due
    assert scheduled_rows.column("body").to_pylist() == [b"1", b"3", b"5", b"7", b"9"]
    queue = columns.read_queue("tables", 0, 1, 3).read_all()
    assert queue.column("body").to_pylist() == [b"2", b"4", b"6"]
    assert columns.queues("tables")[0].max == 5
    with pytest.raises(OutOfRange):
        columns.read_queue("tables", 0, 99, 1)
    with pytest.raises(NotFound):
        columns.read_queue("tables", 7, 0, 1)


def test_a_created_topic_has_its_number_of_queues(ball: Timeball) -> None:
    ball.create_topic("named", 3)
    assert ball.topics()["named"] == 3
    assert sorted(ball.queues("named")) == [0, 1, 2]


def test_the_status_has_the_fields_of_the_broker_and_of_its_log(ball: Timeball) -> None:
    seq = ball.send("figures", "x").seq
    status = ball.status()
    assert status["log"]["durable_seq"] > seq
    assert {
        "version",
        "format",
        "pid",
        "rss_bytes",
        "watermark",
        "settled_before_ms",
        "schedule",
        "table",
    } <= status.keys()


def test_reserved_numbers_are_distinct_and_a_repeated_attach_has_no_effect(columns: Timeball) -> None:
    first = columns.reserve(10)
    assert columns.reserve(5) >= first + 10
    attach_request = msgspec.json.encode({"job": "bulk", "job_id": "none", "epoch": 0})
    attached = columns.attach(attach_request)
    assert not attached.repeated and columns.attach(attach_request).repeated
    with pytest.raises(InvalidMessage):
        columns.attach(b'{"job": "bulk"}')


def test_a_compaction_moves_the_tail_of_the_log_to_the_table(columns: Timeball) -> None:
    receipt = columns.send("compacted", "x", after="2h")
    before = columns.status()
    attached = columns.compact()
    assert attached is not None and attached.watermark > receipt.seq >= before["watermark"]
    assert columns.status()["watermark"] == attached.watermark
    assert columns.cancel(receipt.id).verdict == "cancelled"  # found in the table
    columns.lease_compaction(1_000)


@pytest.mark.parametrize(
    "wrong", [{"batch_rows": 0}, {"batch_rows": 10**9}, {"window": 0}, {"on_refused": "ignore"}]
)
def test_send_many_refuses_a_wrong_option_by_name(columns: Timeball, wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        columns.send_many(pa.table({"body": [b"x"]}), topic="t", **wrong)  # type: ignore[arg-type]


def test_a_time_limit_of_zero_is_refused(dial: Dial) -> None:
    with pytest.raises(RequestError, match="timeout_ms"):
        dial(timeout_ms=0)


def test_get_returns_the_state_and_the_queue_of_a_message(ball: Timeball) -> None:
    receipt = ball.send("places", "x", after="1h")
    assert (ball.get(receipt.id).state, ball.get(receipt.id).due_ms) == ("waiting", receipt.due_ms)
    assert ball.cancel(receipt.id).cancelled
    assert ball.get(receipt.id, "places").state == "cancelled"
    now = ball.send("places", "y")
    place = ball.get(now.id)
    assert (place.state, place.topic, place.seq) == ("visible", "places", now.seq)
    assert place.queue_id is not None and place.queue_offset is not None
    for topic in (None, "elsewhere"):
        with pytest.raises(NotFound, match="no message"):
            ball.get("unknown" if topic is None else now.id, topic)


def test_a_copy_of_a_pickled_client_has_its_own_connection_and_the_same_settings(node: RunningNode) -> None:
    with Timeball(node.http_endpoint, timeout_ms=7_000, access_key="a", secret_key="s") as ball:
        copied_ball = pickle.loads(pickle.dumps(ball))
    with copied_ball:
        assert copied_ball.topics() is not None
        assert (
            copied_ball._operations.timeout_ms == 7_000
            and copied_ball._operations._who == ball._operations._who
        )
    with node.client() as ball, pickle.loads(pickle.dumps(ball)) as copied_ball:
        assert copied_ball.reserve(1) > 0


def test_all_errors_that_a_client_raises_are_exported_by_the_package() -> None:
    for name in timeball.__all__:
        assert getattr(timeball, name) is not None, name
    raised = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    # Only nodes of a cluster raise these to each other, so no call of a client ends with them.
    raised -= {"LeaseLost", "PeerError"}
    assert raised <= set(timeball.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        timeball.nothing  # noqa: B018


def test_dead_letters_are_listed_in_pages_resent_and_deleted(ball: Timeball) -> None:
    ball.send_many([{"body": str(number)} for number in range(3)], topic="resent")
    unanswered = 3
    while unanswered:
        for message in ball.pull("resent", "resends"):
            assert message.dead_letter()
            unanswered -= 1
    page = ball.dead_letters("resends", max_messages=2)
    assert len(page.dead_letters) == 2 and page.next_page is not None
    assert len(ball.dead_letters("resends", after=page.next_page).dead_letters) == 1
    first = page.dead_letters[0]
    assert ball.resend_dead_letters("resends", [first.dead_letter]).found == [True]
    (redelivered,) = ball.pull("resent", "resends")
    assert (redelivered.body, redelivered.attempts, redelivered.ack()) == (first.body, 0, True)
    assert ball.delete_dead_letters("resends").rows == 2
    (state,) = ball.groups("resends")
    assert (state.dead_letters, state.lag) == (0, 0)
    assert state in ball.groups()


def test_all_pages_of_groups_are_read(node: RunningNode, ball: Timeball) -> None:
    names = [f"paged{number:04d}" for number in range(limits.LISTED_ROWS_MAX + 1)]

    async def create_groups() -> None:
        for name in names:
            node.broker.tables.groups.ensure(name)

    node.run(create_groups())
    assert [state.group for state in ball.groups() if state.group.startswith("paged")] == names
