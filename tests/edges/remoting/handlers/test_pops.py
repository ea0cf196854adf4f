"""POP: the fields from which RocketMQ's client builds check points, and acknowledgements with them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.calls import RemotingContext
from timeball.edges.remoting.codec import records
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.codec.records import CheckPoint
from timeball.edges.remoting.connection import Member
from timeball.edges.remoting.handlers.heartbeats import ANY_QUEUE, Assignments
from timeball.edges.remoting.handlers.pops import ACKNOWLEDGED_AT_ONCE, Pops
from timeball.edges.shared.sessions import Membership

GROUP, TOPIC = "g", "orders"
MINUTE_MS = 60_000


class PopClient:
    """A connected client that handles answers as the Java client does."""

    def __init__(self, world: World, pair: Pair) -> None:
        self.world, self.pair = world, pair
        self.context: RemotingContext = context_of(world.broker)
        self.handlers = Pops(self.context).handlers | Assignments(self.context).handlers

    async def send(self, count: int = 1, **columns: object) -> None:
        """Create the topic, and send `count` messages."""
        await self.world.broker.create_topic(TOPIC, 2)
        await self.world.broker.send(batch(count, **columns))

    async def pop(self, topic: str = TOPIC, **ext: object) -> Command:
        """Pop messages from all queues without waiting, and return the answer."""
        fields = {
            "consumerGroup": GROUP, "topic": topic, "queueId": -1, "maxMsgNums": 32, "pollTime": 0,
            "invisibleTime": MINUTE_MS, "bornTime": 0, "initMode": 0,
        }  # fmt: skip
        return await self.pair.ask(self.handlers, RequestCode.POP_MESSAGE, **{**fields, **ext})

    async def ack(self, point: CheckPoint, code: int = RequestCode.ACK_MESSAGE, **ext: object) -> Command:
        """Acknowledge the message of a check point, or make another request about it, and return the answer."""
        fields = {
            "consumerGroup": GROUP, "topic": records.real_topic(TOPIC, GROUP, point.retry),
            "queueId": point.queue_id, "offset": point.offset, "extraInfo": point.encode(),
        }  # fmt: skip
        return await self.pair.ask(self.handlers, code, **{**fields, **ext})

    async def pass_time(self, ms: int = MINUTE_MS) -> None:
        """Advance the clock, and wait until messages whose invisible time is over can be popped again."""
        self.world.clock.advance(ms)
        self.world.broker.consuming.wake()
        leases = self.world.broker.consuming.leases

        def none_is_overdue() -> bool:
            held = [held for queue_leases in leases.all() for held in queue_leases.in_flight.values()]
            return not any(each.deadline_ms <= self.world.clock.wall for each in held)

        await self.world.until(none_is_overdue, "expired messages have come back")

    async def ask_json(self, code: int, **body: object) -> Command:
        """Send a request whose body is JSON."""
        return await self.pair.ask(self.handlers, code, msgspec.json.encode(body))


@asynccontextmanager
async def pop_client(world: World) -> AsyncIterator[PopClient]:
    """Connect a client during a block."""
    pair = await Pair.create()
    try:
        yield PopClient(world, pair)
    finally:
        pair.close()


def check_points_of(answer: Command) -> list[CheckPoint]:
    """Build the check points from the header of an answer, queue by queue.

    startOffsetInfo is `retry queue first_offset;…`, and msgOffsetInfo `retry queue offset,offset,…;…`.
    """
    ext = answer.ext
    first_offsets = dict(part.rsplit(" ", 1) for part in ext["startOffsetInfo"].split(";"))
    check_points = []
    for part in ext["msgOffsetInfo"].split(";"):
        retry_and_queue, offsets = part.rsplit(" ", 1)
        retry, queue_id = retry_and_queue.split()
        check_points += [
            CheckPoint(
                int(first_offsets[retry_and_queue]), int(ext["popTime"]), int(ext["invisibleTime"]),
                int(ext["reviveQid"]), retry, "timeball", int(queue_id), int(offset),
            )
            for offset in offsets.split(",")
        ]  # fmt: skip
    return check_points


@on_node()
async def test_a_popped_message_is_acknowledged_by_the_check_point_in_the_header(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(5)
        answer = await client.pop()
        assert answer.code == ResponseCode.SUCCESS and answer.body.count(b"body") == 5
        assert answer.ext["restNum"] == "0" and answer.ext["reviveQid"] == "0"
        assert "orderCountInfo" not in answer.ext
        assert b"POP_CK" not in answer.body, "the client builds the check points, as with RocketMQ's broker"
        points = check_points_of(answer)
        assert len(points) == 5
        for point in points:
            assert (await client.ack(point)).code == ResponseCode.SUCCESS
        assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 5
        assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 5


@on_node()
async def test_a_repeated_acknowledgement_succeeds_and_one_of_another_lease_does_not(world: World) -> None:
    """A client repeats an acknowledgement whose answer was lost."""
    async with pop_client(world) as client:
        await client.send()
        (point,) = check_points_of(await client.pop())
        for _ in range(2):
            assert (await client.ack(point)).code == ResponseCode.SUCCESS
            assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 1
        other_lease = msgspec.structs.replace(point, pop_ms=point.pop_ms - 1)
        answer = await client.ack(other_lease)
        assert answer.code == ResponseCode.NO_MESSAGE and "not leased" in (answer.remark or "")


@on_node()
async def test_a_retried_message_has_the_requested_topic_and_a_new_check_point(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(properties=["POP_CK\x01forged\x02own\x01x\x02"])
        first = await client.pop()
        assert b"POP_CK" not in first.body, "the check point of the sender is removed"
        assert b"own" in first.body
        await client.pass_time()
        second = await client.pop()
        point = CheckPoint(0, int(second.ext["popTime"]), MINUTE_MS, 0, records.RETRY_V1, "timeball", 0, 0)
        assert f"POP_CK\x01{point.encode()}\x02".encode() in second.body
        assert b"%RETRY%" not in second.body.replace(b"RETRY_TOPIC", b""), "it does not show the retry topic"
        assert check_points_of(second) == [point]
        assert (await client.ack(check_points_of(first)[0])).code == ResponseCode.NO_MESSAGE
        assert (await client.ack(point)).code == ResponseCode.SUCCESS


@on_node()
async def test_a_changed_invisible_time_makes_a_new_check_point_valid_and_the_old_one_not(
    world: World,
) -> None:
    async with pop_client(world) as client:
        await client.send()
        (point,) = check_points_of(await client.pop())
        answer = await client.ack(point, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=10_000)
        assert answer.code == ResponseCode.SUCCESS
        new = CheckPoint(
            point.offset, int(answer.ext["popTime"]), int(answer.ext["invisibleTime"]),
            int(answer.ext["reviveQid"]), "0", "timeball", point.queue_id, point.offset,
        )  # fmt: skip
        assert new.invisible_ms == 10_000
        assert (await client.ack(point)).code == ResponseCode.NO_MESSAGE
        second_change = await client.ack(
            point, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=10_000
        )
        assert second_change.code == ResponseCode.NO_MESSAGE
        assert (await client.ack(new)).code == ResponseCode.SUCCESS


def batch_entry(bits: bytes, start_offset: int = 0, queue_id: int = 0, pop_ms: int = 0) -> dict[str, object]:
    """Build an entry of BATCH_ACK_MESSAGE, with RocketMQ's short names. Bit i is the message `start_offset` + i."""
    return {
        "c": GROUP, "t": TOPIC, "r": records.NORMAL, "so": start_offset, "q": queue_id, "pt": pop_ms,
        "b": base64.b64encode(bits).decode(),
    }  # fmt: skip


