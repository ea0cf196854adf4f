"""Sends of one and of many messages: known outcomes, refusals, and which sends are repeated."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace
from tests.client.cutting_proxy import cutting_proxy
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import AsyncTimeball, Timeball
from timeball.client.attempts import Lost, NotNow
from timeball.client.receipts import Receipt
from timeball.client.sender import wait_for_ack
from timeball.model.answers import SendAck
from timeball.model.errors import Conflict, InvalidMessage, InvalidName, RequestError, Unavailable


@pytest.fixture(scope="session")
def node(flight_node: RunningNode) -> RunningNode:
    """This module is about Flight."""
    return flight_node


def test_threads_share_a_client(ball: Timeball) -> None:
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda i: ball.send("threads", str(i)), range(400)))
    seqs = {receipt.seq for receipt in receipts}
    assert len(seqs) == 400 and len({receipt.id for receipt in receipts}) == 400
    rows = ball.read_log(min(seqs), max(seqs) + 1).read_all()
    kept = {row["seq"]: (row["unique_key"], row["body"]) for row in rows.to_pylist()}
    for number, receipt in enumerate(receipts):
        assert kept[receipt.seq] == (receipt.id, str(number).encode())


def test_many_rows_are_all_there(ball: Timeball) -> None:
    bodies = [b"%d" % i for i in range(20_000)]
    summary = ball.send_many(pa.table({"body": bodies}), topic="many", batch_rows=999)
    assert summary.rows == 20_000 and summary.refused == []
    assert sum(rows for _, rows in summary.ranges) == 20_000
    # By ranges: the broker may write rows of its own between two batches.
    kept = pa.concat_tables(ball.read_log(seq, seq + rows).read_all() for seq, rows in summary.ranges)
    assert kept.column("body").to_pylist() == bodies
    assert kept.column("unique_key").to_pylist() == summary.ids.to_pylist()


def test_a_send_of_no_rows_has_an_empty_summary(ball: Timeball) -> None:
    summary = ball.send_many([], topic="many")
    assert (summary.rows, summary.ranges, len(summary.ids)) == (0, [], 0)


def rows_with_one_bad() -> list[dict[str, str]]:
    return [{"topic": "bad/name" if i == 5 else "mixed", "body": str(i)} for i in range(10)]


def test_a_refused_batch_raises_and_says_what_was_accepted(ball: Timeball) -> None:
    with pytest.raises(InvalidMessage, match=r"rows 5 to 5: .*topic.*accepted: rows 0 to 4, 6") as caught:
        ball.send_many(rows_with_one_bad(), batch_rows=1)
    summary = caught.value.summary
    taken = {each.first_row for each in summary.accepted}
    assert taken >= {0, 1, 2, 3, 4} and [each.first_row for each in summary.refused] == [5]
    assert summary.unknown == [] and len(summary.ids) == summary.rows == len(taken) + 1
    # Only the remaining rows are sent again: each message is there once.
    left = [row | {"topic": "mixed"} for at, row in enumerate(rows_with_one_bad()) if at not in taken]
    more = ball.send_many(left)
    seqs = [seq for seq, _ in summary.ranges] + [
        first + at for first, rows in more.ranges for at in range(rows)
    ]
    kept = ball.read_log(min(seqs), max(seqs) + 1).read_all()
    by_seq = dict(zip(kept.column("seq").to_pylist(), kept.column("body").to_pylist()))
    assert sorted(by_seq[seq] for seq in seqs) == [b"%d" % i for i in range(10)]


def as_rows(rows: int, bad: int, kind: str) -> Any:
    dicts = [{"topic": "bad/name" if at == bad else "whole", "body": str(at)} for at in range(rows)]
    if kind == "dicts":
        return dicts
    table = pa.Table.from_pylist(dicts)
    return (
        pa.concat_tables([table.slice(at, 700) for at in range(0, rows, 700)]) if kind == "chunks" else table
    )


@pytest.mark.parametrize("kind", ["dicts", "table", "chunks"])
def test_twenty_thousand_rows_are_accepted_whole_or_not_at_all(ball: Timeball, kind: str) -> None:
    before = ball.send("whole", "before").seq
    with pytest.raises(InvalidMessage, match=r"bad/name.*no row of this call was accepted") as caught:
        ball.send_many(as_rows(20_000, 14_500, kind))
    assert (caught.value.summary.accepted, caught.value.summary.unknown) == ([], [])
    assert ball.send_many(as_rows(20_000, -1, kind)).rows == 20_000
    after = ball.send("whole", "after").seq
    rows = ball.read_log(before, after + 1, kinds=[1]).read_all()
    assert rows.num_rows == 20_002


def test_more_than_a_batch_says_what_was_accepted_also_when_its_own_rows_are_wrong(ball: Timeball) -> None:
    rows = [{"body": "x"} for _ in range(70_000)]
    rows[69_000] = {"body": 5}  # type: ignore[dict-item]
    with pytest.raises(InvalidMessage, match=r"accepted: rows 0 to 65535; no other row was") as caught:
        ball.send_many(rows, topic="large")
    assert sum(each.rows for each in caught.value.summary.accepted) == 65_536
    rows = [{"body": b"x" * 300_000} for _ in range(30)]
    summary = ball.send_many(rows, topic="large")  # more bytes than one batch may have
    assert len(summary.accepted) > 1 and sum(each.rows for each in summary.accepted) == 30


def test_of_lost_answers_the_rows_are_told_as_unknown(node: RunningNode) -> None:
    with cutting_proxy(node.endpoint) as proxy, Timeball(proxy.endpoint) as ball:
        assert ball.send_many([{"body": "a"}], topic="cut").rows == 1
        with ThreadPoolExecutor(1) as pool:
            proxy.hold()
            sending = pool.submit(ball.send_many, [{"body": "b"}] * 4, topic="cut", batch_rows=2)
            with Timeball(node.endpoint) as look:
                eventually(
                    lambda: sum(queue.max for queue in look.queues("cut").values()) >= 5, "it has them"
                )
            proxy.cut()
            with pytest.raises(Lost, match="may or may not be accepted: rows 0 to 3") as caught:
                sending.result(BOUND_S)
        summary = caught.value.summary
        assert summary.accepted == summary.refused == []
        assert sorted(each.first_row for each in summary.unknown) == [0, 2]


def test_refused_batches_can_be_collected(ball: Timeball) -> None:
    summary = ball.send_many(rows_with_one_bad(), batch_rows=1, window=3, on_refused="collect")
    assert summary.rows == 10 and len(summary.ranges) == 9
    (refused,) = summary.refused
    assert (refused.first_row, refused.rows, type(refused.error)) == (5, 1, InvalidName)


def test_a_wrong_table_is_refused_by_column(ball: Timeball) -> None:
    with pytest.raises(InvalidMessage, match="unknown column 'delay'"):
        ball.send_many(pa.table({"body": [b"x"], "delay": [5]}), topic="t")


def test_columns_that_come_later_are_not_left_out(ball: Timeball) -> None:
    rows = [{"body": "a"}, {"body": "b", "queue_id": 3}, {"body": "c"}]
    summary = ball.send_many(iter(rows), topic="varied", batch_rows=1)  # three batches, two schemas
    seqs = [first for first, _ in summary.ranges]
    kept = ball.read_log(seqs[0], seqs[-1] + 1).read_all()
    by_body = dict(zip(kept.column("body").to_pylist(), kept.column("queue_id").to_pylist()))
    assert by_body.keys() == {b"a", b"b", b"c"} and by_body[b"b"] == 3
    with pytest.raises(InvalidMessage, match="unknown column 'extra'"):
        ball.send_many(iter([{"body": b"x"}, {"body": b"x", "extra": 1}]), topic="varied", batch_rows=1)


def test_the_next_send_after_a_restart_needs_no_help(data: Path) -> None:
    with running_node(data) as node, Timeball(node.endpoint) as ball:
        first = ball.send("again", "1")
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        second = ball.send("again", "2")
        restart.join(BOUND_S)
        assert second.seq > first.seq
        kept = ball.read_log(first.seq, second.seq + 1, kinds=[1]).read_all()
        assert kept.column("body").to_pylist() == [b"1", b"2"]


@pytest.mark.usefixtures("no_pauses")
def test_nobody_there_is_unavailable() -> None:
    with Timeball("grpc://127.0.0.1:1") as ball:
        for retry in (False, True):
            with pytest.raises(Unavailable, match="no broker answers"):
                ball.send("t", "x", retry=retry)
        with pytest.raises(Unavailable):
            ball.send_many([{"body": "x"}], topic="t")


def test_an_answer_that_does_not_come_is_lost_not_refused() -> None:
    never: Future[SendAck] = Future()
    with pytest.raises(Lost, match="may or may not have been accepted"):
        wait_for_ack(never, 1, "grpc://somewhere")


def test_a_send_that_is_repeated_by_its_id_is_one(data: Path) -> None:
    with running_node(data) as node, Timeball(node.endpoint) as ball:
        sent = [ball.send("again", "1", message_id="order-1", after="1h", retry=True) for _ in range(2)]
        node.stop()
        node.start()
        sent.append(ball.send("again", "1", message_id="order-1", after="1h", retry=True))
        assert [one.outcome for one in sent] == ["created", "exists", "exists"]
        assert [replace(one, outcome="created") for one in sent[1:]] == [sent[0], sent[0]]
        with pytest.raises(Conflict, match="a send of other messages"):
            ball.send("again", "2", message_id="order-1", after="1h", retry=True)
        other = ball.send("others", "1", message_id="order-1", after="1h", retry=True)
        assert other.seq > sent[0].seq, "another topic's ids are its own"


def test_a_repeated_send_is_told_the_current_state_and_may_be_sent_anew(node: RunningNode) -> None:
    async def by_async(**wanted: Any) -> Receipt:
        async with AsyncTimeball(node.endpoint) as ball:
            return await ball.send("anew", "1", message_id="order-1", after="1h", retry=True, **wanted)

    with Timeball(node.endpoint) as ball:
        first = ball.send("anew", "1", message_id="order-1", after="1h", retry=True)
        moved = ball.reschedule("order-1", after="3h")
        again = asyncio.run(by_async())
        assert (again.outcome, again.state, again.due_ms) == ("exists", "waiting", moved.due_ms)
        assert asyncio.run(by_async(if_settled="send")) == again
        ball.cancel("order-1")
        assert asyncio.run(by_async()).state == "cancelled"
        anew = asyncio.run(by_async(if_settled="send"))
        assert (anew.outcome, anew.state) == ("created", "waiting") and anew.seq > first.seq
        assert ball.get("order-1").seq == anew.seq
        rows = [{"topic": "anew", "body": str(n), "message_id": f"n{n}", "after": "1h"} for n in range(2)]
        ball.send_many(rows, retry=True)
        (existing,) = ball.send_many(rows, retry=True).existing
        assert (existing.first_row, [each.state for each in existing.states]) == (0, ["waiting"] * 2)
        ball.cancel(ids=["n0", "n1"])
        assert ball.send_many(rows, retry=True, if_settled="send").existing == []
        for wrong in ({"if_settled": "send"}, {"if_settled": "never", "retry": True}):
            with pytest.raises(RequestError, match="if_settled="):
                ball.send("anew", "1", **wrong)  # type: ignore[arg-type]


ROWS = [{"topic": "lost", "body": str(n), "message_id": f"m{n}"} for n in range(3)]


def sent_with_lost_answers(node: RunningNode, *, retry: bool) -> list[bytes]:
    """Send while no answer passes. Cut the connection when the messages are in the log, and return them."""
    with (
        cutting_proxy(node.endpoint) as proxy,
        Timeball(proxy.endpoint) as ball,
        Timeball(node.endpoint) as look,
    ):
        first = ball.send("lost", "first").seq

        def found() -> list[bytes]:
            rows = look.read_log(first + 1, first + 100, kinds=[1]).read_all()
            return [body for body in rows.column("body").to_pylist() if body != b"first"]

        for count, send in (
            (3, lambda: ball.send_many(ROWS, batch_rows=2, retry=retry)),
            (4, lambda: ball.send("lost", "last", retry=retry)),
        ):
            with ThreadPoolExecutor(1) as pool:
                proxy.hold()
                sending = pool.submit(send)
                eventually(lambda count=count: len(found()) >= count, "the broker has them")
                proxy.cut()
                sending.result(BOUND_S)
        return found()


def test_messages_whose_answers_were_lost_are_sent_once(node: RunningNode) -> None:
    assert sent_with_lost_answers(node, retry=True) == [b"0", b"1", b"2", b"last"]


def test_without_keys_a_lost_answer_is_told(node: RunningNode) -> None:
    """The negative control: the answers are lost indeed."""
    with pytest.raises(Lost, match="may or may not have been accepted"):
        sent_with_lost_answers(node, retry=False)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[tuple[RunningNode, RunningNode]]:
    with running_node(tmp_path / "a") as first, running_node(tmp_path / "b") as second:
        yield first, second
        for node in (first, second):
            node.broker.log.writer._closing = False


def both(nodes: tuple[RunningNode, RunningNode]) -> str:
    first, second = nodes
    return f"{first.endpoint},{second.endpoint.removeprefix('grpc://')}"


def rows_in(node: RunningNode) -> int:
    """Return how many messages of the topic are in a node's log."""
    with Timeball(node.endpoint) as ball:
        topics = ball.read_log(1, node.broker.log.writer.next_seq, kinds=[1]).read_all().column("topic")
        return sum(topic == "there" for topic in topics.to_pylist())


