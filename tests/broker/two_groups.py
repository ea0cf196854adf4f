"""Two groups of a cluster in one process: whole brokers in memory that call each other without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from tests.crash.lives import run
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.revoking.group_questions import ASK_S, AnyQuestion, GroupAnswer
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS, Access, Caller
from timeball.model.errors import Unavailable
from timeball.node.node import Node


class Neighbours:
    """The groups by name, and for each group a view of the others (`of`, an OtherGroups)."""

    def __init__(self) -> None:
        self.brokers: dict[str, GroupedBroker] = {}
        self.silent: set[str] = set()  # groups that do not answer
        self.asked: list[tuple[str, AnyQuestion]] = []  # (group, question), in their order
        self.are_known = True  # False: no group knows the others yet

    def of(self, own: str) -> _Others:
        return _Others(self, own)


class _Others:
    """The other groups of one group. A question is encoded and decoded, as over the network."""

    def __init__(self, all_groups: Neighbours, own: str) -> None:
        self._all, self._own = all_groups, own

    def names(self) -> Sequence[str]:
        if not self._all.are_known:
            raise Unavailable("not known yet")
        return sorted(name for name in self._all.brokers if name != self._own)

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        self._all.asked.append((group, question))
        if group in self._all.silent:
            return None
        decoded_question = msgspec.json.decode(msgspec.json.encode(question), type=AnyQuestion)
        answer = await self._all.brokers[group].answer(decoded_question, caller)
        return msgspec.json.decode(msgspec.json.encode(answer), type=GroupAnswer)

    def grpc_address(self, group: str) -> tuple[str, int] | None:
        return (f"{group}.example", 8081)


class InGroup(World):
    """A broker of a group, without ports."""

    others: _Others
    access: Access | None = None  # of both groups, by the names of accounts

    async def build(self, node: Node) -> None:
        node.build_broker = partial(GroupedBroker, others=self.others, account=self._account)
        await super().build(node)

    def _account(self, name: str) -> Caller:
        return ANONYMOUS if self.access is None else self.access.named(name)


@asynccontextmanager
async def groups_of(*names: str, **settings: object) -> AsyncIterator[tuple[Neighbours, dict[str, InGroup]]]:
    """Start a broker for each group, and stop all of them."""
    neighbours, worlds, clock = Neighbours(), dict[str, InGroup](), ManualClock()
    try:
        for name in names:
            world = worlds[name] = InGroup(
                CrashFiles(),
                clock,
                group=name,
                broker_name=name,
                **settings,  # type: ignore[arg-type]
            )
            world.others = neighbours.of(name)
            await world.start()
            neighbours.brokers[name] = world.broker
        yield neighbours, worlds
    finally:
        for world in worlds.values():
            if world.node is not None:
                await world.stop()
    assert not any(world.unheard for world in worlds.values())


def in_two_groups(
    test: Callable[[Neighbours, InGroup, InGroup], Awaitable[None]],
) -> Callable[[], None]:
    """Make a plain test of a coroutine, which gets the groups g1 and g2 after their neighbours."""

    def live() -> None:
        async def main() -> None:
            async with groups_of("g1", "g2") as (neighbours, worlds):
                await test(neighbours, worlds["g1"], worlds["g2"])

        run(main())

    live.__name__, live.__doc__ = test.__name__, test.__doc__
    return live
