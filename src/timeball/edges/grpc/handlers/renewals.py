"""Auto-renewal: messages held by a push consumer stay invisible for as long as the consumer is connected.

A push consumer sets no invisible time, since the duration of its listener is unknown. Each message begins with one
minute. It is renewed before its time ends, for longer each time, up to three hours in total. Then it is delivered
again. Each renewal moves the scheduled message (the scheduled redelivery), but its receipt stays the same. When the
client goes, its messages are given back.

The state is kept in memory only. After a restart nothing is renewed any more. A message that was renewed before is
delivered again at the end of that time, unless its handle is answered.

The number of renewed messages is bounded, per client and in total. Messages beyond the bound get only the first minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import AnyReceipt
from timeball.edges.grpc.session import Client
from timeball.edges.shared.sessions import Sessions
from timeball.model import limits
from timeball.model.errors import TimeballError

logger = logging.getLogger(__name__)

FIRST_MS = limits.MINUTE_MS
STEPS_MS = (limits.MINUTE_MS, 3 * limits.MINUTE_MS, 5 * limits.MINUTE_MS, 10 * limits.MINUTE_MS)
IN_ALL_MS = 3 * limits.HOUR_MS
AHEAD_MS = 10 * limits.SECOND_MS  # how long before the end a message is renewed
LOOK_S = 1.0
RENEWED_MAX = limits.POP_HELD_MAX
RENEWED_PER_CLIENT_MAX = 20_000  # ordinary clients hold a few thousand
RENEWING_MAX = 64  # concurrent renewals. The bound leaves room for consumers that answer


@dataclass(slots=True, eq=False)
class _Held:
    """One message held by a client."""

    client: str
    due_ms: int
    since_ms: int
    times: int = 0
    answering: bool = False
    renewing: asyncio.Future[None] | None = None


class Renewals:
    """Renews leases of push consumers. Belongs to the event loop. `close` ends its tasks."""

    def __init__(
        self, consuming: Consuming, sessions: Sessions[str, Client], now_ms: Callable[[], int]
    ) -> None:
        self._consuming, self._sessions, self._now_ms = consuming, sessions, now_ms
        self._held: dict[AnyReceipt, _Held] = {}
        self._of_client: dict[str, set[AnyReceipt]] = {}
        self._due: dict[int, set[AnyReceipt]] = {}  # by the second in which to renew
        self._crowd: deque[AnyReceipt] = deque()  # waiting to be renewed now
        self._renewing: set[asyncio.Task[None]] = set()
        self.renewed = 0
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        sessions.on_gone.append(self._gone)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, client: str, receipts: Sequence[AnyReceipt]) -> None:
        """Renew these receipts from now on. They were handed to `client` with `FIRST_MS` each."""
        now_ms = self._now_ms()
        mine = self._of_client.setdefault(client, set())
        room = min(RENEWED_MAX - len(self._held), RENEWED_PER_CLIENT_MAX - len(mine))
        for receipt in receipts[: max(0, room)]:
            held = self._held[receipt] = _Held(client, now_ms + FIRST_MS, now_ms)
            mine.add(receipt)
            self._expect(receipt, held)
        if not mine:
            del self._of_client[client]
        if self._held and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._look_on())
            self._watch.add_done_callback(_tell)

    @asynccontextmanager
    async def answering(self, receipts: Sequence[AnyReceipt]) -> AsyncIterator[None]:
        """Renew none of these inside the block, and never afterwards, unless the body fails.

        A scheduled message that is being moved cannot be settled (released or cancelled), so a running renewal is
        waited for.
        """
        mine = [(one, held) for one in set(receipts) if (held := self._held.get(one)) is not None]
        try:
            for _, held in mine:
                held.answering = True
            for _, held in mine:
                if held.renewing is not None:
                    await asyncio.wait([held.renewing])
            yield
        except BaseException:  # also if the client has gone: it still holds unsettled messages
            for one, held in mine:
                held.answering = False
                if one in self._held:
                    self._expect(one, held)
            raise
        for one, _ in mine:
            self._drop(one)

    def start_due(self) -> list[asyncio.Task[None]]:
        """Start the renewals that are due, and return their tasks."""
        now_ms = self._now_ms()
        for second in sorted(second for second in self._due if second * limits.SECOND_MS <= now_ms):
            self._crowd.extend(self._due.pop(second))
        begun = [
            self._begin(self._renew_crowd())
            for _ in range(min(RENEWING_MAX - len(self._renewing), len(self._crowd)))
        ]
        self._renewing.update(begun)
        for task in begun:
            task.add_done_callback(self._renewing.discard)
        return begun

    async def close(self) -> None:
        """Stop renewing: held messages are delivered again when their time ends."""
        tasks = [*self._tasks, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one message -------------------------------------------------------------------------------------------

    async def _renew_crowd(self) -> None:
        while self._crowd:
            first, now_ms = self._crowd.popleft(), self._now_ms()
            held = self._held.get(first)
            if held is None or held.answering or held.renewing is not None:
                continue
            if held.client not in self._sessions or now_ms - held.since_ms >= IN_ALL_MS:
                self._drop(first)  # it is delivered again when its time ends
                continue
            held.renewing = asyncio.get_running_loop().create_future()
            try:
                await self._renew(first, held, now_ms)
            finally:
                held.renewing.set_result(None)
                held.renewing = None
            if self._held.get(first) is held and not held.answering:
                self._expect(first, held)

    async def _renew(self, receipt: AnyReceipt, held: _Held, now_ms: int) -> None:
        left_ms = IN_ALL_MS - (now_ms - held.since_ms)
        step_ms = min(STEPS_MS[min(held.times, len(STEPS_MS) - 1)], max(left_ms, AHEAD_MS))
        try:
            if await self._consuming.change_invisible_time(receipt, step_ms) is None:
                self._drop(receipt)  # it was settled meanwhile, or its time was over
                return
            held.due_ms, held.times = now_ms + step_ms, held.times + 1
            self.renewed += 1
        except TimeballError as error:
            logger.warning("message in flight not renewed reason=%s", error)

    def _expect(self, first: AnyReceipt, held: _Held) -> None:
        # Not in the current second: a failed renewal is tried again in the next one.
        at_ms = max(held.due_ms - AHEAD_MS, self._now_ms() + limits.SECOND_MS)
        self._due.setdefault(at_ms // limits.SECOND_MS, set()).add(first)

    def _drop(self, first: AnyReceipt) -> None:
        held = self._held.pop(first, None)
        if held is None:
            return
        second = (held.due_ms - AHEAD_MS) // limits.SECOND_MS
        if (due := self._due.get(second)) is not None:
            due.discard(first)
            if not due:
                del self._due[second]
        mine = self._of_client[held.client]
        mine.discard(first)
        if not mine:
            del self._of_client[held.client]

    # -- all of a client's, and of the broker's ------------------------------------------------------------------

    def _gone(self, client: Client) -> None:
        all_of_it = self._of_client.get(client.client_id, set())
        mine = {one: self._held[one] for one in all_of_it if not self._held[one].answering}
        for one in list(all_of_it):
            self._drop(one)
        if mine:
            self._begin(self._give_back(mine))

    async def _give_back(self, mine: dict[AnyReceipt, _Held]) -> None:
        renewing = [held.renewing for held in mine.values() if held.renewing is not None]
        if renewing:
            await asyncio.wait(renewing)
        await self._consuming.give_back(list(mine))

    async def _look_on(self) -> None:
        while self._held:
            await asyncio.sleep(LOOK_S)
            self.start_due()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_tell)
        return task


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("messages in flight not renewed reason=%s", error, exc_info=error)
