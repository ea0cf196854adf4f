"""The operations of push subscriptions on a whole node: permissions, refusals, and the state after a crash."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tests.broker.on_node import on_node
from tests.broker.registry.test_push_subscriptions import subscription
from tests.crash.world import World

from timeball.model.access import ANONYMOUS, Access, Account, Principal
from timeball.model.errors import Forbidden, InvalidFilter, InvalidMessage, NotFound, RequestError
from timeball.model.message import Kind


def principal(**fields: Any) -> Principal:
    """Build a caller whose account has these fields."""
    account = Account(access_key="a", secret_key="12345678", **fields)
    return Principal(Access({"a": account}), account)


@on_node()
async def test_a_subscription_its_pause_and_its_secret_survive_a_crash(world: World) -> None:
    put = await world.broker.push.put("a", subscription(), ANONYMOUS)
    assert put.is_new and put.secret is not None
    await world.broker.push.pause("a", ANONYMOUS)
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    restored = world.broker.push.get("a", ANONYMOUS)
    assert restored.paused and restored.url == subscription().url
    (secret,) = world.broker.tables.push_subscriptions.secrets("a", 0)
    assert put.secret == "whsec_" + base64.b64encode(secret).decode()


@on_node()
async def test_the_secret_of_a_subscription_is_hidden_from_readers_of_the_log(world: World) -> None:
    await world.broker.push.put("a", subscription(), ANONYMOUS)
    await world.broker.push.put("a", subscription(), ANONYMOUS, rotates=True)
    secrets = world.broker.tables.push_subscriptions.secrets("a", 0)
    assert len(secrets) == 2
    rows = [row for part in world.broker.read_log(1, 99, [Kind.META]) for row in part.to_pylist()]
    shown = b"".join(row["body"] or b"" for row in rows)
    assert b"a.example" in shown
    for secret in secrets:
        assert base64.b64encode(secret) not in shown


@on_node()
async def test_a_change_keeps_the_pause_and_the_secret(world: World) -> None:
    push = world.broker.push
    await push.put("a", subscription(), ANONYMOUS)
    await push.pause("a", ANONYMOUS, by="receiver")
    put = await push.put("a", subscription(in_flight_max=3), ANONYMOUS)
    assert not put.is_new and put.secret is None
    assert put.subscription.paused and put.subscription.paused_by == "receiver"
    resumed = await push.resume("a", ANONYMOUS)
    assert not resumed.paused and resumed.in_flight_max == 3


@on_node()
async def test_the_watcher_gets_the_name_of_each_changed_subscription(world: World) -> None:
    changed_names: list[str] = []
    push = world.broker.push
    push.watch(changed_names.append)
    await push.put("a", subscription(), ANONYMOUS)
    await push.pause("a", ANONYMOUS)
    await push.resume("a", ANONYMOUS)
    await push.delete("a", ANONYMOUS)
    assert changed_names == ["a"] * 4
    with pytest.raises(NotFound):
        await push.delete("a", ANONYMOUS)


@on_node()
async def test_a_subscription_with_an_invalid_url_or_filter_is_refused(world: World) -> None:
    push = world.broker.push
    for error, wrong in (
        (InvalidMessage, {"url": "http://127.0.0.1/"}),
        (InvalidMessage, {"url": "http://0x7f.1/"}),
        (InvalidMessage, {"url": "ftp://a.example/"}),
        (InvalidFilter, {"filter": "a = (", "filter_type": "sql"}),
    ):
        with pytest.raises(error):
            await push.put("a", subscription(**wrong), ANONYMOUS)
    assert push.all(ANONYMOUS) == {}


@on_node(push_allow="127.0.0.0/8")
async def test_a_subscription_to_an_allowed_private_address_is_accepted(world: World) -> None:
    await world.broker.push.put("a", subscription(url="http://127.0.0.1:25/"), ANONYMOUS)


@on_node()
async def test_a_second_subscription_of_a_group_and_topic_with_another_filter_is_refused(
    world: World,
) -> None:
    push = world.broker.push
    await push.put("a", subscription(filter="x || y"), ANONYMOUS)
    await push.put("b", subscription(filter="x || y"), ANONYMOUS)
    with pytest.raises(RequestError, match="another group"):
        await push.put("c", subscription(filter="x"), ANONYMOUS)
    await push.put("c", subscription(filter="x", group="others"), ANONYMOUS)
    await push.put("d", subscription(filter="x", topic="others"), ANONYMOUS)
    await push.delete("b", ANONYMOUS)
    await push.put("a", subscription(filter="z"), ANONYMOUS)


@on_node()
async def test_only_administrators_change_subscriptions_and_callers_with_look_see_them(world: World) -> None:
    push, admin = world.broker.push, principal(admin=True)
    reader = principal(topics={"orders": "SUB"}, groups={"hooks": "SUB"})
    await push.put("a", subscription(), admin)
    await push.put("b", subscription(group="others"), admin)
    assert list(push.all(admin)) == ["a", "b"]
    assert list(push.all(reader)) == ["a"]
    assert push.get("a", reader) == subscription()
    with pytest.raises(NotFound):
        push.get("b", reader)
    for change in (
        push.put("c", subscription(), reader), push.delete("a", reader), push.pause("a", reader),
        push.resume("a", reader),
    ):  # fmt: skip
        with pytest.raises(Forbidden):
            await change
