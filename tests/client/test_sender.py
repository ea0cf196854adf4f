"""Sending columns: known outcomes, refusals, and which sends are repeated."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.client.cutting_proxy import cutting_proxy
from tests.client.hanging import stopped_node, unanswering_node
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.client import attempts
from timeball.client.attempts import Lost, NotNow, NotSent
from timeball.model.errors import InvalidMessage, InvalidName, RequestError, Unavailable


def test_all_rows_of_many_batches_are_in_the_log_in_order(columns: Timeball) -> None:
    bodies = [b"%d" % i for i in range(20_000)]
    summary = columns.send_many(pa.table({"body": bodies}), topic="many", batch_rows=999)
    assert summary.rows == 20_000 and summary.refused == []
    assert sum(rows for _, rows in summary.ranges) == 20_000
    # Read by ranges, because the broker may write rows of its own between two batches.
    stored = pa.concat_tables(columns.read_log(seq, seq + rows).read_all() for seq, rows in summary.ranges)
    assert stored.column("body").to_pylist() == bodies
    assert stored.column("unique_key").to_pylist() == summary.ids.to_pylist()


def test_a_send_of_no_rows_has_an_empty_summary(columns: Timeball) -> None:
    for nothing in ([], pa.table({"body": pa.array([], pa.binary())})):
        summary = columns.send_many(nothing, topic="many")
        assert (summary.rows, summary.ranges, len(summary.ids)) == (0, [], 0)


def rows_with_one_bad() -> list[dict[str, str]]:
    """Ten rows, of which row 5 has an invalid topic."""
    return [{"topic": "bad/name" if i == 5 else "mixed", "body": str(i)} for i in range(10)]


def test_a_refused_batch_raises_an_error_that_names_the_accepted_rows(columns: Timeball) -> None:
    with pytest.raises(InvalidMessage, match=r"rows 5 to 5: .*topic.*accepted: rows 0 to 4, 6") as caught:
        columns.send_many(pa.Table.from_pylist(rows_with_one_bad()), batch_rows=1)
    summary = caught.value.summary
    accepted = {batch.first_row for batch in summary.accepted}
    assert accepted >= {0, 1, 2, 3, 4} and [batch.first_row for batch in summary.refused] == [5]
    assert summary.unknown == [] and len(summary.ids) == summary.rows == len(accepted) + 1
    # Only the remaining rows are sent again, and each message is stored once.
    remaining = [
        row | {"topic": "mixed"} for number, row in enumerate(rows_with_one_bad()) if number not in accepted
    ]
    second_summary = columns.send_many(pa.Table.from_pylist(remaining))
    seqs = [seq for seq, _ in summary.ranges] + [
        first + row for first, rows in second_summary.ranges for row in range(rows)
    ]
    stored = columns.read_log(min(seqs), max(seqs) + 1).read_all()
    by_seq = dict(zip(stored.column("seq").to_pylist(), stored.column("body").to_pylist()))
    assert sorted(by_seq[seq] for seq in seqs) == [b"%d" % i for i in range(10)]


def as_table(rows: int, bad: int, kind: str) -> Any:
    """A table whose row `bad` has an invalid topic, in one piece, or in chunks if `kind` is "chunks"."""
    table = pa.Table.from_pylist(
        [{"topic": "bad/name" if at == bad else "whole", "body": str(at)} for at in range(rows)]
    )
    return (
        pa.concat_tables([table.slice(at, 700) for at in range(0, rows, 700)]) if kind == "chunks" else table
    )


@pytest.mark.parametrize("kind", ["table", "chunks"])
def test_twenty_thousand_rows_are_accepted_whole_or_not_at_all(columns: Timeball, kind: str) -> None:
    before = columns.send("whole", "before").seq
    with pytest.raises(InvalidMessage, match=r"bad/name.*no row of this call was accepted") as caught:
        columns.send_many(as_table(20_000, 14_500, kind))
    assert (caught.value.summary.accepted, caught.value.summary.unknown) == ([], [])
    assert columns.send_many(as_table(20_000, -1, kind)).rows == 20_000
    after = columns.send("whole", "after").seq
    rows = columns.read_log(before, after + 1, kinds=[1]).read_all()
    assert rows.num_rows == 20_002


def test_a_wrong_row_after_the_first_batch_raises_an_error_that_names_the_accepted_rows(
    columns: Timeball,
) -> None:
    tags = ["t"] * 70_000
    tags[69_000] = "a\x01"
    table = pa.table({"body": [b"x"] * 70_000, "tag": tags})
    with pytest.raises(InvalidMessage, match=r"accepted: rows 0 to 65535; no other row was") as caught:
        columns.send_many(table, topic="large")
    assert sum(span.rows for span in caught.value.summary.accepted) == 65_536
    table = pa.table({"body": [b"x" * 300_000] * 30})
    summary = columns.send_many(table, topic="large")  # 9 MB, more than one batch may have
    assert len(summary.accepted) > 1 and sum(span.rows for span in summary.accepted) == 30


def test_the_rows_of_lost_answers_are_unknown_in_the_summary(node: RunningNode) -> None:
    with cutting_proxy(node.endpoint) as proxy, Timeball(proxy.endpoint) as ball:
        assert ball.send_many(pa.table({"body": [b"a"]}), topic="cut").rows == 1
        with ThreadPoolExecutor(1) as pool:
            proxy.hold()
            table = pa.table({"body": [b"b"] * 4})
            sending = pool.submit(ball.send_many, table, topic="cut", batch_rows=2)
            with node.client() as observer:
                eventually(
                    lambda: sum(queue.max for queue in observer.queues("cut").values()) >= 5,
                    "the broker has the messages",
                )
            proxy.cut()
            with pytest.raises(Lost, match="may or may not be accepted: rows 0 to 3") as caught:
                sending.result(BOUND_S)
        summary = caught.value.summary
        assert summary.accepted == summary.refused == []
        assert sorted(span.first_row for span in summary.unknown) == [0, 2]


def test_a_refused_batch_is_listed_in_the_summary_if_refusals_are_collected(columns: Timeball) -> None:
    table = pa.Table.from_pylist(rows_with_one_bad())
    summary = columns.send_many(table, batch_rows=1, window=3, on_refused="collect")
    assert summary.rows == 10 and len(summary.ranges) == 9
    (refused,) = summary.refused
    assert (refused.first_row, refused.rows, type(refused.error)) == (5, 1, InvalidName)


def test_a_table_with_an_unknown_column_is_refused_with_its_name(columns: Timeball) -> None:
    with pytest.raises(InvalidMessage, match="unknown column 'delay'"):
        columns.send_many(pa.table({"body": [b"x"], "delay": [5]}), topic="t")


def test_batches_of_one_reader_with_different_schemas_are_all_sent(columns: Timeball) -> None:
    """The client creates the id of the second batch, so its column of ids has another type."""
    schema = pa.schema([("body", pa.binary()), ("unique_key", pa.large_string()), ("queue_id", pa.int32())])
    batches = [
        pa.record_batch(
            [[body], pa.array([key], pa.large_string()), pa.array([3], pa.int32())], schema=schema
        )
        for body, key in ((b"a", "varied-a"), (b"b", None), (b"c", "varied-c"))
    ]
    summary = columns.send_many(pa.RecordBatchReader.from_batches(schema, batches), topic="varied")
    assert summary.ids.to_pylist()[::2] == ["varied-a", "varied-c"] and len(summary.accepted) == 3
    seqs = [first for first, _ in summary.ranges]
    stored = columns.read_log(seqs[0], seqs[-1] + 1).read_all()
    by_body = dict(zip(stored.column("body").to_pylist(), stored.column("queue_id").to_pylist()))
    assert {body: by_body[body] for body in (b"a", b"b", b"c")} == {b"a": 3, b"b": 3, b"c": 3}


def test_a_send_during_a_restart_of_the_broker_succeeds(data: Path) -> None:
    with running_node(data) as node, node.client() as ball:
        first = ball.send_many(pa.table({"body": [b"1"]}), topic="again").ranges[0][0]
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        second = ball.send_many(pa.table({"body": [b"2"]}), topic="again").ranges[0][0]
        restart.join(BOUND_S)
        assert second > first
        stored = ball.read_log(first, second + 1, kinds=[1]).read_all()
        assert stored.column("body").to_pylist() == [b"1", b"2"]


@pytest.mark.usefixtures("no_pauses")
def test_a_send_without_a_broker_is_unavailable() -> None:
    with Timeball("grpc://127.0.0.1:1") as ball:
        for retry in (False, True):
            with pytest.raises(Unavailable, match="no broker answers"):
                ball.send_many(pa.table({"body": [b"x"]}), topic="t", retry=retry)


def test_batches_without_an_answer_are_unknown_and_not_refused() -> None:
    with unanswering_node() as hanging, Timeball(f"grpc://127.0.0.1:{hanging.port}", timeout_ms=200) as ball:
        for retry in (False, True):
            with pytest.raises(Lost, match="may or may not have been accepted") as caught:
                ball.send_many(numbered_rows(3), topic="t", batch_rows=1, retry=retry)
            unknown = caught.value.summary.unknown
            assert [(span.first_row, span.rows) for span in unknown] == [(0, 1), (1, 1), (2, 1)]
    assert hanging.streams == 2, (
        "one stream for each call: without another node, an attempt has the whole time limit"
    )


def test_a_repeatable_send_succeeds_at_the_next_node_if_the_first_hangs(node: RunningNode) -> None:
    with unanswering_node() as hanging:
        endpoint = f"grpc://127.0.0.1:{hanging.port},{node.endpoint.removeprefix('grpc://')}"
        with Timeball(endpoint, timeout_ms=1_500) as ball:
            assert ball.send_many(numbered_rows(9), topic="there", batch_rows=2, retry=True).rows == 9
    assert hanging.streams == 1 and count_messages(node) == 9


def test_after_a_lost_batch_the_next_send_goes_to_the_next_node(node: RunningNode) -> None:
    with unanswering_node() as hanging:
        endpoint = f"grpc://127.0.0.1:{hanging.port},{node.endpoint.removeprefix('grpc://')}"
        with Timeball(endpoint, timeout_ms=1_000) as ball:
            with pytest.raises(Lost):
                ball.send_many(numbered_rows(1), topic="there")
            assert ball.send_many(numbered_rows(1), topic="there").rows == 1


def test_a_send_goes_to_the_next_node_if_the_first_opens_no_stream(node: RunningNode) -> None:
    """No batch was sent, so the call needs no `retry`."""
    with stopped_node() as stopped:
        endpoint = f"grpc://{stopped},{node.endpoint.removeprefix('grpc://')}"
        with Timeball(endpoint, timeout_ms=1_000) as ball:
            assert ball.send_many(numbered_rows(1), topic="there").rows == 1


def test_attempts_to_open_a_stream_share_the_time_limit_of_the_call() -> None:
    with stopped_node() as stopped, Timeball(f"grpc://{stopped}", timeout_ms=100) as ball:
        before = set(threading.enumerate())
        for _ in range(2):
            with pytest.raises(NotSent, match=r"opened no stream within 0\.1 s"):
                ball.send_many(numbered_rows(1), topic="t", retry=True)
        new_threads = [thread for thread in threading.enumerate() if thread not in before]
        assert [thread.name for thread in new_threads] == ["timeball-acks"] * 2, (
            "each call has made one attempt"
        )


def test_a_repeated_batch_gets_the_current_states_and_is_sent_again_if_settled(columns: Timeball) -> None:
    ids = ["column-0", "column-1"]
    table = pa.table({"body": [b"0", b"1"], "unique_key": ids, "delay_ms": [3_600_000] * 2})
    columns.send_many(table, topic="anew", retry=True)
    (existing,) = columns.send_many(table, topic="anew", retry=True).existing
    assert (existing.first_row, [message.state for message in existing.states]) == (0, ["waiting"] * 2)
    columns.cancel(ids=ids)
    assert columns.send_many(table, topic="anew", retry=True, if_settled="send").existing == []


def send_with_lost_answers(node: RunningNode, *, retry: bool) -> list[bytes]:
    """Send three messages while no answer passes, and cut the connection when they are in the log.

    Returns the bodies in the log after the call. Raises the error of the call.
    """
    rows = pa.table({"body": [b"0", b"1", b"2"], "unique_key": ["m0", "m1", "m2"]})
    with (
        cutting_proxy(node.endpoint) as proxy,
        Timeball(proxy.endpoint) as ball,
        node.client() as observer,
    ):
        # This send connects, for which the proxy must pass answers.
        first = ball.send_many(pa.table({"body": [b"first"]}), topic="lost").ranges[0][0]

        def stored_bodies() -> list[bytes]:
            rows = observer.read_log(first + 1, first + 100, kinds=[1]).read_all()
            return list(rows.column("body").to_pylist())

        with ThreadPoolExecutor(1) as pool:
            proxy.hold()
            sending = pool.submit(ball.send_many, rows, topic="lost", batch_rows=2, retry=retry)
            eventually(lambda: len(stored_bodies()) >= 3, "the broker has the messages")
            proxy.cut()
            sending.result(BOUND_S)
        return stored_bodies()


def test_with_retry_messages_whose_answers_were_lost_are_stored_once(node: RunningNode) -> None:
    assert send_with_lost_answers(node, retry=True) == [b"0", b"1", b"2"]


def test_without_retry_a_lost_answer_raises_lost(node: RunningNode) -> None:
    """The negative control of the test above: the answers are really lost."""
    with pytest.raises(Lost, match="may or may not have been accepted"):
        send_with_lost_answers(node, retry=False)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[tuple[RunningNode, RunningNode]]:
    """Two nodes, each with a log of its own. At the end they take rows again, so that they can stop."""
    with running_node(tmp_path / "a") as first, running_node(tmp_path / "b") as second:
        yield first, second
        for node in (first, second):
            node.broker.log.writer._closing = False


def endpoint_of(two_nodes: tuple[RunningNode, RunningNode]) -> str:
    """The addresses of both nodes as one endpoint, the first node first."""
    first, second = two_nodes
    return f"{first.endpoint},{second.endpoint.removeprefix('grpc://')}"


def count_messages(node: RunningNode) -> int:
    """Count the messages of the topic `there` in the log of a node."""
    with node.client() as ball:
        topics = ball.read_log(1, node.broker.log.writer.next_seq, kinds=[1]).read_all().column("topic")
        return sum(topic == "there" for topic in topics.to_pylist())


def refuse_rows(node: RunningNode) -> None:
    """Make the log refuse new rows, as at the beginning of a hand-over."""
    node.broker.log.writer._closing = True


def numbered_rows(count: int) -> pa.Table:
    """A table of messages with the bodies 0 to `count` - 1."""
    return pa.table({"body": [b"%d" % number for number in range(count)]})


def test_a_send_that_a_broker_refuses_during_a_hand_over_goes_to_the_next_node(
    two_nodes: tuple[RunningNode, RunningNode],
) -> None:
    """The refusal says that no message was accepted, so the client asks another node, also without `retry`."""
    first, second = two_nodes
    with Timeball(endpoint_of(two_nodes)) as ball:
        before = ball.send_many(numbered_rows(1), topic="there")
        refuse_rows(first)
        after = ball.send_many(numbered_rows(1), topic="there")
        assert after.ranges == before.ranges, (
            "the second node has a log of its own, so the first row has the same number"
        )
        assert ball.send_many(numbered_rows(9), topic="there", batch_rows=2).rows == 9
    assert (count_messages(first), count_messages(second)) == (1, 10)


def test_a_long_send_continues_at_the_next_node_after_a_refusal(
    two_nodes: tuple[RunningNode, RunningNode],
) -> None:
    first, second = two_nodes
    schema = pa.schema([("body", pa.binary())])

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(40):
            if number == 20:
                refuse_rows(first)
            yield pa.record_batch([[b"%d" % number] * 10], schema=schema)

    with Timeball(endpoint_of(two_nodes)) as ball:
        rows = pa.RecordBatchReader.from_batches(schema, batches())
        assert ball.send_many(rows, topic="there", batch_rows=10).rows == 400
    assert count_messages(first) + count_messages(second) == 400
    assert count_messages(first) > 0 and count_messages(second) > 0


@pytest.mark.usefixtures("no_pauses")
def test_the_refusal_of_the_only_broker_raises_notnow(node: RunningNode) -> None:
    """The negative control of the two tests above: a broker with `refuse_rows` really refuses each attempt."""
    with node.client() as ball:
        refuse_rows(node)
        try:
            with pytest.raises(NotNow, match="stopping"):
                ball.send_many(numbered_rows(1), topic="there")
        finally:
            node.broker.log.writer._closing = False


class TrueForChecks:
    """True in the first `count` checks, and then false. As `_closing` of a log it refuses `count` batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __bool__(self) -> bool:
        self.count -= 1
        return self.count >= 0


