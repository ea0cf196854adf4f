"""Transactions: half messages, commit and rollback, and checks, with handlers alone and over real connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stored_message import StoredMessage, decode_stored
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, running_node

from timeball.broker.accepting import transacting
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Command
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.connection import Member
from timeball.edges.remoting.handlers.sends import Transactions, add_half_properties
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.errors import InvalidMessage
from timeball.model.message import Kind, decode_properties, encode_properties

END, CHECK = RequestCode.END_TRANSACTION, RequestCode.CHECK_TRANSACTION_STATE
UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12  # values of commitOrRollback
PREPARED, TYPE_BITS = 4, 12  # of the sysFlag of a message
HALF_PROPERTIES = {"TRAN_MSG": "true", "PGROUP": "payers", "UNIQ_KEY": "A17"}


async def prepare(world: World, **more: str) -> int:
    """Store a half message with more properties, and return its sequence number."""
    properties = {**HALF_PROPERTIES, **more}
    accepted, durable = world.broker.prepare_nowait(
        batch(1, properties=[encode_properties(properties)], unique_key=["A17"], sys_flag=[PREPARED])
    )
    await durable
    return int(accepted.first_seq)


async def end(
    handler: Transactions, seq: int, resolution: int, group: str = "payers"
) -> tuple[int, str | None]:
    """End a transaction, and return code and remark of the answer."""
    pair = await Pair.create()
    answer = await pair.ask(
        handler.handlers, END, producerGroup=group, commitLogOffset=seq, commitOrRollback=resolution,
        tranStateTableOffset=0, fromTransactionCheck=False, msgId="A17", transactionId="A17",
    )  # fmt: skip
    pair.close()
    return answer.code, answer.remark


async def bodies(world: World) -> list[bytes]:
    """Return the bodies of all visible messages."""
    batches = world.broker.read_log(1, world.broker.log.reader.next_seq, [Kind.MESSAGE, Kind.RELEASE])
    return [body for rows in batches for body in rows.column("body").to_pylist()]


def test_a_half_message_with_a_long_group_name_is_refused() -> None:
    """Hundreds of thousands of half messages may be open, each in memory with the name of its group."""
    longest = "g" * limits.GROUP_BYTES_MAX
    assert decode_properties(add_half_properties("", longest))["PGROUP"] == longest
    too_long = longest + "g"
    for properties, group in (("", too_long), (encode_properties({"PGROUP": too_long}), "g")):
        with pytest.raises(InvalidMessage, match="at most 120"):
            add_half_properties(properties, group)


# ---- END_TRANSACTION --------------------------------------------------------------------------------------


@on_node()
async def test_a_half_message_is_committed_rolled_back_or_left_open(world: World) -> None:
    handler = Transactions(context_of(world.broker))
    committed, rolled_back, unknown = [await prepare(world) for _ in range(3)]
    for seq, resolution in ((committed, COMMIT), (rolled_back, ROLLBACK), (unknown, UNKNOWN)):
        assert await end(handler, seq, resolution) == (ResponseCode.SUCCESS, None)
    assert len(await bodies(world)) == 1
    assert world.broker.transactions.open() == [(unknown, 0)]


@on_node()
async def test_a_repeated_commit_succeeds_and_a_rollback_after_it_is_refused(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world)
    assert await end(handler, seq, COMMIT) == await end(handler, seq, COMMIT) == (ResponseCode.SUCCESS, None)
    assert await end(handler, seq, ROLLBACK) == (
        ResponseCode.ILLEGAL_OPERATION,
        f"the transaction at {seq} was committed before",
    )
    assert len(await bodies(world)) == 1


@on_node()
async def test_ending_an_unknown_transaction_or_one_of_another_group_is_refused(world: World) -> None:
    handler, half_seq = Transactions(context_of(world.broker)), await prepare(world)
    for seq, group in ((half_seq, "thieves"), (half_seq + 1, "payers"), (-1, "payers")):
        code, remark = await end(handler, seq, COMMIT, group)
        assert code == ResponseCode.SYSTEM_ERROR and remark is not None
        assert remark.startswith(f"Find prepared transaction message failed: {seq} of group")
    assert await bodies(world) == []


@pytest.mark.parametrize(
    ("properties", "delay_ms"),
    [
        ({"DELAY": "2"}, 5_000),
        ({"TIMER_DELAY_MS": "700"}, 700),
        ({"TIMER_DELAY_SEC": "3"}, 3_000),
        # The half message is stored at 22:13:20, and committed an hour later. So it is due on the next day.
        ({"TIMING": "22:13:21"}, 23 * limits.HOUR_MS + 1_000),
    ],
)
@on_node(delay_properties="TIMING")
async def test_the_delay_of_a_half_message_begins_with_its_commit(
    world: World, properties: dict[str, str], delay_ms: int
) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world, **properties)
    await world.advance(limits.HOUR_MS)
    assert await end(handler, seq, COMMIT) == (ResponseCode.SUCCESS, None)
    await world.advance(delay_ms - 1)
    assert await bodies(world) == []
    await world.advance(1)
    await world.until(lambda: sum(high for _, high in world.broker.queues("orders").values()), "the release")
    assert await bodies(world) == [b"body"]
    kinds = [Kind.SCHEDULED, Kind.MOVED, Kind.RELEASE]
    batches = world.broker.read_log(1, world.broker.log.reader.next_seq, kinds)
    half, moved, release = (row for rows in batches for row in rows.to_pylist())
    assert (half["seq"], moved["source_seq"]) == (seq, seq)
    assert (release["topic"], release["source_seq"], release["version_seq"]) == ("orders", seq, moved["seq"])


@on_node()
async def test_an_end_without_a_sequence_number_is_refused(world: World) -> None:
    pair = await Pair.create()
    answer = await pair.ask(Transactions(context_of(world.broker)).handlers, END, producerGroup="payers")
    pair.close()
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_a_half_message_gets_its_transaction_id_and_the_producer_group_that_it_lacks() -> None:
    properties = encode_properties(HALF_PROPERTIES)
    completed = add_half_properties(properties, "others")
    assert decode_properties(completed) == {**HALF_PROPERTIES, "__transactionId__": "A17"}, (
        "the group in the properties counts, not that in the header"
    )
    assert add_half_properties(completed, "others") == completed
    assert decode_properties(add_half_properties("", "payers")) == {"TRAN_MSG": "true", "PGROUP": "payers"}
    assert decode_properties(add_half_properties("", None))["PGROUP"] == ""


# ---- checks with the producer -----------------------------------------------------------------------------


async def run_checks(world: World, after_ms: int) -> None:
    """Advance the clock, and run the checks that are due then."""
    world.clock.advance(after_ms)
    await world.broker.transaction_checks.ask_due()


async def connect_producer(handler: Transactions) -> Pair:
    """Connect a producer of the group of the half messages."""
    pair = await Pair.create()
    handler._context.sessions.beat(Member(pair.connection, "me"), "me", ["payers"], (), 0)
    return pair


@on_node()
async def test_a_check_pushes_the_half_message_to_a_producer_of_the_group(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world, KEYS="k")
    pair = await connect_producer(handler)
    await run_checks(world, limits.TRANSACTION_FIRST_CHECK_MS)
    check = await pair.read()
    assert (check.code, check.is_one_way) == (CHECK, True)
    host, seq_in_id = parse_offset_msg_id(check.ext["offsetMsgId"])
    assert (host.port, seq_in_id) == (10911, seq)
    assert check.ext["commitLogOffset"] == str(seq)
    assert check.ext["msgId"] == check.ext["transactionId"] == "A17"
    [message] = decode_stored(check.body)
    assert (message.topic, message.body, message.sys_flag & TYPE_BITS) == ("orders", b"body", PREPARED)
    assert (message.seq, message.queue_offset) == (seq, 0)
    assert message.properties == {
        **HALF_PROPERTIES,
        "KEYS": "k",
        "TRANSACTION_CHECK_TIMES": "1",
        "__transactionId__": "A17",
        "MSG_REGION": "DefaultRegion",
    }
    pair.close()


@on_node()
async def test_a_half_message_is_rolled_back_after_fifteen_checks(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world)
    pair = await connect_producer(handler)
    for number in range(limits.TRANSACTION_CHECKS_MAX):
        await run_checks(world, limits.TRANSACTION_CHECK_INTERVAL_MS)
        [message] = decode_stored((await pair.read()).body)
        assert message.properties["TRANSACTION_CHECK_TIMES"] == str(number + 1)
    assert world.broker.transactions.open() == [(seq, 15)]
    await run_checks(world, limits.TRANSACTION_CHECK_INTERVAL_MS)
    assert world.broker.transactions.open() == []
    code, remark = await end(handler, seq, COMMIT)
    assert (code, remark) == (
        ResponseCode.ILLEGAL_OPERATION,
        f"the transaction at {seq} was rolled back before",
    )
    pair.close()


@on_node()
async def test_a_half_message_without_a_connected_producer_stays_open_for_the_retention_time(
    world: World,
) -> None:
    """No check is counted, because none is sent."""
    Transactions(context_of(world.broker))
    seq = await prepare(world)
    for _ in range(limits.TRANSACTION_CHECKS_MAX + 1):
        await run_checks(world, limits.TRANSACTION_CHECK_INTERVAL_MS)
    assert world.broker.transactions.open() == [(seq, 0)]
    await run_checks(world, world.settings.retention_ms)
    assert world.broker.transactions.open() == []


@on_node()
async def test_checks_that_exceed_the_bytes_of_one_round_are_sent_in_the_next_rounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Transactions(context_of(world.broker))
    pair = await connect_producer(handler)
    seqs = {await prepare(world) for _ in range(5)}
    monkeypatch.setattr(transacting, "BYTES_PER_LOOK", 1)  # so a round sends one check
    world.clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
    for round_number in range(5):
        assert sum(checks for _, checks in world.broker.transactions.open()) == round_number
        await run_checks(world, 0)
    assert {int((await pair.read()).ext["commitLogOffset"]) for _ in seqs} == seqs
    pair.close()


# ---- over a real connection ---------------------------------------------------------------------------------


def send_half(wire: Wire, **more: str) -> Command:
    """Send a half message with more properties to queue 1, and return the answer to it."""
    properties = {"UNIQ_KEY": "AB" * 16, "TRAN_MSG": "true", "PGROUP": "payers", **more}
    return sent(wire, b"pay", group="payers", queue_id=1, sys_flag=PREPARED, properties=properties)


def send_end(wire: Wire, answer: Command, resolution: int) -> None:
    """End the transaction of the half message with this answer, by a one-way request, as Java's client does."""
    _, seq = parse_offset_msg_id(answer.ext["msgId"])
    wire.send(
        END, one_way=True, producerGroup="payers", tranStateTableOffset=answer.ext["queueOffset"],
        commitLogOffset=seq, commitOrRollback=resolution, fromTransactionCheck=False, msgId="AB" * 16,
        transactionId=answer.ext["transactionId"],
    )  # fmt: skip