def refuse(node: RunningNode) -> None:
    """Make the log refuse new rows, as at the beginning of a hand-over."""
    node.broker.log.writer._closing = True


def test_a_broker_that_hands_over_costs_no_error(two_nodes: tuple[RunningNode, RunningNode]) -> None:
    """A refusal says that nothing was done, so another node is asked, also without `retry`."""
    first, second = two_nodes
    with Timeball(both(two_nodes)) as ball:
        before = ball.send("there", "before")
        refuse(first)
        assert ball.send("there", "after").seq == before.seq, "the first row of another log"
        assert ball.send_many([{"topic": "there", "body": str(n)} for n in range(9)], batch_rows=2).rows == 9
    assert (rows_in(first), rows_in(second)) == (1, 10)


def test_rows_refused_in_the_middle_of_many_go_on(two_nodes: tuple[RunningNode, RunningNode]) -> None:
    first, second = two_nodes

    def rows() -> Iterator[dict[str, str]]:
        for n in range(400):
            if n == 200:
                refuse(first)
            yield {"topic": "there", "body": str(n)}

    with Timeball(both(two_nodes)) as ball:
        assert ball.send_many(rows(), batch_rows=10).rows == 400
    assert rows_in(first) + rows_in(second) == 400
    assert rows_in(first) > 0 and rows_in(second) > 0