@pytest.mark.usefixtures("no_pauses")
def test_the_error_of_an_earlier_batch_ends_the_call_when_the_stream_has_broken(node: RunningNode) -> None:
    """All attempts to send the first batch are refused. The second batch would be accepted."""
    schema, refusals = pa.schema([("body", pa.binary())]), TrueForChecks(2 + len(attempts.RETRY_PAUSES_S))
    with cutting_proxy(node.endpoint) as proxy, Timeball(proxy.endpoint) as ball:
        ball.send_many(pa.table({"body": [b"0"]}), topic="cut")

        def batches() -> Iterator[pa.RecordBatch]:
            count = refusals.count
            node.broker.log.writer._closing = refusals  # type: ignore[assignment]
            yield pa.record_batch([[b"1"]], schema=schema)
            eventually(lambda: refusals.count < count, "the first batch is refused")
            proxy.cut()
            eventually(
                lambda: all(thread.name != "timeball-acks" for thread in threading.enumerate()),
                "the stream has ended",
            )
            yield pa.record_batch([[b"2"]], schema=schema)

        rows = pa.RecordBatchReader.from_batches(schema, batches())
        try:
            with pytest.raises(NotNow, match="rows 0 to 0"):
                ball.send_many(rows, topic="cut", batch_rows=1, retry=True)
        finally:
            node.broker.log.writer._closing = False


