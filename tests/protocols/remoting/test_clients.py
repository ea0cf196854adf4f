"""Who is connected: every change is told, once; what has not changed is not; nobody is kept who has gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.errors import OverLimit
from timeball.protocols.remoting import clients as clients_module
from timeball.protocols.remoting.clients import EXPIRY_MS, Clients, Consuming, Subscription
from timeball.protocols.remoting.connection import Connection


@pytest.fixture(scope="module")
def connections() -> list[Connection]:
    loop = asyncio.new_event_loop()
    try:
        return [Connection(lambda *_: None, set(), loop) for _ in range(4)]
    finally:
        loop.close()


def consuming(group: str, *topics: str, version: int = 1, expression: str = "*") -> Consuming:
    return Consuming(group, subscriptions=tuple(Subscription(t, expression, "TAG", version) for t in topics))


def beat(
    clients: Clients,
    connection: Connection,
    client_id: str,
    *consumes: Consuming,
    now_ms: int = 0,
    **more: Any,
) -> set[str]:
    return clients.beat(
        connection, client_id, produces=more.pop("produces", ()), consumes=consumes, now_ms=now_ms, **more
    )


def test_only_what_is_new_is_a_change(connections: list[Connection]) -> None:
    clients = Clients()
    a, b, *_ = connections
    assert beat(clients, a, "a", consuming("g", "t")) == {"g"}
    assert beat(clients, a, "a", consuming("g", "t", version=2)) == set()
    assert beat(clients, b, "b", consuming("g", "t")) == {"g"}
    assert beat(clients, b, "b", consuming("g", "t", "u"), consuming("h", "t")) == {"g", "h"}
    assert beat(clients, a, "a", consuming("g", "t", "u")) == set()
    assert beat(clients, a, "renamed", consuming("g", "t", "u")) == {"g"}
    assert clients.consumer_ids("g") == ["renamed", "b"]
    assert clients.consumer_ids("h") == ["b"]
    assert sorted(clients.groups_on("t")) == ["g", "h"]
    assert clients.groups_on("u") == ["g"]


def test_the_newer_subscription_counts(connections: list[Connection]) -> None:
    clients = Clients()
    a, b, *_ = connections
    beat(clients, a, "a", consuming("g", "t", version=5, expression="new"))
    beat(clients, b, "b", consuming("g", "t", version=4, expression="old"))
    assert clients.subscription("g", "t") == Subscription("t", "new", "TAG", 5)
    beat(clients, b, "b", consuming("g", "t", version=6, expression="newest"))
    assert clients.subscription("g", "t") == Subscription("t", "newest", "TAG", 6)
    assert clients.subscription("g", "u") is None
    assert clients.subscription("nobody", "t") is None


def test_a_topic_given_up_is_forgotten(connections: list[Connection]) -> None:
    clients = Clients()
    beat(clients, connections[0], "a", consuming("g", "t", "u"))
    assert beat(clients, connections[0], "a", consuming("g", "u")) == {"g"}
    assert clients.subscription("g", "t") is None


def test_one_client_with_two_connections_is_one_member(connections: list[Connection]) -> None:
    clients = Clients()
    for connection in connections[:2]:
        beat(clients, connection, "same", consuming("g", "t"))
    assert clients.consumer_ids("g") == ["same"]
    assert clients.gone(connections[0]) == {"g"}
    assert clients.consumer_ids("g") == ["same"]


def test_goodbye_is_for_one_group(connections: list[Connection]) -> None:
    clients = Clients()
    a = connections[0]
    beat(clients, a, "a", consuming("g", "t"), consuming("h", "t"), produces=["p", "q"])
    assert clients.leave(a, producer_group="p", consumer_group="") == set()
    assert clients.leave(a, producer_group=None, consumer_group="g") == {"g"}
    assert clients.leave(a, producer_group="nobody", consumer_group="g") == set()
    assert clients.leave(connections[1], producer_group="q", consumer_group="h") == set()
    assert clients.consumer_groups() == ["h"]
    assert clients.producer_groups() == ["q"]
    assert clients.consumers("g") is None


def test_who_does_not_beat_is_due_to_go(connections: list[Connection]) -> None:
    clients = Clients()
    a, b, *_ = connections
    beat(clients, a, "a", now_ms=1_000)
    beat(clients, b, "b", now_ms=2_000)
    assert clients.expired(1_000 + EXPIRY_MS) == []
    assert [m.client_id for m in clients.expired(1_001 + EXPIRY_MS)] == ["a"]
    beat(clients, a, "a", now_ms=3_000)
    assert [m.client_id for m in clients.expired(2_001 + EXPIRY_MS)] == ["b"]


def test_producers_are_those_who_can_still_hear(connections: list[Connection]) -> None:
    clients = Clients()
    beat(clients, connections[0], "a", produces=["p"], language=1, version=63)
    (member,) = clients.producer_members("p")
    assert (member.client_id, member.language, member.version) == ("a", 1, 63)
    assert clients.producers("p") == [], "this connection was never open"
    assert clients.producers("nobody") == clients.producer_members("nobody") == []


@pytest.mark.parametrize(
    "consumes", [[consuming(f"g{i}") for i in range(3)], [consuming("g", "t", "u", "v")]]
)
def test_one_client_may_not_fill_the_memory(
    consumes: list[Consuming], monkeypatch: pytest.MonkeyPatch, connections: list[Connection]
) -> None:
    monkeypatch.setattr(clients_module, "GROUPS_PER_CONNECTION_MAX", 2)
    monkeypatch.setattr(clients_module, "SUBSCRIPTIONS_PER_GROUP_MAX", 2)
    clients = Clients()
    with pytest.raises(OverLimit):
        beat(clients, connections[0], "a", *consumes)
    assert not clients.knows(connections[0])
    assert clients.consumer_groups() == []
    beat(clients, connections[0], "a", consuming("one"), produces=["two"])
    with pytest.raises(OverLimit):
        beat(clients, connections[0], "a", consuming("three"))


NAMES = st.sampled_from(["g", "h", "i"])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(
            st.tuples(st.just("beat"), st.sets(NAMES), st.sets(NAMES)),
            st.tuples(st.just("leave"), NAMES, NAMES),
            st.just(("gone",)),
        ),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS)
def test_members_are_those_who_came_and_have_not_gone(connections: list[Connection], steps: Any) -> None:
    """Against a model: a set of (connection, group) for each side; a consumer group changes when its set does."""
    clients = Clients()
    consumers: set[tuple[int, str]] = set()
    producers: set[tuple[int, str]] = set()
    known: set[int] = set()
    for at, (verb, *groups) in steps:
        before = set(consumers)
        if verb == "beat":
            known.add(at)
            producers |= {(at, g) for g in groups[0]}
            consumers |= {(at, g) for g in groups[1]}
            changed = clients.beat(
                connections[at], str(at), produces=groups[0], consumes=map(consuming, groups[1]), now_ms=0
            )
        elif verb == "leave":
            producers.discard((at, groups[0]))
            consumers.discard((at, groups[1]))
            changed = clients.leave(connections[at], producer_group=groups[0], consumer_group=groups[1])
        else:
            known.discard(at)
            producers = {one for one in producers if one[0] != at}
            consumers = {one for one in consumers if one[0] != at}
            changed = clients.gone(connections[at])
        assert changed == {group for _, group in before ^ consumers}
        for i, connection in enumerate(connections):
            assert clients.knows(connection) == (i in known)
        for group in ("g", "h", "i"):
            assert sorted(clients.consumer_ids(group)) == sorted(str(i) for i, g in consumers if g == group)
            found = [m.client_id for m in clients.producer_members(group)]
            assert sorted(found) == sorted(str(i) for i, g in producers if g == group)
        assert set(clients.consumer_groups()) == {g for _, g in consumers}
        assert set(clients.producer_groups()) == {g for _, g in producers}
