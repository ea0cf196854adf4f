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
from timeball.edges.remoting.handlers.heartbeats import Assignments
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
        await self.world.broker.create_topic(TOPIC, 2)
        await self.world.broker.send(batch(count, **columns))

    async def pop(self, topic: str = TOPIC, **ext: object) -> Command:
        fields = {
            "consumerGroup": GROUP, "topic": topic, "queueId": -1, "maxMsgNums": 32, "pollTime": 0,
            "invisibleTime": MINUTE_MS, "bornTime": 0, "initMode": 0,
        }  # fmt: skip
        return await self.pair.ask(self.handlers, RequestCode.POP_MESSAGE, **{**fields, **ext})

    async def ack(self, point: CheckPoint, code: int = RequestCode.ACK_MESSAGE, **ext: object) -> Command:
        fields = {
            "consumerGroup": GROUP, "topic": records.real_topic(TOPIC, GROUP, point.retry),
            "queueId": point.queue_id, "offset": point.offset, "extraInfo": point.encode(),
        }  # fmt: skip
        return await self.pair.ask(self.handlers, code, **{**fields, **ext})

    async def come_back(self, ms: int = MINUTE_MS) -> None:
        self.world.clock.advance(ms)
        self.world.broker.consuming.wake()
        leases = self.world.broker.consuming.leases
        await self.world.until(
            lambda: (
                not any(
                    h.deadline_ms <= self.world.clock.wall for w in leases.all() for h in w.in_flight.values()
                )
            ),
            "it has come back",
        )

    async def json(self, code: int, **body: object) -> Command:
        return await self.pair.ask(self.handlers, code, msgspec.json.encode(body))


@asynccontextmanager
async def pop_client(world: World) -> AsyncIterator[PopClient]:
    pair = await Pair.create()
    try:
        yield PopClient(world, pair)
    finally:
        pair.close()


def check_points_of(answer: Command) -> list[CheckPoint]:
    """Build the check points from the header of an answer, queue by queue."""
    ext = answer.ext
    firsts = dict(part.rsplit(" ", 1) for part in ext["startOffsetInfo"].split(";"))
    return [
        CheckPoint(
            int(firsts[queue]), int(ext["popTime"]), int(ext["invisibleTime"]), int(ext["reviveQid"]),
            queue.split()[0], "timeball", int(queue.split()[1]), int(offset),
        )
        for queue, offsets in (part.rsplit(" ", 1) for part in ext["msgOffsetInfo"].split(";"))
        for offset in offsets.split(",")
    ]  # fmt: skip


