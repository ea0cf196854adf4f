"""FlightEdge with pyarrow's client: errors without internal details, limits, cancelled calls, a port in use."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball.edges.flight import codec
from timeball.edges.flight.server import ANSWERS_BYTES_MAX, MESSAGE_BYTES_MAX, FlightEdge
from timeball.model.errors import OverLimit, SetupError
from timeball.model.message import READ_SCHEMA
from timeball.model.wire import BODY_BYTES_MAX


def act(wire: flight.FlightClient, verb: str, body: bytes = b"{}", **options: Any) -> Any:
    """Perform an action, and return its result."""
    (result,) = wire.do_action(flight.Action(verb, body), flight.FlightCallOptions(**options))
    return json.loads(result.body.to_pybytes())


def get(wire: flight.FlightClient, **ticket: object) -> pa.Table:
    """Read the whole table of a ticket with these fields."""
    return wire.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


def edge_of(node: RunningNode) -> FlightEdge:
    """Return the node's Flight edge."""
    assert node.node.edges is not None
    return node.node.edges.flight


def test_actions_answer_json_and_are_listed(wire: flight.FlightClient) -> None:
    assert act(wire, "status")["log"]["next_seq"] >= 0
    assert act(wire, "status", b"")["version"]
    assert {action.type for action in wire.list_actions()} == set(codec.ACTIONS)


def test_errors_have_code_and_text(wire: flight.FlightClient) -> None:
    with pytest.raises(flight.FlightServerError, match="nowhere") as caught:
        act(wire, "queues", b'{"topic": "nowhere"}')
    assert caught.value.extra_info == b"not_found"
    with pytest.raises(flight.FlightServerError) as caught:
        act(wire, "status", b" " * (BODY_BYTES_MAX + 1))
    assert caught.value.extra_info == b"over_limit"


@pytest.mark.parametrize(
    "call",
    [
        lambda wire: act(wire, "queues", b'{"topic": "nowhere"}'),
        lambda wire: act(wire, "no such verb"),
        lambda wire: act(wire, "reserve", b"[" * 50_000),
        lambda wire: wire.do_get(flight.Ticket(b"x")).read_all(),
        lambda wire: wire.do_get(flight.Ticket(b"x" * 100_000)).read_all(),
        lambda wire: get(wire, read="log", from_seq=0, to_seq=2**50),
        lambda wire: list(wire.list_flights()),
        lambda wire: wire.get_flight_info(flight.FlightDescriptor.for_path(b"send")),
        lambda wire: wire.do_put(flight.FlightDescriptor.for_path(b"send"), READ_SCHEMA)[0].close(),
    ],
    ids=["not-found", "verb", "nesting", "ticket", "long-ticket", "range", "flights", "info", "put"],
)
def test_no_answer_contains_internal_details(wire: flight.FlightClient, call: Any) -> None:
    with pytest.raises(flight.FlightServerError) as caught:
        call(wire)
    assert caught.value.extra_info
    for trace in ("Traceback", ".py", "File "):
        assert trace not in str(caught.value)


def test_every_read_has_one_schema(wire: flight.FlightClient) -> None:
    assert wire.get_schema(flight.FlightDescriptor.for_path(b"anything")).schema == READ_SCHEMA


def test_rows_of_the_log_have_the_read_schema(node: RunningNode, wire: flight.FlightClient) -> None:
    sent = pa.RecordBatch.from_pydict({"topic": ["rows"] * 50, "body": [b"%d" % i for i in range(50)]})
    first, *_ = [node.run(node.broker.send(sent)).first_seq for _ in range(5)]
    log = get(wire, read="log", from_seq=first, to_seq=first + 250, coalesce_rows=60)
    assert log.schema == READ_SCHEMA and log.num_rows == 250
    assert log.column("seq").to_pylist() == list(range(first, first + 250))
    assert get(wire, read="log", from_seq=first, to_seq=first).num_rows == 0


def test_an_abandoned_read_of_the_log_frees_its_slot(node: RunningNode, wire: flight.FlightClient) -> None:
    sent = pa.RecordBatch.from_pydict({"topic": ["big"] * 200, "body": [bytes(20_000)] * 200})
    accepted = [node.run(node.broker.send(sent)) for _ in range(10)]
    ticket = {
        "read": "log",
        "from_seq": accepted[0].first_seq,
        "to_seq": accepted[-1].first_seq,
        "coalesce_rows": 1,
    }
    for _ in range(5):
        reader = wire.do_get(flight.Ticket(json.dumps(ticket).encode()))
        reader.read_chunk()
        reader.cancel()
        del reader
    eventually(lambda: edge_of(node)._calls.taken == 0, "all slots are free")