def test_a_verb_that_is_refused_is_asked_of_another(two_nodes: tuple[RunningNode, RunningNode]) -> None:
    first, _ = two_nodes
    with Timeball(both(two_nodes)) as ball:
        sent = ball.send("there", "x", after="1h")
        refuse(first)
        (verdict,) = ball.cancel(ids=[sent.id])
    assert verdict.verdict == "not_found", "the word of the other node, whose log is another"


@pytest.mark.usefixtures("no_pauses")
def test_a_broker_alone_that_stops_is_told(node: RunningNode) -> None:
    """The control: the refusal is real, and the last attempt's is raised."""
    with Timeball(node.endpoint) as ball:
        refuse(node)
        try:
            with pytest.raises(NotNow, match="stopping"):
                ball.send("there", "x")
        finally:
            node.broker.log.writer._closing = False


def test_a_closed_client_sends_nothing(node: RunningNode) -> None:
    ball = Timeball(node.endpoint)
    ball.send("t", "x")
    ball.close()
    with pytest.raises(RequestError, match="closed"):
        ball.send("t", "x")


def test_a_receipt_of_what_is_visible_at_once_has_no_instant() -> None:
    receipt = Receipt("a", 1, None, 5)
    assert receipt.due_ms is None and receipt.store_ms == 5


