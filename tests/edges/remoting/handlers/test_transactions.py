"""Transactions: half messages, commit and rollback, and checks, with handlers alone and over real connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stored_message import StoredMessage, decode_stored
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, running_node

from timeball.broker import transacting
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Command
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.connection import Member
from timeball.edges.remoting.handlers.sends import Transactions, add_half_properties
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.errors import InvalidMessage
from timeball.model.message import Kind, decode_properties, encode_properties

END, CHECK = RequestCode.END_TRANSACTION, RequestCode.CHECK_TRANSACTION_STATE
UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12
USERS = {"TRAN_MSG": "true", "PGROUP": "payers", "UNIQ_KEY": "A17"}


async def prepare(world: World, **more: str) -> int:
    properties = {**USERS, **more}
    accepted, durable = world.broker.prepare_nowait(
        batch(1, properties=[encode_properties(properties)], unique_key=["A17"], sys_flag=[4])
    )
    await durable
    return int(accepted.first_seq)


async def end(handler: Transactions, seq: int, how: int, group: str = "payers") -> tuple[int, str | None]:
    pair = await Pair.create()
    answer = await pair.ask(
        handler.handlers, END, producerGroup=group, commitLogOffset=seq, commitOrRollback=how,
        tranStateTableOffset=0, fromTransactionCheck=False, msgId="A17", transactionId="A17",
    )  # fmt: skip
    pair.close()
    return answer.code, answer.remark


async def bodies(world: World) -> list[bytes]:
    """Return the bodies of all visible messages."""
    shown = world.broker.read_log(1, world.broker.log.reader.next_seq, [Kind.MESSAGE, Kind.RELEASE])
    return [body for rows in shown for body in rows.column("body").to_pylist()]


def test_a_half_message_with_a_long_group_name_is_refused() -> None:
    """Hundreds of thousands of half messages may be open, each in memory with the name of its group."""
    name = "g" * limits.GROUP_BYTES_MAX
    assert decode_properties(add_half_properties("", name))["PGROUP"] == name
    for properties, group in (("", name + "g"), (encode_properties({"PGROUP": name + "g"}), "g")):
        with pytest.raises(InvalidMessage, match="at most 120"):
            add_half_properties(properties, group)


# ---- ends -------------------------------------------------------------------------------------------------


@on_node()
async def test_a_half_message_is_committed_rolled_back_or_left_open(world: World) -> None:
    handler = Transactions(context_of(world.broker))
    seqs = [await prepare(world) for _ in range(3)]
    for seq, how in zip(seqs, (COMMIT, ROLLBACK, UNKNOWN), strict=True):
        assert await end(handler, seq, how) == (ResponseCode.SUCCESS, None)
    assert len(await bodies(world)) == 1
    assert world.broker.transactions.open() == [(seqs[2], 0)]


@on_node()
async def test_a_commit_is_repeated_but_not_reversed(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world)
    assert await end(handler, seq, COMMIT) == await end(handler, seq, COMMIT) == (ResponseCode.SUCCESS, None)
    assert await end(handler, seq, ROLLBACK) == (
        ResponseCode.ILLEGAL_OPERATION,
        f"the transaction at {seq} was committed before",
    )
    assert len(await bodies(world)) == 1


@on_node()
async def test_ending_an_unknown_or_foreign_transaction_is_refused(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world)
    for number, group in ((seq, "thieves"), (seq + 1, "payers"), (-1, "payers")):
        code, remark = await end(handler, number, COMMIT, group)
        assert code == ResponseCode.SYSTEM_ERROR and remark is not None
        assert remark.startswith(f"Find prepared transaction message failed: {number} of group")
    assert await bodies(world) == []


@pytest.mark.parametrize(
    ("properties", "wait_ms"),
    [
        ({"DELAY": "2"}, 5_000),
        ({"TIMER_DELAY_MS": "700"}, 700),
        ({"TIMER_DELAY_SEC": "3"}, 3_000),
        # A second after it was prepared, at 22:13:20; that is over when it is committed.
        ({"TIMING": "22:13:21"}, 23 * limits.HOUR_MS + 1_000),
    ],
)
@on_node(delay_properties="TIMING")
async def test_a_delay_begins_with_the_commit(world: World, properties: dict[str, str], wait_ms: int) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world, **properties)
    await world.advance(limits.HOUR_MS)
    assert await end(handler, seq, COMMIT) == (ResponseCode.SUCCESS, None)
    await world.advance(wait_ms - 1)
    assert await bodies(world) == []
    await world.advance(1)
    await world.until(lambda: sum(high for _, high in world.broker.queues("orders").values()), "the release")
    assert await bodies(world) == [b"body"]
    read = world.broker.read_log(
        1, world.broker.log.reader.next_seq, [Kind.SCHEDULED, Kind.MOVED, Kind.RELEASE]
    )
    half, moved, release = (row for rows in read for row in rows.to_pylist())
    assert (half["seq"], moved["source_seq"]) == (seq, seq)
    assert (release["topic"], release["source_seq"], release["version_seq"]) == ("orders", seq, moved["seq"])


@on_node()
async def test_a_header_without_its_fields_is_refused(world: World) -> None:
    pair = await Pair.create()
    answer = await pair.ask(Transactions(context_of(world.broker)).handlers, END, producerGroup="payers")
    pair.close()
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_a_half_message_names_its_producer_group() -> None:
    whole = encode_properties(USERS)
    assert decode_properties(add_half_properties(whole, "others")) == {
        **USERS,
        "__transactionId__": USERS["UNIQ_KEY"],
    }
    assert add_half_properties(add_half_properties(whole, "others"), "others") == add_half_properties(
        whole, "others"
    )
    assert decode_properties(add_half_properties("", "payers")) == {"TRAN_MSG": "true", "PGROUP": "payers"}
    assert decode_properties(add_half_properties("", None))["PGROUP"] == ""


# ---- checks -----------------------------------------------------------------------------------------------


async def run_checks(world: World, ms: int) -> None:
    world.clock.advance(ms)
    await world.broker.transaction_checks.ask_due()


async def producer(handler: Transactions) -> Pair:
    pair = await Pair.create()
    handler._context.sessions.beat(Member(pair.connection, "me"), "me", ["payers"], (), 0)
    return pair


@on_node()
async def test_a_check_pushes_the_half_message_to_a_producer_of_the_group(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world, KEYS="k")
    pair = await producer(handler)
    await run_checks(world, limits.TRANSACTION_FIRST_CHECK_MS)
    asked = await pair.read()
    assert (asked.code, asked.is_one_way) == (CHECK, True)
    host, number = parse_offset_msg_id(asked.ext["offsetMsgId"])
    assert (host.port, number) == (10911, seq)
    assert asked.ext["commitLogOffset"] == str(seq)
    assert asked.ext["msgId"] == asked.ext["transactionId"] == "A17"
    [message] = decode_stored(asked.body)
    assert (message.topic, message.body, message.sys_flag & 12) == ("orders", b"body", 4)
    assert (message.seq, message.queue_offset) == (seq, 0)
    assert message.properties == {
        **USERS,
        "KEYS": "k",
        "TRANSACTION_CHECK_TIMES": "1",
        "__transactionId__": "A17",
        "MSG_REGION": "DefaultRegion",
    }
    pair.close()


@on_node()
async def test_a_half_message_is_discarded_after_fifteen_checks(world: World) -> None:
    handler, seq = Transactions(context_of(world.broker)), await prepare(world)
    pair = await producer(handler)
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
async def test_a_check_without_producer_is_not_counted_before_the_retention_time(world: World) -> None:
    Transactions(context_of(world.broker))
    seq = await prepare(world)
    for _ in range(limits.TRANSACTION_CHECKS_MAX + 1):
        await run_checks(world, limits.TRANSACTION_CHECK_INTERVAL_MS)
    assert world.broker.transactions.open() == [(seq, 0)]
    await run_checks(world, world.settings.retention_ms)
    assert world.broker.transactions.open() == []


@on_node()
async def test_the_bytes_of_checks_at_one_time_are_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Transactions(context_of(world.broker))
    pair = await producer(handler)
    seqs = {await prepare(world) for _ in range(5)}
    monkeypatch.setattr(transacting, "BYTES_PER_LOOK", 1)
    for at in range(5):
        assert sum(checks for _, checks in world.broker.transactions.open()) == at
        await run_checks(world, limits.TRANSACTION_FIRST_CHECK_MS if at == 0 else 0)
    assert {int((await pair.read()).ext["commitLogOffset"]) for _ in seqs} == seqs
    pair.close()


# ---- over the wire ------------------------------------------------------------------------------------------


def send_half(wire: Wire, *, topic: str = "orders", **more: str) -> Command:
    properties = {"UNIQ_KEY": "AB" * 16, "TRAN_MSG": "true", "PGROUP": "payers", **more}
    return wire.ask_ok(
        RequestCode.SEND_MESSAGE_V2, b"pay", a="payers", b=topic, c="TBW102", d=4, e=1, f=4, g=1, h=0,
        i=encode_properties(properties), j=0, k=False, m=False,
    )  # fmt: skip


def end_of(wire: Wire, answer: Command, how: int) -> None:
    """Send END_TRANSACTION one-way, as Java's client does."""
    _, seq = parse_offset_msg_id(answer.ext["msgId"])
    wire.send(
        END, one_way=True, producerGroup="payers", tranStateTableOffset=answer.ext["queueOffset"],
        commitLogOffset=seq, commitOrRollback=how, fromTransactionCheck=False, msgId="AB" * 16,
        transactionId=answer.ext["transactionId"],
    )  # fmt: skip