def test_a_cancelled_long_poll_frees_its_slot(node: RunningNode, wire: flight.FlightClient) -> None:
    node.run(node.broker.create_topic("quiet", 1))
    ticket = flight.Ticket(
        b'{"read": "pull", "topic": "quiet", "offsets": {"0": 0}, "rows": 1, "wait_ms": 60000}'
    )
    with ThreadPoolExecutor(10) as pool:
        polls = [pool.submit(_poll, wire, ticket) for _ in range(10)]
    assert {type(poll.exception()) for poll in polls} == {flight.FlightTimedOutError}
    eventually(lambda: edge_of(node)._calls.taken == 0, "all slots are free")
    # A later long poll is woken by the next message.
    row_counts: list[int] = []
    later_poll = threading.Thread(target=lambda: row_counts.append(wire.do_get(ticket).read_all().num_rows))
    later_poll.start()
    node.run(node.broker.send(pa.RecordBatch.from_pydict({"topic": ["quiet"], "body": [b"x"]})))
    later_poll.join(BOUND_S)
    assert row_counts == [1]


def _poll(wire: flight.FlightClient, ticket: flight.Ticket) -> None:
    """Read a ticket. Raise an error of pyarrow if the read takes longer than 0.3 s."""
    wire.do_get(ticket, flight.FlightCallOptions(timeout=0.3)).read_all()


def test_calls_beyond_the_limit_are_refused(node: RunningNode, wire: flight.FlightClient) -> None:
    calls = edge_of(node)._calls

    async def for_each_slot(change: Callable[[str], None]) -> None:
        for at in range(calls.limit):
            change(f"10.0.{at % 8}.{at // 8}")

    node.run(for_each_slot(calls.take))
    try:
        with pytest.raises(flight.FlightServerError, match="calls are open") as caught:
            act(wire, "status")
        assert caught.value.extra_info == b"over_limit"
    finally:
        node.run(for_each_slot(calls.give_back))
    assert act(wire, "status")


def test_a_too_large_action_is_refused_by_its_length(wire: flight.FlightClient, node: RunningNode) -> None:
    with pytest.raises(pa.ArrowException, match="larger than max"):
        act(wire, "status", bytes(MESSAGE_BYTES_MAX))
    with node.client() as ball, pytest.raises(OverLimit, match="name fewer things at once"):
        ball.attach(bytes(MESSAGE_BYTES_MAX))
    with pytest.raises(flight.FlightServerError, match="at most 65536"):  # received, then refused by its size
        act(wire, "status", bytes(MESSAGE_BYTES_MAX - 100))


def test_the_bytes_of_unread_answers_are_limited(node: RunningNode, wire: flight.FlightClient) -> None:
    accepted = node.run(node.broker.send(pa.RecordBatch.from_pydict({"topic": ["taken"], "body": [b"x"]})))
    ticket = {"read": "log", "from_seq": accepted.first_seq, "to_seq": accepted.first_seq + 1}
    answers = edge_of(node)._reads.answers

    async def take() -> None:
        answers.add("10.0.0.1", ANSWERS_BYTES_MAX)

    async def give_back() -> None:
        answers.remove("10.0.0.1", ANSWERS_BYTES_MAX)

    node.run(take())
    try:
        with pytest.raises(flight.FlightServerError, match="wait to be read") as caught:
            get(wire, **ticket)
        assert caught.value.extra_info == b"over_limit"
    finally:
        node.run(give_back())
    assert get(wire, **ticket).num_rows == 1
    eventually(lambda: answers.held_bytes == 0, "an answer that was read does not count")


def test_a_taken_port_is_a_setup_error(node: RunningNode, tmp_path: Path) -> None:
    with (
        pytest.raises(SetupError, match=f"--port {node.settings.port}"),
        running_node(tmp_path / "other", port=node.settings.port),
    ):
        pass


def test_a_stop_ends_long_polls_and_refuses_new_calls(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, flight.FlightClient(node.endpoint) as wire:
        node.run(node.broker.create_topic("quiet", 1))
        ticket = flight.Ticket(
            b'{"read": "pull", "topic": "quiet", "offsets": {"0": 0}, "rows": 1, "wait_ms": 60000}'
        )
        ended: list[BaseException] = []

        def poll() -> None:
            try:
                wire.do_get(ticket).read_all()
            except (flight.FlightError, pa.ArrowException) as error:
                ended.append(error)

        polling = threading.Thread(target=poll)
        polling.start()
        edge = edge_of(node)
        eventually(lambda: edge._calls.taken == 1, "the poll waits")
        node.stop()
        polling.join(BOUND_S)
        assert len(ended) == 1
        assert edge._calls.taken == 0
        asyncio.run(edge.close())  # a second call does nothing
        node.start()
        assert act(wire, "queues", b'{"topic": "quiet"}', timeout=BOUND_S)["queues"].keys() == {"0"}
