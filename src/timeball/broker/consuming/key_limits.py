"""Limits of leases with the same key in a group (decision 0132).

The key of a message is in its row, and the queue index does not have it. So a position is leased first, then its row is
read, and then the position takes a *slot* of its key. If all slots of the key are taken, it is *parked*: it waits in
its queue, and other keys go on. When a lease ends, its slot goes to the first parked position of the key, which is
handed out next.

    next -> in flight, with a slot -> done
              \\-> parked -> returned, with a slot -> in flight -> done

Selections of a group are decided in the order in which they were made (`Turn`), although reads end in any order. If one
is given up unread, later ones are given up, too. So the messages of a key keep the order of the log.

A slot belongs to a lease, and is saved with it. Parked positions are saved as returned ones, and parked again after a
restart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.leases import LeasedPosition, QueueLeases
from timeball.broker.filters.tags import BoolArray
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.model import limits
from timeball.model.message import READ_SCHEMA
from timeball.model.send_options import UNIQUE_PREFIX

_KEYS = READ_SCHEMA.get_field_index("keys")


@dataclass(slots=True, eq=False)
class _Key:
    """The slots of one key in a group."""

    taken: int = 0
    # Positions that wait for a slot, in the order of the log. Some of them may wait no longer.
    parked: deque[LeasedPosition] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Group:
    """The keys and selections of one group."""

    keys: dict[str, _Key] = field(default_factory=dict)  # the keys with slots taken
    parked_rows: int = 0
    undecided: dict[Turn, None] = field(default_factory=dict)  # turns of undecided selections, in order

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to remember. Parked positions have a key with slots taken."""
        return not (self.keys or self.undecided)


class Turn:
    """The turn of one selection among those of its group. Exactly one of `end` and `give_up` must be called."""

    def __init__(self, group: _Group, give_back: Callable[[], None], on_end: Callable[[], None]) -> None:
        """`give_back` lets the positions of the selection be leased again. `on_end` is called after each end."""
        self._group, self._give_back, self._on_end = group, give_back, on_end
        self._previous = next(reversed(group.undecided), None)
        self._decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.undecided[self] = None
        self.is_given_up = False  # its positions may be leased again

    @property
    def is_decided(self) -> bool:
        """True after the end of the turn."""
        return self._decided.done()

    async def wait(self) -> bool:
        """Wait until all earlier selections are decided. False if one was given up, and this one with it."""
        # If the previous selection is given up before its turn, `give_up` includes this one.
        if self._previous is not None and not self._previous.is_decided:
            # `asyncio.wait`, because a cancellation of this task must not cancel the future of the other selection.
            await asyncio.wait([self._previous._decided])
        return not self.is_given_up

    def end(self) -> None:
        """Let the next selection have its turn."""
        self._previous = None
        self._group.undecided.pop(self, None)
        if not self._decided.done():
            self._decided.set_result(None)
        self._on_end()

    def give_up(self) -> None:
        """Give the positions of this selection back, and those of all later ones that are not decided."""
        # All now: if each waited for its turn, selections made meanwhile would also have to be given up, and so on.
        if not self.is_given_up:
            turns = [*self._group.undecided]
            for turn in turns[turns.index(self) :]:
                turn.is_given_up = True
                turn._give_back()
        self.end()


class KeyLimits:
    """The slots of the keys of all groups with a limit. Belongs to the event loop."""

    def __init__(self, limit_of: Callable[[str], int | None], waiters: Waiters) -> None:
        """`limit_of` finds the limit of a group. None for no limit."""
        self._limit_of, self._waiters = limit_of, waiters
        self._groups: dict[str, _Group] = {}  # no idle ones, because groups are deleted

    def restore(self, queues: Iterable[QueueLeases]) -> None:
        """Take the slots of the leases in these queues, which were saved before the start."""
        for queue in queues:
            for lease in queue.in_flight.values():
                if lease.key:
                    keys = self._groups.setdefault(queue.group, _Group()).keys
                    keys.setdefault(lease.key, _Key()).taken += 1

    def begin_turn(self, group: str, give_back: Callable[[], None]) -> Turn:
        """Begin the turn of a selection when it is made, after those of earlier selections of its group.

        `give_back` lets its positions be leased again.
        """
        return Turn(self._groups.setdefault(group, _Group()), give_back, lambda: self._drop_if_idle(group))

    def may_lease_new(self, name: str) -> bool:
        """Check whether a group may lease new positions. Not with too many parked ones, because each may be parked."""
        group = self._groups.get(name)
        return group is None or group.parked_rows < limits.PARKED_PER_GROUP_MAX

    def admit(self, name: str, leased: Sequence[LeasedPosition], rows: ReadRows) -> BoolArray:
        """Take a slot of its key for each of these positions, and park positions without a slot.

        `rows` are parallel to `leased`. Returns the mask of the positions that are not parked.
        """
        group, limit = self._groups[name], self._limit_of(name)
        admitted = np.ones(len(leased), np.bool_)
        for index, ((queue, offset, lease), key) in enumerate(zip(leased, _keys_of(rows), strict=True)):
            if lease.key or key is None or limit is None:  # it has a slot already, or needs none
                continue
            slots = group.keys.setdefault(key, _Key())
            self._give_free_slots(group, key, limit)  # the limit may have been raised
            if slots.taken < limit:
                slots.taken += 1
                lease.key = key
                queue.mark_changed(offset, offset)  # the lease may have been saved without the key
            else:
                queue.park(offset)
                slots.parked.append((queue, offset, lease))
                group.parked_rows += 1
                admitted[index] = False
        return admitted

    def free_slot(self, name: str, key: str) -> None:
        """Free the slot of a lease that has ended, and give free slots of its key to positions that wait for them."""
        group = self._groups[name]
        slots = group.keys[key]
        slots.taken -= 1
        self._give_free_slots(group, key, self._limit_of(name))
        if not slots.taken:
            del group.keys[key]
            self._drop_if_idle(name)

    def _drop_if_idle(self, name: str) -> None:
        """Forget a group without keys and undecided selections."""
        group = self._groups.get(name)
        if group is not None and group.is_idle:
            del self._groups[name]

    def _give_free_slots(self, group: _Group, key: str, limit: int | None) -> None:
        """Give the free slots of a key to its first parked positions, which are then handed out next."""
        slots = group.keys[key]
        while slots.parked and (limit is None or slots.taken < limit):
            queue, offset, lease = slots.parked.popleft()
            group.parked_rows -= 1
            if queue.parked.get(offset) is lease:  # otherwise its queue was forgotten meanwhile
                slots.taken += 1
                lease.key = key
                queue.unpark(offset)
                self._waiters.wake([queue.ends])


def _keys_of(rows: ReadRows) -> list[str | None]:
    """List the first key of each row, without its unique key. None for a row without one."""
    if isinstance(rows, NumberedRows):
        texts = [row[_KEYS] for row in rows.values]
    else:
        texts = rows.column("keys").to_pylist()
    return [
        next((key for key in text.split() if not key.startswith(UNIQUE_PREFIX)), None) if text else None
        for text in texts
    ]