def test_a_send_of_a_closed_client_is_refused(node: RunningNode) -> None:
    ball = Timeball(node.endpoint)
    ball.send_many(numbered_rows(1), topic="t")
    ball.close()
    with pytest.raises(RequestError, match="closed"):
        ball.send_many(numbered_rows(1), topic="t")


def test_operations_are_refused_without_an_address_of_http(node: RunningNode) -> None:
    """A client of the Flight port has columns only."""
    with Timeball(node.endpoint) as ball:
        for call in (
            lambda: ball.send("t", "x"),
            lambda: ball.send_many([{"body": "x"}], topic="t"),
            lambda: ball.get("a"),
            lambda: ball.cancel("a"),
            lambda: ball.reschedule("a", after="1s"),
            lambda: ball.pull("t", "g"),
            lambda: list(ball.consume("t", "g", until_idle="10ms")),
            lambda: ball.offsets("g", "t"),
            lambda: ball.commit("t", "g", {0: 1}),
            ball.status,
            ball.topics,
            ball.groups,
            lambda: ball.dead_letters("g"),
            lambda: ball.create_topic("t"),
            lambda: ball.queues("t"),
        ):
            with pytest.raises(RequestError, match=r"Operations go over HTTP: .* http://host:7480") as caught:
                call()
            assert node.endpoint in str(caught.value)
    with pytest.raises(RequestError, match="write it as http://host:port"):
        Timeball(node.endpoint, flight=node.endpoint)
