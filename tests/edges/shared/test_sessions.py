"""Sessions: every change is reported once, and removed clients leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.edges.shared import sessions as sessions_module
from timeball.edges.shared.sessions import (
    EdgeContext,
    Membership,
    Session,
    Sessions,
    Subscription,
    advertised,
)
from timeball.model.config import Settings
from timeball.model.errors import OverLimit

EXPIRY_MS = 120_000
Clients = Sessions[int, Session[int]]


def consuming(group: str, *topics: str, version: int = 1, expression: str = "*") -> Membership:
    """Return the membership of a group with subscriptions of these topics."""
    return Membership(group, subscriptions=tuple(Subscription(t, expression, "TAG", version) for t in topics))


def beat(
    clients: Clients,
    key: int,
    client_id: str,
    *consumes: Membership,
    now_ms: int = 0,
    produces: Iterable[str] = (),
) -> set[str]:
    """Apply a heartbeat of a client, and return the consumer groups that change."""
    return clients.beat(clients.get(key) or Session(key, client_id), client_id, produces, consumes, now_ms)


def test_only_new_members_or_topics_are_changes() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    a, b = 0, 1
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


def test_the_version_grows_with_members_and_subscriptions_and_not_with_equal_heartbeats() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    versions = [clients.version]

    def changes() -> bool:
        versions.append(clients.version)
        return versions[-1] > versions[-2]

    beat(clients, 0, "a", consuming("g", "t"))
    assert changes()
    beat(clients, 0, "a", consuming("g", "t"))
    assert not changes()
    beat(clients, 0, "a", consuming("g", "t", version=2))
    assert changes()
    beat(clients, 0, "a", consuming("g", "t", version=2, expression="A"))
    assert changes()
    clients.leave(0, producer_group=None, consumer_group="g")
    assert changes()
    beat(clients, 0, "a", consuming("g", "t"))
    assert changes()
    clients.remove(0)
    assert changes()


def test_the_newer_version_of_a_subscription_wins() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    a, b = 0, 1
    beat(clients, a, "a", consuming("g", "t", version=5, expression="new"))
    beat(clients, b, "b", consuming("g", "t", version=4, expression="old"))
    assert clients.subscription("g", "t") == Subscription("t", "new", "TAG", 5)
    beat(clients, b, "b", consuming("g", "t", version=6, expression="newest"))
    assert clients.subscription("g", "t") == Subscription("t", "newest", "TAG", 6)
    assert clients.subscription("g", "u") is None
    assert clients.subscription("nobody", "t") is None


def test_a_topic_without_subscription_is_removed() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    beat(clients, 0, "a", consuming("g", "t", "u"))
    assert beat(clients, 0, "a", consuming("g", "u")) == {"g"}
    assert clients.subscription("g", "t") is None


def test_one_client_with_two_connections_is_one_member() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    for connection in (0, 1):
        beat(clients, connection, "same", consuming("g", "t"))
    assert clients.consumer_ids("g") == ["same"]
    assert clients.remove(0) == {"g"}
    assert clients.consumer_ids("g") == ["same"]


def test_leaving_one_group_keeps_the_others() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    a = 0
    beat(clients, a, "a", consuming("g", "t"), consuming("h", "t"), produces=["p", "q"])
    assert clients.leave(a, producer_group="p", consumer_group="") == set()
    assert clients.leave(a, producer_group=None, consumer_group="g") == {"g"}
    assert clients.leave(a, producer_group="nobody", consumer_group="g") == set()
    assert clients.leave(1, producer_group="q", consumer_group="h") == set()
    assert list(clients._groups) == ["h"]
    assert clients.producer_names() == ["q"]
    assert clients.group("g") is None


def test_a_session_without_heartbeats_expires() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    a, b = 0, 1
    beat(clients, a, "a", now_ms=1_000)
    beat(clients, b, "b", now_ms=2_000)
    assert clients.expired(1_000 + EXPIRY_MS) == []
    assert [m.client_id for m in clients.expired(1_001 + EXPIRY_MS)] == ["a"]
    beat(clients, a, "a", now_ms=3_000)
    assert [m.client_id for m in clients.expired(2_001 + EXPIRY_MS)] == ["b"]


@pytest.mark.parametrize(
    "consumes", [[consuming(f"g{i}") for i in range(3)], [consuming("g", "t", "u", "v")]]
)
def test_too_many_groups_or_subscriptions_of_a_client_are_refused(
    consumes: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "GROUPS_PER_SESSION_MAX", 2)
    monkeypatch.setattr(sessions_module, "SUBSCRIPTIONS_PER_GROUP_MAX", 2)
    clients: Clients = Sessions(EXPIRY_MS)
    with pytest.raises(OverLimit):
        beat(clients, 0, "a", *consumes)
    assert 0 not in clients
    assert list(clients._groups) == []
    beat(clients, 0, "a", consuming("one"), produces=["two"])
    with pytest.raises(OverLimit):
        beat(clients, 0, "a", consuming("three"))


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
def test_members_equal_those_of_a_model(steps: Any) -> None:
    """The model: sets of (connection, group). A consumer group changes if its members in the set change."""
    clients: Clients = Sessions(EXPIRY_MS)
    consumers: set[tuple[int, str]] = set()
    producers: set[tuple[int, str]] = set()
    connected: set[int] = set()
    for at, (verb, *groups) in steps:
        before = set(consumers)
        if verb == "beat":
            connected.add(at)
            producers |= {(at, g) for g in groups[0]}
            consumers |= {(at, g) for g in groups[1]}
            changed = beat(clients, at, str(at), *map(consuming, groups[1]), produces=groups[0])
        elif verb == "leave":
            producers.discard((at, groups[0]))
            consumers.discard((at, groups[1]))
            changed = clients.leave(at, producer_group=groups[0], consumer_group=groups[1])
        else:
            connected.discard(at)
            producers = {(key, group) for key, group in producers if key != at}
            consumers = {(key, group) for key, group in consumers if key != at}
            changed = clients.remove(at)
        assert changed == {group for _, group in before ^ consumers}
        assert {i for i in range(4) if i in clients} == connected
        for group in ("g", "h", "i"):
            assert sorted(clients.consumer_ids(group)) == sorted(str(i) for i, g in consumers if g == group)
            result = [m.client_id for m in clients.producers(group)]
            assert sorted(result) == sorted(str(i) for i, g in producers if g == group)
        assert set(clients._groups) == {g for _, g in consumers}
        assert set(clients.producer_names()) == {g for _, g in producers}


def test_set_produces_replaces_the_producer_groups() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    session = Session(1, "a")
    clients.add(session, 0)
    clients.set_produces(session, {"t1", "t2"})
    clients.set_produces(session, {"t2", "t3"})
    assert clients.producers("t1") == [] and clients.producers("t3") == [session]
    assert clients.producer_names() == ["t2", "t3"]


def test_a_removed_session_is_reported_once() -> None:
    clients: Clients = Sessions(EXPIRY_MS)
    gone: list[str] = []
    clients.on_session_removed.append(lambda session: gone.append(session.client_id))
    clients.add(Session(1, "a"), 0)
    clients.remove(1)
    clients.remove(1)
    assert gone == ["a"] and not len(clients) and clients.all() == []


def test_too_many_sessions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 1)
    clients: Clients = Sessions(EXPIRY_MS)
    registered = Session(1, "a")
    clients.add(registered, 0)
    with pytest.raises(OverLimit, match="clients"):
        clients.add(Session(2, "b"), 0)
    clients.add(registered, 5)  # a registered session does not count again
    assert registered.heard_ms == 5


@pytest.mark.parametrize(
    ("advertise", "host_and_port"),
    [
        ("", ("", None)),
        ("broker.shop", ("broker.shop", None)),
        ("broker.shop:10911", ("broker.shop", 10911)),
        ("[2001:db8::1]:10911", ("2001:db8::1", 10911)),
        ("2001:db8::1", ("2001:db8::1", None)),
    ],
)
def test_an_advertised_address_is_parsed_with_and_without_port(
    advertise: str, host_and_port: tuple[str, int | None]
) -> None:
    assert advertised(advertise) == host_and_port


@on_node()
async def test_silence_is_measured_by_the_monotonic_clock(world: World) -> None:
    context = EdgeContext(Settings(), world.broker, Clients(1))
    before = context.monotonic_ms()
    world.clock.step_wall(1_000_000)
    assert context.monotonic_ms() == before
    world.clock.advance(5)
    assert context.monotonic_ms() == before + 5
