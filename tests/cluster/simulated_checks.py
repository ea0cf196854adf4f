"""The invariants of docs/cluster-protocol.md, checked from outside at each step that could break one."""

from __future__ import annotations

from collections import defaultdict

from tests.cluster.simulated_disk import Disk, Entry

from timeball.cluster.protocol.messages import Message, Position, Promise
from timeball.cluster.protocol.replica import Record, majority


class Fault(AssertionError):
    """An invariant is broken; the text begins with its name."""


def check(is_kept: bool, text: str) -> None:
    """Raise Fault unless the invariant is kept."""
    if not is_kept:
        raise Fault(text)


class Checks:
    """The history of the whole group, which no replica knows."""

    def __init__(self) -> None:
        self.committed: list[Entry] = []
        self.acknowledged: list[tuple[str, int]] = []  # kind and number of a row that its sender relies on
        self.released: set[int] = set()
        self.removed = 0  # committed rows that a committed snapshot replaces and a leader has removed
        self._committed_in: list[int] = []  # for each committed row the epoch in which it was committed
        self.leaders: dict[int, str] = {}
        self._promised: dict[str, int] = defaultdict(int)  # replica -> its highest promised epoch
        self._chains: dict[tuple[int, int], int] = {}  # epoch and `seq` of a frame -> the chain up to it
        self._synced_by: dict[int, set[str]] = defaultdict(set)  # chain -> the replicas that have synced it
        self._checked: dict[str, int] = defaultdict(
            int
        )  # replica -> how many of its rows `apply` has compared

    def swap(self, before: Record, after: Record) -> None:
        """I1: every change of leader is another epoch, one more than the last."""
        changed = int(before.leader != after.leader or before.epoch != after.epoch)
        check(after.epoch == before.epoch + changed, f"I1: {before} became {after}")

    def send(self, replica: str, message: Message) -> None:
        """I2: no answer in an epoch below the highest promised one."""
        if isinstance(message, Promise):
            self._promised[replica] = max(self._promised[replica], message.epoch)
        check(message.epoch >= self._promised[replica], f"I2: {replica} answers {message}")

    def write(self, disk: Disk, count: int) -> None:
        """I3: a frame of an epoch always follows the same log, wherever it is."""
        for entry in disk.entries[-count:]:
            key = entry.frame.epoch, entry.frame.seq
            known = self._chains.setdefault(key, entry.chain)
            check(known == entry.chain, f"I3: two logs with a frame {key}")

    def sync(self, replica: str, entries: list[Entry]) -> None:
        """Record that these frames are on this replica's disk."""
        for entry in entries:
            self._synced_by[entry.chain].add(replica)

    def cut(self, replica: str, removed: list[Entry]) -> None:
        """I5: committed rows are not cut, unless a committed snapshot replaces them and a leader has removed them."""
        for entry in removed:
            index = entry.frame.seq - 1
            is_kept = (
                index >= len(self.committed)
                or self.committed[index].chain != entry.chain
                or index < self.removed
            )
            check(is_kept, f"I5: {replica} cuts the committed row {index + 1}")

    def commit(self, disk: Disk, to: Position, epoch: int, sets: list[tuple[str, ...]]) -> list[Entry]:
        """I4, I5, I8: rows on the disks of a majority, of the own epoch, are the same for all. Return the new ones."""
        last = disk.entries[to.seq - 2]
        check(last.frame.epoch == epoch, f"I4: epoch {epoch} commits up to a frame of {last.frame.epoch}")
        for replicas in sets:
            on = self._synced_by[last.chain].intersection(replicas)
            check(len(on) >= majority(replicas), f"I4: row {to.seq - 1} is on {on} of {replicas}")
        new_entries = self._agree(disk, to.seq - 1, may_add=True)
        self._committed_in += [epoch] * len(new_entries)
        return new_entries

    def begin_after(self, replica: str, seq: int) -> list[Entry]:
        """I5: a log may begin only after removed rows. Return these."""
        check(
            seq - 1 <= self.removed,
            f"I5: {replica} begins with row {seq}, removed are those to {self.removed}",
        )
        return self.committed[: seq - 1]

    def apply(self, replica: str, disk: Disk, seq: int) -> None:
        """I5: a follower applies committed rows, and no others."""
        check(seq - 1 <= len(self.committed), f"I5: {replica} applies row {seq - 1}, which is not committed")
        checked_rows = self._checked[replica]
        self._checked[replica] = max(checked_rows, seq - 1)
        for own, known in zip(
            disk.entries[checked_rows : seq - 1], self.committed[checked_rows : seq - 1], strict=True
        ):
            check(own.chain == known.chain, f"I5: {replica} applies another row {own.frame.seq}")

    def serve(self, replica: str, disk: Disk, epoch: int) -> None:
        """I1, I6, I7: one replica in this epoch, with all committed rows, and its EPOCH row among them."""
        check(self.leaders.setdefault(epoch, replica) == replica, f"I1: two lead in {epoch}")
        # A leader that was replaced before it served has the rows committed in lower epochs, and may serve them.
        known_seqs = [seq for seq, committed_in in enumerate(self._committed_in, 1) if committed_in <= epoch]
        self._agree(disk, known_seqs[-1] if known_seqs else 0, may_add=False)
        of_epoch = [entry.frame for entry in self.committed if entry.frame.epoch == epoch]
        check(bool(of_epoch) and of_epoch[0].kind == "E", f"I7: {replica} serves before its EPOCH row")

    def _agree(self, disk: Disk, count: int, *, may_add: bool) -> list[Entry]:
        """I6, I8: the first `count` rows of a disk begin with the committed rows, or are the beginning of these.

        Rows of the disk after the committed ones become committed and are returned. Unless `may_add`, the disk must
        have `count` rows.
        """
        own_rows = disk.entries[:count]
        for known, own in zip(self.committed, own_rows, strict=False):
            check(known.chain == own.chain, f"I6: another row {own.frame.seq} than the committed one")
        check(may_add or len(own_rows) >= count, "I6: committed rows are missing at a new leader")
        new_entries = own_rows[len(self.committed) :]
        for entry in new_entries:
            if entry.frame.kind == "R":
                check(entry.frame.number not in self.released, f"I8: promise {entry.frame.number} twice")
                self.released.add(entry.frame.number)
        self.committed += new_entries
        return new_entries

    def end(self, disks: list[Disk]) -> None:
        """Check that all logs are equal, that each acknowledged row is there once, and each promise released once."""
        logs = [[entry.chain for entry in disk.entries] for disk in disks]
        check(all(log == logs[0] for log in logs), "I3: the logs differ at the end")
        rows = [(entry.frame.kind, entry.frame.number) for entry in disks[0].entries]
        check(len(rows) == len(set(rows)), "I8: a row is there twice")
        missing = set(self.acknowledged) - set(rows)
        check(not missing, f"I5: acknowledged, and lost: {sorted(missing)}")
        promised = {number for kind, number in self.acknowledged if kind == "P"}
        check(promised <= self.released, f"I8: never released: {sorted(promised - self.released)}")
