"""A coordinator whose record is swapped in one order, and whose reads may be outdated."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from timeball.cluster.protocol.effects import Holder, Propose
from timeball.cluster.protocol.replica import Record


class State(NamedTuple):
    """A state of the group's keys. The fields are those of the event Seen."""

    revision: int
    record: Record
    holder: str | None  # the node that holds the group


class Etcd:
    """One record and the key of its holder. Leases end when the simulation says so."""

    def __init__(self, record: Record) -> None:
        self.history = [State(1, record, None)]
        self.last = record  # with the set of the last change that has ended, which the operator knows

    @property
    def now(self) -> State:
        """Return the newest state."""
        return self.history[-1]

    def read(self, random: Random, *, is_stale: bool) -> State:
        """Return the newest state, or with `is_stale` any of the last six."""
        back = random.randint(1, min(6, len(self.history))) if is_stale else 1
        return self.history[-back]

    def hold(self, holder: str | None) -> None:
        """Change the holder's key. The record keeps its revision."""
        if holder != self.now.holder:
            self.history.append(self.now._replace(holder=holder))

    def restore(self, random: Random) -> bool:
        """Go back to an older state, perhaps with another set of replicas, as a restore from a copy does.

        Return whether there is an older state. The revision goes back, too, and no node holds the group.
        """
        newest = self.now.record
        older = [
            state._replace(holder=None)
            for state in self.history
            if state.record.epoch < newest.epoch or state.record.generation < newest.generation
        ]
        # Half of the time, a state with an older set of replicas.
        older_set = [state for state in older if state.record.generation < newest.generation]
        if older:
            self.history = [random.choice(older_set if older_set and random.random() < 0.5 else older)]
        return bool(older)

    def renew(self, epoch: int, generation: int) -> None:
        """Replace a record that is older than a promise, as `timeball cluster init` does with the last set."""
        self.last = replace(self.last, epoch=epoch, leader="", generation=generation)
        self.history.append(State(self.now.revision + 1, self.last, None))

    def swap(self, node: str, proposal: Propose) -> bool:
        """Carry out one transaction of `node`, unless the record or the holder has changed. Return whether it was."""
        revision, _, holder = self.now
        if revision != proposal.revision:
            return False
        if proposal.holder is Holder.TAKE:
            if holder not in (None, proposal.displaces):
                return False
            holder = node
        elif proposal.holder is Holder.RELEASE and holder == node:
            holder = None
        self.history.append(State(revision + 1, proposal.record, holder))
        if not proposal.record.former and proposal.record.generation >= self.last.generation:
            self.last = proposal.record
        return True
