"""Queue locks of orderly consumers, and the queues that the broker assigns to the members of a group."""

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


class LockClients:
    """Clients of one broker with the group `g` and the topic `orders` of two queues. They lock and unlock queues."""

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
        """Connect clients, each by its heartbeat as a consumer of the group."""
        for name in names:
            self.pairs[name] = await Pair.create()
            body = {"clientID": name, "consumerDataSet": [{"groupName": "g"}]}
            await self._ask(name, RequestCode.HEART_BEAT, body)

    async def lock(self, name: str, *queues: int, group: str = "g", **more: Any) -> list[int]:
        """Lock queues. Return the requested queues that the client holds now."""
        body = self._body(name, queues, group, **more)
        return sorted(queue["queueId"] for queue in (await self._ask(name, LOCK, body))["lockOKMQSet"])

    async def unlock(self, name: str, *queues: int) -> None:
        """Unlock queues."""
        await self._ask(name, UNLOCK, self._body(name, queues, "g"))

    def _body(self, name: str, queues: tuple[int, ...], group: str, **more: Any) -> dict[str, Any]:
        """Return the body of a lock or unlock request."""
        topic = {"topic": "orders", "brokerName": "timeball", **more}
        return {"clientId": name, "consumerGroup": group, "mqSet": [{**topic, "queueId": q} for q in queues]}

    async def _ask(self, name: str, code: int, body: dict[str, Any]) -> Any:
        """Make a request, which must succeed, and return the JSON of its answer, None without a body."""
        handlers = {**self.locks.handlers, **self.beats.handlers}
        answer = await self.pairs[name].ask(handlers, code, msgspec.json.encode(body))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return msgspec.json.decode(answer.body) if answer.body else None

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()


@on_node()
async def test_a_queue_is_locked_by_one_client_until_released(world: World) -> None:
    clients = LockClients(world)
    await clients.connect("a", "b")
    assert await clients.lock("a", 0, 1) == [0, 1]
    assert await clients.lock("b", 0, 1) == []
    await clients.unlock("b", 0)
    assert await clients.lock("b", 0) == [], "an unlock by another client has no effect"
    await clients.unlock("a", 0)
    assert await clients.lock("b", 0, 1) == [0]
    assert await clients.lock("a", 1) == [1]
    clients.close()


@on_node()
async def test_two_groups_can_lock_the_same_queue(world: World) -> None:
    clients = LockClients(world)
    world.broker.tables.groups.ensure("h")
    await clients.connect("a", "b")
    assert await clients.lock("a", 0) == await clients.lock("b", 0, group="h") == [0]
    assert clients.locks.holder("h", "orders", 0) == "b"
    assert clients.locks.holder("h", "orders", 1) is None
    clients.close()


@on_node()
async def test_a_lock_expires_unless_renewed(world: World) -> None:
    clients = LockClients(world)
    await clients.connect("a", "b")
    await clients.lock("a", 0, 1)
    world.clock.advance(EXPIRY_MS - 1)
    assert await clients.lock("a", 0) == [0]
    assert await clients.lock("b", 0, 1) == []
    world.clock.advance(1)
    assert await clients.lock("b", 0, 1) == [1]
    clients.close()


@on_node()
async def test_unregistering_releases_the_locks_at_once(world: World) -> None:
    clients = LockClients(world)
    await clients.connect("a", "b")
    await clients.lock("a", 0)
    answer = await clients.pairs["a"].ask(
        clients.beats.handlers, RequestCode.UNREGISTER_CLIENT, clientID="a", consumerGroup="g"
    )
    assert answer.code == 0
    assert await clients.lock("b", 0) == [0]
    clients.close()


@on_node()
async def test_the_locks_of_a_disconnected_client_expire_when_it_no_longer_relies_on_them(
    world: World,
) -> None:
    clients = LockClients(world)
    await clients.connect("a", "b")
    await clients.lock("a", 0)
    world.clock.advance(10_000)
    await clients.pairs["a"].hang_up()
    assert await clients.lock("b", 0) == []
    world.clock.advance(TRUST_MS - 10_000)
    assert await clients.lock("b", 0) == [0]
    clients.close()


@on_node()
async def test_locks_remain_while_the_client_has_another_connection(world: World) -> None:
    clients = LockClients(world)
    await clients.connect("a", "b")
    first = clients.pairs["a"]
    await clients.connect("a")
    await clients.lock("a", 0)
    await first.hang_up()
    world.clock.advance(TRUST_MS)
    assert await clients.lock("b", 0) == []
    clients.close()