def pulled(wire: Wire, topic: str = "orders") -> list[StoredMessage]:
    answer = wire.ask(
        RequestCode.PULL_MESSAGE, consumerGroup="readers", topic=topic, queueId=1, queueOffset=0, maxMsgNums=32,
        sysFlag=6, commitOffset=0, suspendTimeoutMillis=15_000, subscription="*", subVersion=0,
    )  # fmt: skip
    return decode_stored(answer.body) if answer.code == ResponseCode.SUCCESS else []


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_a_transaction_from_send_to_pull(node: RunningNode, serialisation: int) -> None:
    with Wire.to(node, serialisation) as wire:
        half = send_half(wire)
        assert (half.ext["queueId"], half.ext["transactionId"]) == ("1", "AB" * 16)
        assert "recallHandle" not in send_half(wire, TIMER_DELAY_SEC="9").ext
        assert node.broker.queues("orders")[1] == (0, 0)
        end_of(wire, half, COMMIT)
        [message] = pulled(wire)
    assert (message.body, message.queue_id, message.sys_flag & 12) == (b"pay", 1, COMMIT)
    assert message.prepared_seq == parse_offset_msg_id(half.ext["msgId"])[1]


def test_a_half_message_with_an_invalid_delay_is_refused(wire: Wire) -> None:
    with pytest.raises(AssertionError, match="timer message illegal"):
        send_half(wire, TIMER_DELAY_SEC="soon")


def test_a_check_reaches_the_producer_and_its_answer_ends_it(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        half = send_half(wire)
        wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "me", "producerDataSet": [{"groupName": "payers"}]})
        clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
        asked = wire.next_pushed()
        assert (asked.code, asked.ext["commitLogOffset"]) == (
            CHECK,
            str(parse_offset_msg_id(half.ext["msgId"])[1]),
        )
        end_of(wire, half, COMMIT)
        assert [message.body for message in pulled(wire)] == [b"pay"]


def test_an_open_transaction_survives_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        half = send_half(wire)
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        end_of(wire, half, COMMIT)
        assert [message.body for message in pulled(wire)] == [b"pay"]
        assert node.broker.transactions.open() == []
