"""Locks of orderly consumers: never two holders, and no lock remains after its client has disconnected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of

from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.handlers.heartbeats import (
    ANY_QUEUE,
    CLIENT_ID_CHARACTERS_MAX,
    EXPIRY_MS,
    STRATEGIES,
    TRUST_MS,
    HeartBeats,
    Locks,
    assign,
)

LOCK, UNLOCK = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ


class Rig:
    """Two clients, a group, and a topic with two queues."""

    def __init__(self, world: World) -> None:
        self.clock = world.clock
        self.broker = world.broker
        self.broker.tables.topics.ensure("orders", 2)
        self.broker.tables.groups.ensure("g")
        self.context = context_of(self.broker)
        self.locks = Locks(self.context)
        self.beats = HeartBeats(self.context, self.locks)
        self.pairs: dict[str, Pair] = {}

    async def connect(self, *names: str) -> None:
        for name in names:
            self.pairs[name] = await Pair.create()
            body = {"clientID": name, "consumerDataSet": [{"groupName": "g"}]}
            await self._ask(name, RequestCode.HEART_BEAT, body)

    async def lock(self, name: str, *queues: int, group: str = "g", **more: Any) -> list[int]:
        """Lock queues. Return the requested queues that the client holds now."""
        body = self._body(name, queues, group, **more)
        return sorted(queue["queueId"] for queue in (await self._ask(name, LOCK, body))["lockOKMQSet"])

    async def unlock(self, name: str, *queues: int) -> None:
        await self._ask(name, UNLOCK, self._body(name, queues, "g"))

    def _body(self, name: str, queues: tuple[int, ...], group: str, **more: Any) -> dict[str, Any]:
        place = {"topic": "orders", "brokerName": "timeball", **more}
        return {"clientId": name, "consumerGroup": group, "mqSet": [{**place, "queueId": q} for q in queues]}

    async def _ask(self, name: str, code: int, body: dict[str, Any]) -> Any:
        handlers = {**self.locks.handlers, **self.beats.handlers}
        answer = await self.pairs[name].ask(handlers, code, msgspec.json.encode(body))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return msgspec.json.decode(answer.body) if answer.body else None

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()


@on_node()
async def test_a_queue_is_locked_by_one_client_until_released(world: World) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    assert await rig.lock("a", 0, 1) == [0, 1]
    assert await rig.lock("b", 0, 1) == []
    await rig.unlock("b", 0)
    assert await rig.lock("b", 0) == [], "nobody gives back what another holds"
    await rig.unlock("a", 0)
    assert await rig.lock("b", 0, 1) == [0]
    assert await rig.lock("a", 1) == [1]
    rig.close()


@on_node()
async def test_groups_do_not_lock_each_other_out(world: World) -> None:
    rig = Rig(world)
    world.broker.tables.groups.ensure("h")
    await rig.connect("a", "b")
    assert await rig.lock("a", 0) == await rig.lock("b", 0, group="h") == [0]
    assert rig.locks.holder("h", "orders", 0) == "b"
    assert rig.locks.holder("h", "orders", 1) is None
    rig.close()


@on_node()
async def test_a_lock_expires_unless_renewed(world: World) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    await rig.lock("a", 0, 1)
    world.clock.advance(EXPIRY_MS - 1)
    assert await rig.lock("a", 0) == [0]
    assert await rig.lock("b", 0, 1) == []
    world.clock.advance(1)
    assert await rig.lock("b", 0, 1) == [1]
    rig.close()


@on_node()
async def test_unregistering_releases_the_locks_at_once(world: World) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    await rig.lock("a", 0)
    goodbye = await rig.pairs["a"].ask(
        rig.beats.handlers, RequestCode.UNREGISTER_CLIENT, clientID="a", consumerGroup="g"
    )
    assert goodbye.code == 0
    assert await rig.lock("b", 0) == [0]
    rig.close()


@on_node()
async def test_locks_of_a_disconnected_client_expire_after_its_trust(world: World) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    await rig.lock("a", 0)
    world.clock.advance(10_000)
    await rig.pairs["a"].hang_up()
    assert await rig.lock("b", 0) == []
    world.clock.advance(TRUST_MS - 10_000)
    assert await rig.lock("b", 0) == [0]
    rig.close()


@on_node()
async def test_locks_remain_while_the_client_has_another_connection(world: World) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    first = rig.pairs["a"]
    await rig.connect("a")
    await rig.lock("a", 0)
    await first.hang_up()
    world.clock.advance(TRUST_MS)
    assert await rig.lock("b", 0) == []
    rig.close()


@on_node()
async def test_a_lock_with_a_long_client_id_is_refused(world: World) -> None:
    """Each queue of a hundred thousand groups may have another holder, whose id is kept in memory."""
    rig = Rig(world)
    most = "c" * CLIENT_ID_CHARACTERS_MAX
    await rig.connect(most)
    assert await rig.lock(most, 0) == [0]
    body = msgspec.json.encode(rig._body(most + "c", (1,), "g"))
    assert (await rig.pairs[most].ask(rig.locks.handlers, LOCK, body)).code == ResponseCode.INVALID_PARAMETER
    assert rig.locks.holder("g", "orders", 1) is None
    rig.close()


@pytest.mark.parametrize("wrong", [{"topic": "nothing"}, {"brokerName": "another"}, {"group": "nobody"}])
@on_node()
async def test_an_unknown_queue_or_group_cannot_be_locked(world: World, wrong: dict[str, str]) -> None:
    rig = Rig(world)
    await rig.connect("a")
    assert await rig.lock("a", 0, **wrong) == []
    assert await rig.lock("a", -1, 2) == []
    assert rig.locks._groups == {}, "nothing is kept of it"
    rig.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lock", "unlock", "wait"]), st.sampled_from(["a", "b"]), st.sets(st.integers(0, 1))
    ),
    max_size=12,
)


@on_node()
async def _live_through(world: World, steps: list[tuple[str, str, set[int]]]) -> None:
    rig = Rig(world)
    await rig.connect("a", "b")
    held: dict[int, tuple[str, int]] = {}
    for verb, name, queues in steps:
        if verb == "wait":
            world.clock.advance(EXPIRY_MS // 2)
        elif verb == "unlock":
            await rig.unlock(name, *queues)
            held = {q: one for q, one in held.items() if q not in queues or one[0] != name}
        else:
            now = world.clock.monotonic
            held = {q: one for q, one in held.items() if now - one[1] < EXPIRY_MS}
            expected = {q for q in queues if held.get(q, (name, 0))[0] == name}
            assert await rig.lock(name, *queues) == sorted(expected)
            held |= dict.fromkeys(expected, (name, now))
    rig.close()


@given(STEPS)
def test_locks_equal_those_of_a_model(steps: list[tuple[str, str, set[int]]]) -> None:
    _live_through(steps=steps)


CLIENTS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)
QUEUES = st.integers(1, 12).map(lambda count: list(range(count)))
NAMES = st.sampled_from(sorted(STRATEGIES))


@given(CLIENTS, QUEUES, NAMES)
def test_a_group_that_pulls_divides_the_queues(clients: list[str], queues: list[int], name: str) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=False, share_with=0) for c in clients]
    assert sorted(queue for share in shares for queue in share or []) == queues
    sizes = [len(share or []) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_assignments_equal_rocketmqs() -> None:
    def shares(name: str) -> list[list[int] | None]:
        return [
            assign(c, list(range(8)), ["c", "a", "b"], strategy=name, pops=False, share_with=0) for c in "abc"
        ]

    assert shares("AVG") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shares("AVG_BY_CIRCLE") == [[0, 3, 6], [1, 4, 7], [2, 5]]


@given(CLIENTS, QUEUES, NAMES, st.integers(1, 8))
def test_a_group_that_pops_shares_queues_with_neighbours_and_leaves_none(
    clients: list[str], queues: list[int], name: str, share_with: int
) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=True, share_with=share_with) for c in clients]
    if share_with >= len(clients) - 1:  # with all others, as RocketMQ answers then
        assert shares == [[ANY_QUEUE]] * len(clients)
        return
    assert {queue for share in shares for queue in share or []} == set(queues)
    assert all(shares)


def test_without_sharing_everybody_pops_from_any_queue() -> None:
    assert assign("x", [0, 1], ["a"], strategy="AVG", pops=True, share_with=0) == [ANY_QUEUE]


def test_an_undecidable_assignment_is_none_and_a_non_member_gets_no_queue() -> None:
    assert assign("a", [0], ["a"], strategy="MACHINE_ROOM", pops=False, share_with=0) is None
    assert assign("a", [0], [], strategy="AVG", pops=False, share_with=0) is None
    assert assign("a", [], ["a"], strategy="AVG", pops=False, share_with=0) is None
    assert assign("x", [0], ["a"], strategy="AVG", pops=False, share_with=0) == []