@on_node()
async def test_a_popped_message_is_acknowledged_by_the_check_point_in_the_header(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(5)
        answer = await client.pop()
        assert answer.code == ResponseCode.SUCCESS and answer.body.count(b"body") == 5
        assert answer.ext["restNum"] == "0" and answer.ext["reviveQid"] == "0"
        assert "orderCountInfo" not in answer.ext
        assert b"POP_CK" not in answer.body  # the client makes them, as with RocketMQ's broker
        points = check_points_of(answer)
        assert len(points) == 5
        for point in points:
            assert (await client.ack(point)).code == ResponseCode.SUCCESS
        assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 5
        # The first answer may have been lost.
        assert (await client.ack(points[0])).code == ResponseCode.SUCCESS
        assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 5
        other = msgspec.structs.replace(points[0], pop_ms=points[0].pop_ms - 1)
        again = await client.ack(other)
        assert again.code == ResponseCode.NO_MESSAGE and "not leased" in (again.remark or "")


@on_node()
async def test_a_retry_has_the_requested_topic_and_its_check_point(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(properties=["POP_CK\x01forged\x02own\x01x\x02"])
        first = await client.pop()
        assert b"POP_CK" not in first.body and b"own" in first.body
        await client.come_back()
        again = await client.pop()
        point = CheckPoint(0, int(again.ext["popTime"]), MINUTE_MS, 0, "1", "timeball", 0, 0)
        assert f"POP_CK\x01{point.encode()}\x02".encode() in again.body
        assert b"%RETRY%" not in again.body.replace(b"RETRY_TOPIC", b"")
        assert check_points_of(again) == [point]
        assert (await client.ack(check_points_of(first)[0])).code == ResponseCode.NO_MESSAGE
        assert (await client.ack(point)).code == ResponseCode.SUCCESS


@on_node()
async def test_changing_the_invisible_time_returns_the_new_check_point_fields(world: World) -> None:
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
        stale = await client.ack(point, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=10_000)
        assert stale.code == ResponseCode.NO_MESSAGE
        assert (await client.ack(new)).code == ResponseCode.SUCCESS


@on_node()
async def test_a_batch_is_acknowledged_by_a_bit_set(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(6)
        points = check_points_of(await client.pop())
        entries = [
            {"c": GROUP, "t": TOPIC, "r": "0", "so": p.first_offset, "q": p.queue_id, "rq": 0, "pt": p.pop_ms,
             "it": p.invisible_ms, "b": base64.b64encode(bytes([0b111])).decode()}
            for p in points if p.offset == p.first_offset
        ]  # fmt: skip
        body = {"brokerName": "timeball", "acks": entries}
        assert (await client.json(RequestCode.BATCH_ACK_MESSAGE, **body)).code == ResponseCode.SUCCESS
        assert sum(world.broker.offsets(GROUP, TOPIC).values()) == 6
        assert (await client.json(RequestCode.BATCH_ACK_MESSAGE, **body)).code == ResponseCode.SUCCESS
        assert (await client.json(RequestCode.BATCH_ACK_MESSAGE, acks=[])).code == ResponseCode.NO_MESSAGE


async def open_after_a_cut(world: World) -> int:
    """How many of the first six messages a start on the durable state still has to deliver to the group."""
    left = World(world.files.crash(survival="nothing"), world.clock)
    await left.start()
    leases = left.broker.consuming.leases.all()
    done = sum(left.broker.offsets(GROUP, TOPIC).values())
    done += sum(queue.next_offset - queue.first_open - queue.open_rows for queue in leases)
    await left.stop()
    return 6 - done


@pytest.mark.parametrize("save_ms", [0, 50])
@pytest.mark.parametrize("code", [RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE])
def test_without_a_save_interval_acknowledgements_are_durable_when_answered(code: int, save_ms: int) -> None:
    @on_node(ack_save_ms=save_ms)
    async def check(world: World) -> None:
        async with pop_client(world) as client:
            await client.send(6)
            world.broker.consuming.saver.close()  # nothing is saved after an interval
            points = check_points_of(await client.pop())
            answered = points[1:3]
            if code == RequestCode.ACK_MESSAGE:
                answers = [await client.ack(point) for point in answered]
            else:
                bits = base64.b64encode(b"\x01").decode()
                acks = [
                    {
                        "c": GROUP,
                        "t": TOPIC,
                        "r": "0",
                        "so": p.offset,
                        "q": p.queue_id,
                        "pt": p.pop_ms,
                        "b": bits,
                    }
                    for p in answered
                ]
                answers = [await client.json(code, brokerName="timeball", acks=acks)]
            assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
            assert await open_after_a_cut(world) == (4 if save_ms == 0 else 6)

    check()


@on_node()
async def test_a_batch_with_too_many_acknowledgements_is_refused(world: World) -> None:
    """A body of 4 MiB could name 25 million messages and block the event loop for half a minute."""
    all_bits = base64.b64encode(b"\xff" * (records.BITS_MAX // 8)).decode()
    entry = {"c": GROUP, "t": TOPIC, "so": 0, "q": 0, "pt": 0, "r": "0"}
    async with pop_client(world) as client:
        most = await client.json(RequestCode.BATCH_ACK_MESSAGE, acks=[{**entry, "b": all_bits}])
        assert most.code == ResponseCode.NO_MESSAGE
        more = [{**entry, "b": all_bits}, {**entry, "b": "AQ=="}]
        answer = await client.json(RequestCode.BATCH_ACK_MESSAGE, acks=more)
        assert (answer.code, str(records.BITS_MAX) in str(answer.remark)) == (
            ResponseCode.INVALID_PARAMETER, True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "size_bytes"), [(9, records.BITS_MAX // 64), (370, records.BITS_MAX // 8), (9_000, 0)]
)
@on_node()
async def test_bits_that_are_not_set_are_limited_too(world: World, count: int, size_bytes: int) -> None:
    """The broker examines each bit and checks each entry, also those that acknowledge nothing."""
    bits = base64.b64encode(bytes(size_bytes)).decode()
    entry = {"c": GROUP, "t": TOPIC, "so": 0, "q": 0, "pt": 0, "r": "0", "b": bits}
    async with pop_client(world) as client:
        answer = await client.json(RequestCode.BATCH_ACK_MESSAGE, acks=[entry] * count)
        assert answer.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("bits_each", [records.BITS_MAX, 8])
@on_node()
async def test_other_tasks_run_during_a_large_acknowledgement(world: World, bits_each: int) -> None:
    """A request of 11 KB may name 65,536 messages, or thousands of queues."""
    bits = base64.b64encode(b"\xff" * (bits_each // 8)).decode()
    async with pop_client(world) as client:
        await client.send(6)
        points = check_points_of(await client.pop())
        first = {"c": GROUP, "t": TOPIC, "r": "0"} | {
            "so": points[0].first_offset, "q": points[0].queue_id, "pt": points[0].pop_ms, "b": bits,
        }  # fmt: skip
        # Many entries name the same receipts, of which the later ones are not valid any more.
        acks = [first] * (records.BITS_MAX // bits_each)
        answer = asyncio.create_task(client.json(RequestCode.BATCH_ACK_MESSAGE, acks=acks))
        turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await answer).code == ResponseCode.SUCCESS
        assert turns >= records.BITS_MAX // ACKNOWLEDGED_AT_ONCE
        assert world.broker.offsets(GROUP, TOPIC)[points[0].queue_id] == 3


@on_node()
async def test_an_orderly_pop_has_counts_and_keeps_its_pop_time(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        first = await client.pop(order="true")
        (point,) = check_points_of(first)
        assert first.ext["reviveQid"] == "999" == str(point.revive_queue_id)
        assert first.ext["orderCountInfo"] == f"0 {point.queue_id} 0"
        assert (await client.pop(order="true")).code == ResponseCode.PULL_NOT_FOUND
        world.clock.advance(1_000)
        answer = await client.ack(point, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, invisibleTime=5_000)
        assert answer.ext == {"popTime": str(point.pop_ms), "invisibleTime": "6000", "reviveQid": "999"}
        await client.come_back(5_000)
        again = await client.pop(order="true")
        assert again.ext["orderCountInfo"] == f"0 qo{point.queue_id}%0 1;0 {point.queue_id} 1"


@on_node()
async def test_a_pop_without_messages_waits_and_times_out(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        await client.pop()
        nothing = await client.pop()
        assert nothing.code == ResponseCode.PULL_NOT_FOUND
        assert {"popTime", "invisibleTime", "reviveQid", "restNum"} <= nothing.ext.keys()
        assert (await client.pop(pollTime=1)).code == ResponseCode.POLLING_TIMEOUT


@on_node()
async def test_too_many_waiting_pops_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_notification_leases_no_message(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        ext = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": -1, "pollTime": 0, "bornTime": 0}
        answer = await client.pair.ask(client.handlers, RequestCode.NOTIFICATION, **ext)
        assert answer.ext == {"hasMsg": "true", "pollingFull": "false"}
        assert (await client.pop()).code == ResponseCode.SUCCESS
        answer = await client.pair.ask(client.handlers, RequestCode.NOTIFICATION, **ext)
        assert answer.ext["hasMsg"] == "false"


@on_node()
async def test_the_filter_of_the_request_applies(world: World) -> None:
    async with pop_client(world) as client:
        await client.send(3, tag=["a", "b", None], body=[b"first", b"second", b"third"])
        answer = await client.pop(exp="b || c", expType="TAG")
        assert b"second" in answer.body and b"first" not in answer.body and b"third" not in answer.body
        wrong = await client.pop(exp="a >", expType="SQL92")
        assert wrong.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


@on_node()
async def test_invalid_requests_are_refused_with_rocketmqs_codes(world: World) -> None:
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
async def test_messages_popped_for_a_disconnected_client_are_released(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        await client.pair.hang_up()
        await client.pair.ask(
            client.handlers, RequestCode.NOTIFICATION, consumerGroup=GROUP, topic=TOPIC, queueId=-1
        )
        with pytest.raises(AssertionError):  # no answer is due to nobody
            await client.pop()
        assert (await world.broker.consuming.receive(ReceiveRequest(GROUP, TOPIC), 0)).rows.num_rows == 1


# ---- who consumes what ----------------------------------------------------------------------------------------


def assigned(answer: Command) -> list[tuple[int, str]] | None:
    result = msgspec.json.decode(answer.body)["messageQueueAssignments"]
    if result is None:
        return None
    assert all(one["messageQueue"] | {"queueId": 0} == {"topic": TOPIC, "brokerName": "timeball", "queueId": 0}
               for one in result)  # fmt: skip
    return [(one["messageQueue"]["queueId"], one["mode"]) for one in result]


@on_node()
async def test_a_group_pulls_until_its_mode_is_set_to_pop(world: World) -> None:
    async with pop_client(world) as client:
        await client.send()
        beat, member = client.context.sessions.beat, Member(client.pair.connection, "c1")
        asked = {
            "topic": TOPIC, "consumerGroup": GROUP, "clientId": "c1", "strategyName": "AVG",
            "messageModel": "CLUSTERING",
        }  # fmt: skip
        # Nobody has beaten: the client is to keep what it has.
        assert assigned(await client.json(RequestCode.QUERY_ASSIGNMENT, **asked)) is None
        beat(member, "c1", (), [Membership(GROUP)], 0)
        assert assigned(await client.json(RequestCode.QUERY_ASSIGNMENT, **asked)) == [
            (0, "PULL"),
            (1, "PULL"),
        ]
        mode = {"topic": TOPIC, "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 0}
        assert (await client.json(RequestCode.SET_MESSAGE_REQUEST_MODE, **mode)).code == ResponseCode.SUCCESS
        assert assigned(await client.json(RequestCode.QUERY_ASSIGNMENT, **asked)) == [(-1, "POP")]
        mode["popShareQueueNum"] = 3
        await client.json(RequestCode.SET_MESSAGE_REQUEST_MODE, **mode)
        # It shares with all other members, for there is none.
        assert assigned(await client.json(RequestCode.QUERY_ASSIGNMENT, **asked)) == [(-1, "POP")]
        asked["topic"] = "none"
        assert assigned(await client.json(RequestCode.QUERY_ASSIGNMENT, **asked)) is None


@on_node()
async def test_a_retry_topic_is_never_popped_by_order(world: World) -> None:
    async with pop_client(world) as client:
        mode = {"topic": "%RETRY%g", "consumerGroup": GROUP, "mode": "POP"}
        answer = await client.json(RequestCode.SET_MESSAGE_REQUEST_MODE, **mode)
        assert answer.code == ResponseCode.NO_PERMISSION
        answer = await client.json(
            RequestCode.SET_MESSAGE_REQUEST_MODE, **(mode | {"topic": TOPIC, "mode": "X"})
        )
        assert answer.code == ResponseCode.INVALID_PARAMETER