@on_node()
async def test_a_lock_with_a_long_client_id_is_refused(world: World) -> None:
    """Each queue of a hundred thousand groups may have another holder, whose id is kept in memory."""
    clients = LockClients(world)
    longest_id = "c" * CLIENT_ID_CHARACTERS_MAX
    await clients.connect(longest_id)
    assert await clients.lock(longest_id, 0) == [0]
    body = msgspec.json.encode(clients._body(longest_id + "c", (1,), "g"))
    answer = await clients.pairs[longest_id].ask(clients.locks.handlers, LOCK, body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert clients.locks.holder("g", "orders", 1) is None
    clients.close()


@pytest.mark.parametrize("wrong", [{"topic": "nothing"}, {"brokerName": "another"}, {"group": "nobody"}])
@on_node()
async def test_an_unknown_queue_or_group_cannot_be_locked(world: World, wrong: dict[str, str]) -> None:
    clients = LockClients(world)
    await clients.connect("a")
    assert await clients.lock("a", 0, **wrong) == []
    assert await clients.lock("a", -1, 2) == []
    assert clients.locks._groups == {}
    clients.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lock", "unlock", "wait"]), st.sampled_from(["a", "b"]), st.sets(st.integers(0, 1))
    ),
    max_size=12,
)


@on_node()
async def _compare_with_model(world: World, steps: list[tuple[str, str, set[int]]]) -> None:
    """Run the steps. The model holds, for each locked queue, the name of the client and the time of its last lock."""
    clients = LockClients(world)
    await clients.connect("a", "b")
    held: dict[int, tuple[str, int]] = {}
    for verb, name, queues in steps:
        if verb == "wait":
            world.clock.advance(EXPIRY_MS // 2)
        elif verb == "unlock":
            await clients.unlock(name, *queues)
            held = {q: (holder, ms) for q, (holder, ms) in held.items() if q not in queues or holder != name}
        else:
            now_ms = world.clock.monotonic
            held = {q: (holder, ms) for q, (holder, ms) in held.items() if now_ms - ms < EXPIRY_MS}
            expected = {q for q in queues if held.get(q, (name, 0))[0] == name}
            assert await clients.lock(name, *queues) == sorted(expected)
            held |= dict.fromkeys(expected, (name, now_ms))
    clients.close()


@given(STEPS)
def test_locks_equal_those_of_a_model(steps: list[tuple[str, str, set[int]]]) -> None:
    _compare_with_model(steps=steps)


CLIENTS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)
QUEUES = st.integers(1, 12).map(lambda count: list(range(count)))
STRATEGY_NAMES = st.sampled_from(sorted(STRATEGIES))


@given(CLIENTS, QUEUES, STRATEGY_NAMES)
def test_the_pull_consumers_of_a_group_divide_the_queues_evenly(
    clients: list[str], queues: list[int], name: str
) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=False, share_with=0) for c in clients]
    assert sorted(queue for share in shares for queue in share or []) == queues
    sizes = [len(share or []) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("name", "shares"),
    [("AVG", [[0, 1, 2], [3, 4, 5], [6, 7]]), ("AVG_BY_CIRCLE", [[0, 3, 6], [1, 4, 7], [2, 5]])],
)
def test_each_strategy_assigns_the_queues_as_rocketmq_does(name: str, shares: list[list[int]]) -> None:
    queues, clients = list(range(8)), ["c", "a", "b"]
    assert shares == [assign(c, queues, clients, strategy=name, pops=False, share_with=0) for c in "abc"]


@given(CLIENTS, QUEUES, STRATEGY_NAMES, st.integers(1, 8))
def test_pop_consumers_share_queues_and_together_have_all(
    clients: list[str], queues: list[int], name: str, share_with: int
) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=True, share_with=share_with) for c in clients]
    if share_with >= len(clients) - 1:  # each client shares with all others
        assert shares == [[ANY_QUEUE]] * len(clients)
        return
    assert {queue for share in shares for queue in share or []} == set(queues)
    assert all(shares)


def test_a_pop_consumer_that_shares_with_nobody_pops_from_any_queue() -> None:
    assert assign("x", [0, 1], ["a"], strategy="AVG", pops=True, share_with=0) == [ANY_QUEUE]


@pytest.mark.parametrize(
    ("queues", "clients", "strategy"), [([0], ["a"], "MACHINE_ROOM"), ([0], [], "AVG"), ([], ["a"], "AVG")]
)
def test_without_a_known_strategy_or_members_or_queues_there_is_no_assignment(
    queues: list[int], clients: list[str], strategy: str
) -> None:
    assert assign("a", queues, clients, strategy=strategy, pops=False, share_with=0) is None


def test_a_client_outside_of_the_group_is_assigned_no_queue() -> None:
    assert assign("x", [0], ["a"], strategy="AVG", pops=False, share_with=0) == []
