"""How far the sending has come: the *tick*, and the *local index* within it. What a successor starts from.

    tick         the latest second, of the instants promised, of which a message has been sent
    local index  how many messages of that second have been sent, durably

Sent means that the release record is in the log. The state is computed from these records alone, each of which
names its promise and the instant, so it needs no message of its own between a leader and its followers: whoever has
the log has the state. It is what a checkpoint saved, and every release record since:

    of a later second             that is the tick now, and one of it has been sent
    of the tick's second          one more of it has been sent
    of an earlier second          leaves it as it is

The last line is a promise that came too late, or a clock that was set back. It is sent all the same, named by its
own record, and is no step back: (tick, local index) never decreases. So it does not depend on the order of the
records, only on each being counted once.

It says how far, and not which. Promises of the tick that were cancelled are not counted, one that came late into
the tick may stand before others that are counted: to skip so many would be wrong. *Which* promises are settled is
said by the records' names, and that is why a restart from an older state repeats nothing.

A broker that starts *behind* its clock, at a tick that has passed, sends what is overdue at once. One that starts
*ahead* of it, because its clock or its machine is another one, has nothing of the tick to send; it sleeps until the
clock has come there, and what is promised for an instant in between is sent at that instant.
"""

from __future__ import annotations

from dataclasses import dataclass

from timeball import limits
from timeball.message import Int64Array


@dataclass(frozen=True, slots=True, order=True)
class ReleaseCursor:
    """`tick_ms` is the first instant of the second; 0 and 0 before anything has been sent."""

    tick_ms: int = 0
    local_index: int = 0

    def after(self, due_ms: Int64Array) -> ReleaseCursor:
        """Return the state when promises for these instants have been sent besides, in any order."""
        if len(due_ms) == 0:
            return self
        last_ms = int(due_ms.max())
        tick_ms = last_ms - last_ms % limits.SECOND_MS
        if tick_ms < self.tick_ms:
            return self
        sent = int((due_ms >= tick_ms).sum())
        return ReleaseCursor(tick_ms, sent + (self.local_index if tick_ms == self.tick_ms else 0))


NOTHING_SENT = ReleaseCursor()
