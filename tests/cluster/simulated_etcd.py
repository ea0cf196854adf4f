"""A coordinator whose record is swapped in one order, and whose reads may be outdated."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from timeball.cluster.protocol.effects import Holder, Propose
from timeball.cluster.protocol.replica import Record


class Etcd:
    """One record and the key of its holder. Leases end when the simulation says so."""

    def __init__(self, record: Record) -> None:
        self.history: list[tuple[int, Record, str | None]] = [(1, record, None)]
        self.last = record  # with the set of the last change that has ended, which the operator knows

    @property
    def now(self) -> tuple[int, Record, str | None]:
        """Return the revision, the record and the holder's node."""
        return self.history[-1]

    def read(self, random: Random, *, is_stale: bool) -> tuple[int, Record, str | None]:
        """Return a state, perhaps an older one."""
        back = random.randint(1, min(6, len(self.history))) if is_stale else 1
        return self.history[-back]

    def hold(self, holder: str | None) -> None:
        """Change the holder's key. The record keeps its revision."""
        revision, record, before = self.now
        if holder != before:
            self.history.append((revision, record, holder))

    def restore(self, random: Random) -> bool:
        """Go back to an older state, perhaps with another set of replicas, as a restore from a copy does.

        Return whether there is one. The revision goes back, too, and no node holds the group.
        """
        _, record, _ = self.now
        older = [
            (revision, each, None)
            for revision, each, _ in self.history
            if each.epoch < record.epoch or each.generation < record.generation
        ]
        # Often from just before the last change of the set.
        other_set = [each for each in older if each[1].generation < record.generation]
        if older:
            self.history = [random.choice(other_set if other_set and random.random() < 0.5 else older)]
        return bool(older)

    def renew(self, epoch: int, generation: int) -> None:
        """Replace a record that is older than a promise, as `timeball cluster init` does with the last set."""
        revision = self.now[0]
        self.last = replace(self.last, epoch=epoch, leader="", generation=generation)
        self.history.append((revision + 1, self.last, None))

    def swap(self, node: str, proposal: Propose) -> bool:
        """Carry out one transaction."""
        revision, _, holder = self.now
        if revision != proposal.revision:
            return False
        if proposal.holder is Holder.TAKE:
            if holder not in (None, proposal.displaces):
                return False
            holder = node
        elif proposal.holder is Holder.RELEASE and holder == node:
            holder = None
        self.history.append((revision + 1, proposal.record, holder))
        if not proposal.record.former and proposal.record.generation >= self.last.generation:
            self.last = proposal.record
        return True