@on_node()
async def test_the_messages_of_a_bit_set_are_acknowledged(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(6)  # three in each of the two queues
        points = check_points_of(await client.pop())
        entries = [
            batch_entry(bytes([0b111]), point.first_offset, point.queue_id, point.pop_ms)
            for point in points
            if point.offset == point.first_offset
        ]
        for _ in range(2):  # a repeated request succeeds, too
            answer = await client.ask_json(RequestCode.BATCH_ACK_MESSAGE, brokerName="timeball", acks=entries)
            assert answer.code == ResponseCode.SUCCESS
            assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 6
        empty = await client.ask_json(RequestCode.BATCH_ACK_MESSAGE, acks=[])
        assert empty.code == ResponseCode.NO_MESSAGE


async def unacknowledged_after_a_power_cut(world: World) -> int:
    """Start a broker on the durable state, and return how many of the six messages the group still has to get."""
    restarted = World(world.files.crash(survival="nothing"), world.clock)
    await restarted.start()
    leases = restarted.broker.consuming.leases.all()
    # Messages before the committed offset, and acknowledged messages behind it.
    acknowledged = sum(restarted.broker.offsets(GROUP, TOPIC).values())
    acknowledged += sum(queue.next_offset - queue.first_open - queue.open_rows for queue in leases)
    await restarted.stop()
    return 6 - acknowledged


@pytest.mark.parametrize("save_ms", [0, 50])
@pytest.mark.parametrize("code", [RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE])
def test_only_without_a_save_interval_are_acknowledgements_durable_when_answered(
    code: int, save_ms: int
) -> None:
    @on_node(ack_save_ms=save_ms)
    async def check(world: World) -> None:
        async with pop_client(world) as client:
            await client.send(6)
            world.broker.consuming.saver.close()  # nothing is saved after an interval
            two_points = check_points_of(await client.pop())[1:3]
            if code == RequestCode.ACK_MESSAGE:
                answers = [await client.ack(point) for point in two_points]
            else:
                acks = [
                    batch_entry(b"\x01", point.offset, point.queue_id, point.pop_ms) for point in two_points
                ]
                answers = [await client.ask_json(code, brokerName="timeball", acks=acks)]
            assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
            assert await unacknowledged_after_a_power_cut(world) == (4 if save_ms == 0 else 6)

    check()


@on_node()
async def test_a_batch_with_too_many_acknowledgements_is_refused(world: World) -> None:
    """A body of 4 MiB could name 25 million messages and block the event loop for half a minute."""
    all_bits = b"\xff" * (records.BITS_MAX // 8)
    async with pop_client(world) as client:
        most = await client.ask_json(RequestCode.BATCH_ACK_MESSAGE, acks=[batch_entry(all_bits)])
        assert most.code == ResponseCode.NO_MESSAGE, "not refused, but none of the messages is leased"
        one_more = [batch_entry(all_bits), batch_entry(b"\x01")]
        answer = await client.ask_json(RequestCode.BATCH_ACK_MESSAGE, acks=one_more)
        assert answer.code == ResponseCode.INVALID_PARAMETER
        assert str(records.BITS_MAX) in str(answer.remark)


@pytest.mark.parametrize(
    ("count", "size_bytes"), [(9, records.BITS_MAX // 64), (370, records.BITS_MAX // 8), (9_000, 0)]
)
@on_node()
async def test_bits_that_are_not_set_count_towards_the_limit_and_so_do_empty_entries(
    world: World, count: int, size_bytes: int
) -> None:
    """The broker examines each bit and checks each entry."""
    async with pop_client(world) as client:
        entries = [batch_entry(bytes(size_bytes))] * count
        answer = await client.ask_json(RequestCode.BATCH_ACK_MESSAGE, acks=entries)
        assert answer.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("bits_each", [records.BITS_MAX, 8])
@on_node()
async def test_other_tasks_run_during_a_large_acknowledgement(world: World, bits_each: int) -> None:
    """A request of 11 KB may name 65,536 messages, or thousands of queues."""
    async with pop_client(world) as client:
        await client.send(6)
        point = check_points_of(await client.pop())[0]
        # All entries name the same three messages, and more that do not exist.
        entry = batch_entry(b"\xff" * (bits_each // 8), point.first_offset, point.queue_id, point.pop_ms)
        acks = [entry] * (records.BITS_MAX // bits_each)
        answer = asyncio.create_task(client.ask_json(RequestCode.BATCH_ACK_MESSAGE, acks=acks))
        turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await answer).code == ResponseCode.SUCCESS
        assert turns >= records.BITS_MAX // ACKNOWLEDGED_AT_ONCE
        assert world.broker.offsets(GROUP, TOPIC)[point.queue_id] == 3


@on_node()
async def test_an_answer_to_a_pop_in_order_counts_earlier_pops(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        first = await client.pop(order="true")
        (point,) = check_points_of(first)
        assert first.ext["orderCountInfo"] == f"0 {point.queue_id} 0"
        assert (await client.pop(order="true")).code == ResponseCode.PULL_NOT_FOUND, "the message is leased"
        await client.pass_time()
        second = await client.pop(order="true")
        assert second.ext["orderCountInfo"] == f"0 qo{point.queue_id}%0 1;0 {point.queue_id} 1"


@on_node()
async def test_in_order_a_changed_invisible_time_keeps_the_pop_time_and_counts_from_it(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        first = await client.pop(order="true")
        (point,) = check_points_of(first)
        assert first.ext["reviveQid"] == "999" == str(point.revive_queue_id)
        world.clock.advance(1_000)
        answer = await client.ack(point, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=5_000)
        assert answer.ext == {"popTime": str(point.pop_ms), "invisibleTime": "6000", "reviveQid": "999"}
        await client.pass_time(5_000)
        assert (await client.pop(order="true")).code == ResponseCode.SUCCESS


@on_node()
async def test_a_pop_without_messages_is_answered_at_once_or_after_its_poll_time(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        await client.pop()
        without_poll_time = await client.pop()
        assert without_poll_time.code == ResponseCode.PULL_NOT_FOUND
        assert {"popTime", "invisibleTime", "reviveQid", "restNum"} <= without_poll_time.ext.keys()
        assert (await client.pop(pollTime=1)).code == ResponseCode.POLLING_TIMEOUT


@on_node()
async def test_too_many_waiting_pops_and_notifications_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.model.limits.PULLS_WAITING_MAX", 0)
    async with pop_client(world) as client:
        await client.send()
        await client.pop()
        assert (await client.pop(pollTime=1_000)).code == ResponseCode.POLLING_FULL
        answer = await client.pair.ask(
            client.handlers,
            RequestCode.NOTIFICATION,
            consumerGroup=GROUP,
            topic=TOPIC,
            queueId=-1,
            pollTime=99,
        )
        assert answer.ext == {"hasMsg": "false", "pollingFull": "true"}


@on_node()
async def test_a_notification_finds_a_message_without_leasing_it(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        ext = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": -1, "pollTime": 0, "bornTime": 0}
        answer = await client.pair.ask(client.handlers, RequestCode.NOTIFICATION, **ext)
        assert answer.ext == {"hasMsg": "true", "pollingFull": "false"}
        assert (await client.pop()).code == ResponseCode.SUCCESS, "it can still be popped"
        answer = await client.pair.ask(client.handlers, RequestCode.NOTIFICATION, **ext)
        assert answer.ext["hasMsg"] == "false"


@on_node()
async def test_a_pop_leases_only_messages_that_match_its_filter(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(3, tag=["a", "b", None], body=[b"first", b"second", b"third"])
        answer = await client.pop(exp="b || c", expType="TAG")
        assert b"second" in answer.body and b"first" not in answer.body and b"third" not in answer.body
        invalid = await client.pop(exp="a >", expType="SQL92")
        assert invalid.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


@on_node()
async def test_invalid_pops_and_acknowledgements_are_refused_with_rocketmqs_codes(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        world.broker.tables.groups.update(SubscriptionGroup("off", consume_enable=False))
        for code, ext in [
            (ResponseCode.INVALID_PARAMETER, {"maxMsgNums": 33}),
            (ResponseCode.INVALID_PARAMETER, {"maxMsgNums": 0}),
            (ResponseCode.INVALID_PARAMETER, {"invisibleTime": 0}),
            (ResponseCode.INVALID_PARAMETER, {"queueId": 2}),
            (ResponseCode.INVALID_PARAMETER, {"queueId": "x"}),
            (ResponseCode.TOPIC_NOT_EXIST, {"topic": "none"}),
            (ResponseCode.NO_PERMISSION, {"consumerGroup": "off"}),
        ]:
            assert (await client.pop(**ext)).code == code, ext
        (point,) = check_points_of(await client.pop())
        for code, ext in [
            (ResponseCode.TOPIC_NOT_EXIST, {"topic": "none"}),
            (ResponseCode.MESSAGE_ILLEGAL, {"queueId": 2}),
            (ResponseCode.MESSAGE_ILLEGAL, {"extraInfo": "nonsense"}),
            (ResponseCode.NO_MESSAGE, {"offset": 77}),
        ]:
            assert (await client.ack(point, **ext)).code == code, ext


@on_node()
async def test_messages_popped_for_a_disconnected_client_can_be_received_at_once(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        await client.pair.hang_up()
        with pytest.raises(AssertionError):  # `ask` fails, because the handler returns no answer
            await client.pop()
        assert (await world.broker.consuming.receive(ReceiveRequest(GROUP, TOPIC), 0)).rows.num_rows == 1


# ---- assignments of queues ------------------------------------------------------------------------------------


async def query_assignment(client: PopClient, topic: str = TOPIC) -> list[tuple[int, str]] | None:
    """Send QUERY_ASSIGNMENT, and return queue and mode of each assignment. None: the client keeps its queues."""
    answer = await client.ask_json(
        RequestCode.QUERY_ASSIGNMENT, topic=topic, consumerGroup=GROUP, clientId="c1", strategyName="AVG",
        messageModel="CLUSTERING",
    )  # fmt: skip
    assignments = msgspec.json.decode(answer.body)["messageQueueAssignments"]
    if assignments is None:
        return None
    queues = [each["messageQueue"] for each in assignments]
    assert {(queue["topic"], queue["brokerName"]) for queue in queues} == {(topic, "timeball")}
    return [(each["messageQueue"]["queueId"], each["mode"]) for each in assignments]


@on_node()
async def test_a_group_pulls_its_queues_until_its_mode_is_set_to_pop(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        assert await query_assignment(client) is None, "the group has no members yet"
        member = Member(client.pair.connection, "c1")
        client.context.sessions.beat(member, "c1", (), [Membership(GROUP)], 0)
        assert await query_assignment(client) == [(0, "PULL"), (1, "PULL")]
        # With a share of 3, too: the member shares with all others, because there are none.
        for share_queues in (0, 3):
            answer = await client.ask_json(
                RequestCode.SET_MESSAGE_REQUEST_MODE, topic=TOPIC, consumerGroup=GROUP, mode="POP",
                popShareQueueNum=share_queues,
            )  # fmt: skip
            assert answer.code == ResponseCode.SUCCESS
            assert await query_assignment(client) == [(ANY_QUEUE, "POP")]
        assert await query_assignment(client, topic="none") is None


@on_node()
async def test_a_mode_for_a_retry_topic_or_an_unknown_mode_is_refused(world: World) -> None:
    async with pop_client(world) as client:
        for topic, mode, code in (
            ("%RETRY%g", "POP", ResponseCode.NO_PERMISSION),
            (TOPIC, "X", ResponseCode.INVALID_PARAMETER),
        ):
            answer = await client.ask_json(
                RequestCode.SET_MESSAGE_REQUEST_MODE, topic=topic, consumerGroup=GROUP, mode=mode
            )
            assert answer.code == code