def pull_messages(wire: Wire) -> list[StoredMessage]:
    """Pull the messages of queue 1. If there are none, wait for one up to 15 s."""
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    answer = wire.ask(
        RequestCode.PULL_MESSAGE, consumerGroup="readers", topic="orders", queueId=1, queueOffset=0, maxMsgNums=32,
        sysFlag=int(flags), commitOffset=0, suspendTimeoutMillis=15_000, subscription="*", subVersion=0,
    )  # fmt: skip
    return decode_stored(answer.body) if answer.code == ResponseCode.SUCCESS else []


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_a_half_message_is_visible_after_its_commit_and_not_before(
    node: RunningNode, serialisation: int
) -> None:
    with Wire.to(node, serialisation) as wire:
        half = send_half(wire)
        assert (half.code, half.ext["queueId"], half.ext["transactionId"]) == (0, "1", "AB" * 16)
        assert node.broker.queues("orders")[1] == (0, 0)
        send_end(wire, half, COMMIT)
        [message] = pull_messages(wire)
    assert (message.body, message.queue_id, message.sys_flag & TYPE_BITS) == (b"pay", 1, COMMIT)
    assert message.prepared_seq == parse_offset_msg_id(half.ext["msgId"])[1]


def test_a_half_message_with_a_delay_has_no_recall_handle(wire: Wire) -> None:
    """Its delay begins with the commit."""
    answer = send_half(wire, TIMER_DELAY_SEC="9")
    assert answer.code == ResponseCode.SUCCESS and "recallHandle" not in answer.ext


def test_a_half_message_with_an_invalid_delay_is_refused(wire: Wire) -> None:
    answer = send_half(wire, TIMER_DELAY_SEC="soon")
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL and "timer message illegal" in str(answer.remark)


def test_a_check_reaches_the_producer_and_its_answer_ends_the_transaction(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        half = send_half(wire)
        wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "me", "producerDataSet": [{"groupName": "payers"}]})
        clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
        check = wire.next_pushed()
        _, seq = parse_offset_msg_id(half.ext["msgId"])
        assert (check.code, check.ext["commitLogOffset"]) == (CHECK, str(seq))
        send_end(wire, half, COMMIT)
        assert [message.body for message in pull_messages(wire)] == [b"pay"]
        assert node.broker.transactions.open() == []


def test_an_open_transaction_survives_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        half = send_half(wire)
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        send_end(wire, half, COMMIT)
        assert [message.body for message in pull_messages(wire)] == [b"pay"]
        assert node.broker.transactions.open() == []