def test_a_key_with_a_blank_cancels_no_other_customer(ball: Timeball) -> None:
    """An earlier version split a key at its blank, so a cancel of "4" cancelled messages of others."""
    kept = ball.send("customers", "x", keys="4", after="1h")
    table = pa.table({"body": [b"x"], "keys": ["customer 4"]})
    for send in (
        lambda: ball.send("customers", "x", keys="customer 4", after="1h"),
        lambda: ball.send_many([{"body": "x", "keys": "customer 4"}], topic="customers"),
        lambda: ball.send_many(table, topic="customers"),
        lambda: ball.cancel(key="customer 4"),
        lambda: ball.reschedule(key="customer 4", after="2h"),
    ):
        with pytest.raises(InvalidMessage, match=r"customer 4.*a key has no blanks"):
            send()
    lists = pa.table(
        {"body": [b"x", b"y"], "keys": [["customer", "five"], ["six"]], "delay_ms": [3_600_000] * 2}
    )
    ball.send_many(lists, topic="customers")
    ball.send_many([{"body": "z", "keys": ["seven", "eight"], "after": "1h"}], topic="customers")
    for key in ("five", "six", "eight"):
        assert [each.verdict for each in ball.cancel(key=key)] == ["cancelled"]
    assert ball.get(kept.id).state == "waiting"
    for wrong in ({"tag": "a\x02b"}, {"message_id": "a\x01"}):
        with pytest.raises(InvalidMessage, match="without control characters"):
            ball.send("customers", "x", **wrong)


def test_an_unknown_name_in_a_dict_is_told_with_the_valid_ones(ball: Timeball) -> None:
    with pytest.raises(
        InvalidMessage, match=r"unknown column 'delay_s' of a row; .*valid: after, at, message_id"
    ):
        ball.send_many([{"body": "x"}, {"body": "x", "delay_s": 5}], topic="t")
    for read in (ball.pull, ball.browse):
        with pytest.raises(RequestError, match="start='newest' is not known; valid: earliest, latest"):
            read("t", "g", start="newest")  # type: ignore[arg-type]
