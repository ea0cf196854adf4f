"""Replicas of one group in a deterministic simulation: `python -m tests.cluster.simulation --seed 7 --steps 600`.

The replicas are `timeball.cluster.protocol.machine.step` and nothing else. The simulation carries out its effects on a
disk, a network and a coordinator with every permitted fault. First come the faults: crashes (of the power or the
process) between any two effects, pauses, wipes and damage, connections that end, block one way or lag, leases that end
at any step, outdated reads, lost answers of swaps, replicas that join and leave, hand-overs, and with `restores` a
coordinator that is restored from an old copy, perhaps with an older set of replicas. Then all is repaired, and the
group must come to one leader and one log. simulated_checks.py checks the invariants, at each step and at the end.

`--fault NAME` breaks one rule on purpose (FAULTS): the simulation must find it. `--shrink` prints the smallest list of
disturbances with which a seed still fails, and `--trace` all events and effects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from tests.cluster.shrinking import shrink
from tests.cluster.simulated_checks import Checks, Fault
from tests.cluster.simulated_disk import (
    BATCH_BYTES,
    FRAME_BYTES,
    SEGMENT_BYTES,
    Disk,
    Entry,
    Frame,
    make_frame,
)
from tests.cluster.simulated_etcd import Etcd
from tests.cluster.simulated_wire import Pair, Wire

from timeball.cluster.protocol import effects as do
from timeball.cluster.protocol import election, following, leading
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import BEGINNING, Begin, Bytes, Complete, Data
from timeball.cluster.protocol.replica import Record, Replica, Role, Rules
from timeball.log.format import ALIGN
from timeball.model.errors import PeerError

NODES = ("a", "b", "c", "d")
TTL_MS = 1_000
HEAL_ROUNDS = 400
# Each of these steps has a random generator of its own, so that the rest of a run stays alike without it.
DISTURBANCES = frozenset(
    {"crash", "pause", "block", "cut", "expire", "restore", "wipe", "damage", "change", "hand_over"}
)
Disturbance = tuple[int, str]  # the number of a step, and its name
FAULTS = (
    "no_sync",
    "wiped_replica_votes",
    "no_seal",
    "acknowledges_alone",
    "serves_before_epoch",
    "promises_not_durable",
    "promises_twice",
)
ELECTS_BY_OLD_SET = "elects_by_old_set"  # a fault that `restored_to_old_set` shows


class Crash(Exception):
    """The node stops between two effects."""


@dataclass
class Node:
    """A machine: a disk, and a process while it is up."""

    name: str
    disk: Disk = field(default_factory=Disk)
    state: Replica | None = None
    is_paused: bool = False
    is_dialing: bool = False
    life: int = 0
    effects_left: int = -1  # until a crash; below zero: no crash is planned
    unreleased: list[int] = field(default_factory=list)
    answers: list[on.Proposed] = field(default_factory=list)  # arrived while it was paused
    is_etcd_restored: bool = False  # since it leads: it reads and swaps nothing

    @property
    def runs(self) -> bool:
        """Return whether the process is there and not stopped."""
        return self.state is not None and not self.is_paused

    @property
    def replica(self) -> str:
        """Return the replica that this disk is."""
        return f"{self.name}/{self.disk.incarnation}"


class PendingSwap(NamedTuple):
    """A change of the record that a node has proposed and the coordinator has not carried out yet."""

    node: str
    life: int
    is_withheld: (
        bool  # the coordinator was restored since the node leads: the production code would not send it
    )
    proposal: do.Propose


class Simulation:
    """One run. All chance comes from the seed."""

    def __init__(
        self, seed: int, fault: str = "", *, restores: bool = False, trace: list[str] | None = None
    ) -> None:
        """`trace` gets a text for each event with its effects."""
        self.seed, self.random, self.fault, self.trace = seed, Random(seed), fault, trace
        self.disturbances: list[Disturbance] = []
        self.nodes = {name: Node(name) for name in NODES}
        self.etcd = Etcd(Record(0, "", ("a/1", "b/1", "c/1")))
        self.wire, self.checks = Wire(), Checks()
        self.frames: dict[bytes, Frame] = {}
        self.snapshots: dict[int, int] = {}  # number of a snapshot -> `seq` of the first row that must stay
        self.swaps: list[PendingSwap] = []
        self.now_ms, self.numbers, self.healing = 0, 0, False
        self.epochs = 0
        scale = [self.random.choice((0.3, 1, 1, 3)) for _ in range(6)]
        self.actions: list[Callable[[], None]] = []
        self.weights: list[float] = []
        for action, weight in (
            (self.deliver, 60), (self.append, 14), (self.flush, 6), (self.tick, 5), (self.watch, 8), (self.swap, 8),
            (self.renew, 4), (self.connect, 8), (self.start, 4), (self.release, 5), (self.resume, 3),
            (self.crash, 1.2 * scale[0]), (self.pause, 0.6 * scale[1]), (self.block, 0.8 * scale[2]),
            (self.unblock, 1.6), (self.cut, 0.8 * scale[2]), (self.expire, 1.5 * scale[3]), (self.wipe, 0.4 * scale[4]),
            (self.damage, 0.3 * scale[4]), (self.change, 0.6 * scale[5]), (self.hand_over, 0.4 * scale[5]),
            (self.retain, 3),
        ):  # fmt: skip
            self.actions.append(action)
            self.weights.append(weight)
        if restores or fault == "promises_twice":
            self.actions += [self.restore, self.change]
            self.weights += [1.0, 2.0]

    def run(self, steps: int, without: Collection[Disturbance] = ()) -> None:
        """Run with faults, then repair. Raises Fault. The disturbances of `without` are left out."""
        for name in NODES:
            self.boot(self.nodes[name])
        with broken(self.fault):
            for number, action in enumerate(self.random.choices(self.actions, self.weights, k=steps)):
                disturbance = number, action.__name__
                if action.__name__ not in DISTURBANCES:
                    action()
                elif disturbance not in without:
                    self.disturb(disturbance, action)
            self.heal()

    def disturb(self, disturbance: Disturbance, action: Callable[[], None]) -> None:
        """Take a step whose chance depends on the seed and its number alone."""
        self.disturbances.append(disturbance)
        others, self.random = self.random, Random(f"{self.seed} {disturbance[0]}")
        action()
        self.random = others

    # -- effects ------------------------------------------------------------------------------------------------

    def give(self, node: Node, event: on.Event) -> None:
        """Pass an event to a process and carry out its effects. A crash may come between two effects."""
        if node.state is None:
            return
        try:
            node.state, effects = step(node.state, event)
        except PeerError as error:
            raise Fault(f"{node.name} refuses a message: {error}") from error
        except AssertionError as error:
            raise Fault(f"{node.name}: {error}") from error
        if self.trace is not None:
            self.trace.append(f"{node.name} {event} {effects}")
        for effect in effects:
            if node.effects_left >= 0:
                if node.effects_left == 0:
                    self.kill(node, power=self.random.random() < 0.6)
                    return
                node.effects_left -= 1
            self.carry_out(node, effect)
            if node.state is None:
                return

    def carry_out(self, node: Node, effect: do.Effect) -> None:
        """Carry out one effect."""
        disk = node.disk
        match effect:
            case do.Send(to, message):
                is_answer = message.TYPE > 10
                if is_answer:
                    self.checks.send(node.replica, message)
                self.wire.send(node.name, to, message, is_answer=is_answer)
            case do.Write(ordinal, position, frames):
                raw_frames = [frames[at : at + FRAME_BYTES] for at in range(0, len(frames), FRAME_BYTES)]
                disk.write(ordinal, position, [self.frames[raw] for raw in raw_frames])
                self.checks.write(disk, len(raw_frames))
            case do.Sync() if self.fault != "no_sync":
                self.checks.sync(node.replica, disk.entries[disk.synced :])
                disk.synced = len(disk.entries)
            case do.Sync():
                self.checks.sync(node.replica, disk.entries[disk.synced :])  # as the replica believes
            case do.BeginSegment(begin):
                if not disk.headers and begin.first_seq > 1:
                    disk.begin_after(self.checks.begin_after(node.replica, begin.first_seq))
                disk.begin(begin.ordinal, begin.header)
            case do.CutLog(at):
                self.checks.cut(node.replica, disk.cut(at))
            case do.KeepPromise(epoch, to, members):
                disk.promised, disk.promised_to, disk.members = epoch, to, members
                if self.fault != "promises_not_durable":
                    disk.promised_durably = epoch
            case do.Commit(position):
                self.commit(node, position)
            case do.Apply(seq):
                self.checks.apply(node.replica, disk, seq)
                self.remove_old_segments(node, disk.entries[: seq - 1])
            case _:
                self.carry_out_rest(node, effect)

    def carry_out_rest(self, node: Node, effect: do.Effect) -> None:
        """Carry out one effect that is not part of a commit."""
        match effect:
            case do.Ship():
                self.ship(node, effect)
            case do.Propose():
                self.swaps.append(PendingSwap(node.name, node.life, node.is_etcd_restored, effect))
            case do.Hold():
                if self.etcd.now.holder is None:
                    self.etcd.hold(node.name)
            case do.Resign():
                if self.etcd.now.holder == node.name:
                    self.etcd.hold(None)
            case do.Dial():
                node.is_dialing = True
            case do.HangUp():
                node.is_dialing = False
                self.wire.hang_up(node.name, self.random)
            case do.AppendEpoch():
                self.write_commit(node, [("E", effect.epoch)])
            case do.Serve(epoch):
                self.epochs += 1
                self.checks.serve(node.replica, node.disk, epoch)
                rows = [(entry.frame.kind, entry.frame.number) for entry in node.disk.entries]
                released = {number for kind, number in rows if kind == "R"}
                node.unreleased = [number for kind, number in rows if kind == "P" and number not in released]
            case do.StopServing():
                self.kill(node, power=False)

    def commit(self, node: Node, position: Any) -> None:
        """Check a Commit effect, record its rows as acknowledged, and remove old segments."""
        assert node.state and node.state.lead
        lead = node.state.lead
        sets = [replicas for replicas in (lead.replicas, lead.joining, lead.former) if replicas]
        new_entries = self.checks.commit(node.disk, position, lead.epoch, sets)
        self.checks.acknowledged += [(entry.frame.kind, entry.frame.number) for entry in new_entries]
        self.remove_old_segments(node, node.disk.entries[: position.seq - 1])

    def remove_old_segments(self, node: Node, committed: list[Entry]) -> None:
        """Remove the segments whose rows the last committed snapshot replaces. Leaders and followers do so."""
        snapshots = [
            entry.frame.number for entry in committed[node.disk.removed :] if entry.frame.kind == "S"
        ]
        if snapshots and node.disk.drop_below(self.snapshots[snapshots[-1]]):
            self.checks.removed = max(self.checks.removed, node.disk.removed)
            self.give(node, on.Dropped(node.disk.first))

    def report_log_begin(self, node: Node) -> None:
        """Tell a node where its log begins. A learner reports that it has the data files, which do not exist here."""
        if node.state and node.state.first != node.disk.first:
            self.give(node, on.Dropped(node.disk.first))
        state = node.state
        if state and state.role is Role.LEARNER and state.source and state.source.matched:
            message = Complete(state.promised, state.applied_seq)
            self.checks.send(node.replica, message)
            self.wire.send(node.name, state.source.node, message, is_answer=True)

    def ship(self, node: Node, effect: do.Ship) -> None:
        """Send frames from the disk, one message of at most three."""
        disk, at = node.disk, effect.begin
        first = max(disk.count(at), disk.removed)
        if at != BEGINNING and disk.count(at) < disk.removed:
            # Removed by the effect before: the other node refuses a segment after a gap, which ends the connection.
            pair = (effect.node, node.name) if effect.fetched else (node.name, effect.node)
            if pair in self.wire.connections:
                self.wire.end(pair, self.random)
            return
        entries = disk.entries[first : first + 3]
        entries = [entry for entry in entries if entry.ordinal == entries[0].ordinal]
        if entries:
            begin = entries[0]
            if begin.position == ALIGN:
                header = disk.headers[begin.ordinal]
                message = Begin(effect.epoch, begin.ordinal, SEGMENT_BYTES, begin.frame.seq, header)
                self.wire.send(node.name, effect.node, message, is_answer=effect.fetched)
            raw = b"".join(entry.frame.raw for entry in entries)
            at, place = entries[-1].end, (begin.ordinal, begin.position)
            if effect.fetched:
                answer = Bytes(effect.epoch, *place, at.seq, raw)
                self.checks.send(node.replica, answer)
                self.wire.send(node.name, effect.node, answer, is_answer=True)
            else:
                committed = node.state.committed_seq if node.state else 0
                data = Data(effect.epoch, *place, at.seq, committed, raw)
                self.wire.send(node.name, effect.node, data, is_answer=False)
        if not effect.fetched:
            self.give(node, on.Shipped(effect.node, at))

    def write_commit(self, node: Node, rows: list[tuple[str, int]]) -> None:
        """Append rows at a leader, as the log's writer does: a commit never spans segments."""
        assert node.state
        log, epoch, begin = node.state.log, node.state.epoch, None
        ordinal, position, seq = log.ordinal, log.next_byte, max(log.seq, 1)
        if not ordinal or position + len(rows) * FRAME_BYTES > SEGMENT_BYTES:
            ordinal, position = ordinal + 1, ALIGN
            header = f"{ordinal} of epoch {epoch}".encode().ljust(ALIGN, b"\0")
            begin = Begin(epoch, ordinal, SEGMENT_BYTES, seq, header)
        elif position == ALIGN:  # begun by another leader, and still empty
            begin = Begin(epoch, ordinal, SEGMENT_BYTES, seq, node.disk.headers[ordinal])
        raw = b""
        for number, (kind, value) in enumerate(rows):
            place = position + number * FRAME_BYTES
            frame = make_frame(epoch, seq + number, place, position, kind, value)
            self.frames[frame.raw] = frame
            raw += frame.raw
        self.give(node, on.Appended(ordinal, position, seq + len(rows), raw, self.now_ms, begin))

    # -- steps --------------------------------------------------------------------------------------------------

    def boot(self, node: Node) -> None:
        """Start a process."""
        if node.state is None:
            log = node.disk.start()
            self.checks.sync(node.replica, node.disk.entries)
            node.life += 1
            # Short waits, because a run has only some seconds.
            rules = Rules(
                node.replica, batch_bytes=BATCH_BYTES, quorum_ms=3 * TTL_MS, back_off_ms=1, back_off_ms_max=50
            )
            node.state = Replica(
                rules, promised=node.disk.promised, promised_to=node.disk.promised_to,
                members=node.disk.members, log=log, first=node.disk.first, now_ms=self.now_ms,
            )  # fmt: skip
            node.is_paused = node.is_dialing = node.is_etcd_restored = False
            node.effects_left, node.unreleased, node.answers = -1, [], []

    def kill(self, node: Node, *, power: bool) -> None:
        """End a process. With `power`, the disk may also lose the bytes that were not synced."""
        node.state, node.is_dialing = None, False
        self.wire.die(node.name, self.random)
        if power:
            node.disk.lose_power(self.random, keeps_promise=self.fault != "promises_not_durable")

    def running(self, *roles: Role) -> Node | None:
        """Return any node that runs, in one of these roles if any are given."""
        candidates = [
            node
            for node in self.nodes.values()
            if node.runs and (not roles or (node.state and node.state.role in roles))
        ]
        return self.random.choice(candidates) if candidates else None

    def deliver(self) -> None:
        """Let one message arrive, or several on one connection."""
        waiting = [
            (pair, back) for pair, back in self.wire.waiting() if self.nodes[pair[0 if back else 1]].runs
        ]
        if not waiting:
            return
        pair, back = self.random.choice(waiting)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self.receive(pair, back)

    def receive(self, pair: Pair, back: bool) -> None:
        """Let the next message of a connection arrive."""
        reader, sender = (pair[0], pair[1]) if back else (pair[1], pair[0])
        connection = self.wire.connections.get(pair)
        node = self.nodes[reader]
        if connection is None or not node.runs or not (connection.back if back else connection.out):
            return
        message = self.wire.take(pair, back=back)
        if message is None:
            self.give(node, on.Disconnected(sender, back))
        else:
            self.give(node, on.Received(sender, message))

    def append(self) -> None:
        """Let a client send."""
        node = self.running(Role.LEADER)
        if node:
            rows = []
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                self.numbers += 1
                rows.append((self.random.choice("MP"), self.numbers))
            node.unreleased += [number for kind, number in rows if kind == "P"]
            self.write_commit(node, rows)

    def retain(self) -> None:
        """Let a leader write a snapshot, which allows the removal of older segments."""
        node = self.running(Role.LEADER)
        if node and node.state and node.state.lead:
            self.numbers += 1
            committed = node.state.lead.committed.seq
            self.snapshots[self.numbers] = self.random.randint(1, max(1, committed))
            self.write_commit(node, [("S", self.numbers)])

    def release(self) -> None:
        """Let a leader release a promise."""
        node = self.running(Role.LEADER)
        if node and node.unreleased:
            self.write_commit(node, [("R", node.unreleased.pop(0))])

    def flush(self) -> None:
        """Tell a replica that nothing more has arrived."""
        if node := self.running():
            self.give(node, on.Flush())

    def tick(self) -> None:
        """Let time pass, and tell one node."""
        self.now_ms += self.random.choice((1, 5, 20, 50, 300))
        if node := self.running():
            self.give(node, on.Tick(self.now_ms))
            self.report_log_begin(node)

    def watch(self) -> None:
        """Let a node read the record."""
        node = self.running()
        if node and not node.is_etcd_restored:
            is_stale = not self.healing and self.random.random() < 0.3
            self.give(node, on.Seen(*self.etcd.read(self.random, is_stale=is_stale)))

    def swap(self) -> None:
        """Carry out one swap, and answer its sender, if it still runs."""
        if not self.swaps:
            return
        swap = self.swaps.pop(self.random.randrange(len(self.swaps)))
        node, before = self.nodes[swap.node], self.etcd.now.record
        succeeded: bool | None = (
            not swap.is_withheld and not node.is_etcd_restored and self.etcd.swap(swap.node, swap.proposal)
        )
        if succeeded:
            self.checks.swap(before, swap.proposal.record)
        if not self.healing and self.random.random() < 0.15:
            succeeded = None  # the answer is lost
        answer = on.Proposed(self.etcd.now.revision, swap.proposal.record, succeeded)
        if node.state is not None and node.life == swap.life:
            if node.is_paused:
                node.answers.append(answer)
            else:
                self.give(node, answer)

    def renew(self) -> None:
        """Renew a node's lease."""
        if node := self.running():
            self.give(node, on.LeaseExtended(self.now_ms + TTL_MS))

    def connect(self) -> None:
        """Open a connection that a node wants."""
        dialing = [node for node in self.nodes.values() if node.runs and node.is_dialing]
        if dialing:
            node = self.random.choice(dialing)
            to = self.random.choice([name for name in NODES if name != node.name])
            if self.nodes[to].state is not None and self.wire.open(node.name, to):
                self.give(node, on.Connected(to))

    # -- faults -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process that is down."""
        down = [node for node in self.nodes.values() if node.state is None]
        if down:
            self.boot(self.random.choice(down))

    def crash(self) -> None:
        """End a process, now or between two of the next effects, often the leader's."""
        node = (
            self.running(Role.LEADER, Role.SYNCING, Role.SEALING)
            if self.random.random() < 0.6
            else self.running()
        )
        if node is None:
            return
        if self.random.random() < 0.6:
            node.effects_left = self.random.randint(0, 5)
        else:
            self.kill(node, power=self.random.random() < 0.6)

    def pause(self) -> None:
        """Suspend a process, until `resume`."""
        if node := self.running():
            node.is_paused = True

    def resume(self) -> None:
        """Let suspended processes continue, half of them or all, and give them the answers that arrived."""
        for node in self.nodes.values():
            if node.is_paused and (self.healing or self.random.random() < 0.5):
                node.is_paused = False
                while node.answers and node.state is not None:
                    self.give(node, node.answers.pop(0))

    def block(self) -> None:
        """Block one direction between two nodes."""
        pair = self.random.sample(NODES, 2)
        self.wire.blocked.add((pair[0], pair[1]))

    def unblock(self) -> None:
        """Unblock a direction."""
        if self.wire.blocked:
            self.wire.blocked.discard(self.random.choice(sorted(self.wire.blocked)))

    def cut(self) -> None:
        """End a connection."""
        if self.wire.connections:
            self.wire.end(self.random.choice(sorted(self.wire.connections)), self.random)

    def expire(self) -> None:
        """End the holder's lease."""
        self.etcd.hold(None)

    def restore(self) -> None:
        """Restore the coordinator from an old copy. Replicas that do not lead begin anew (cluster/member.py)."""
        if self.etcd.restore(self.random):
            self.swaps.clear()  # their answers are lost
            for node in self.nodes.values():
                if node.state is not None and node.state.role is not Role.LEADER:
                    self.kill(node, power=False)
                node.is_etcd_restored = True

    def wipe(self) -> None:
        """Give a machine an empty disk."""
        node = self.random.choice(list(self.nodes.values()))
        if self.may_lose(node):
            if node.state is not None:
                self.kill(node, power=True)
            votes = self.fault == "wiped_replica_votes"
            node.disk = Disk(incarnation=node.disk.incarnation + (0 if votes else 1))
            if votes:
                self.checks._promised.pop(node.replica, None)

    def damage(self) -> None:
        """Change a byte of a frame that was on the disk, and start the machine."""
        node = self.random.choice(list(self.nodes.values()))
        if self.may_lose(node) and node.disk.damage(self.random):
            if node.state is not None:
                self.kill(node, power=False)
            self.boot(node)

    def may_lose(self, node: Node) -> bool:
        """Check that without this node each counting set lacks at most one replica. A set of three bears no more."""
        records = [self.etcd.now.record, self.etcd.last, *(swap.proposal.record for swap in self.swaps)]
        sets = [replicas for record in records for replicas in (record.replicas, record.former)]
        for other in self.nodes.values():
            if other.state and other.state.lead:
                sets += [other.state.lead.joining, other.state.lead.wanted, other.state.lead.former]
        intact = {
            other.replica for other in self.nodes.values() if other is not node and not other.disk.damaged
        }
        return all(len(set(replicas) - intact) <= 1 for replicas in sets)

    def change(self) -> None:
        """Ask a leader for another set: with one replica more, less, or replaced."""
        node = self.running(Role.LEADER)
        if node is None or node.state is None or node.state.lead is None:
            return
        inside = list(node.state.lead.replicas)
        names = {replica.split("/")[0] for replica in inside}
        outside = [other.replica for other in self.nodes.values() if other.name not in names]
        if outside and self.random.random() < 0.7:
            inside.append(outside[0])
        others = [replica for replica in inside if replica != node.replica]
        if len(inside) > 3 and self.random.random() < 0.7:
            inside.remove(self.random.choice(others))
        self.give(node, on.ReplicasWanted(tuple(inside)))

    def hand_over(self) -> None:
        """Ask a leader to hand over to another node."""
        if node := self.running(Role.LEADER):
            self.give(node, on.HandOver(self.random.choice(NODES)))

    # -- the end ------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Repair all, and run until there is one leader with all logs equal to its own. Raises Fault."""
        self.healing = True
        self.wire.blocked.clear()
        for node in self.nodes.values():
            node.effects_left = -1
        self.resume()
        for _ in range(HEAL_ROUNDS):
            self.heal_once()
            if self.has_converged():
                self.checks.end([node.disk for node in self.nodes.values()])
                return
        states = {
            node.name: (node.replica, node.state and node.state.role, len(node.disk.entries))
            for node in self.nodes.values()
        }
        raise Fault(f"no convergence: {states}, {self.etcd.now}")

    def heal_once(self, names: Sequence[str] = NODES, *, renews: bool = True) -> None:
        """Do all pending work, once. Only these nodes are started, and `renews` lets an operator renew the record."""
        self.now_ms += 60
        while self.swaps:
            self.swap()
        promised = max(node.disk.promised for node in self.nodes.values())
        known_generation, record = (
            max(node.disk.members.generation for node in self.nodes.values()),
            self.etcd.now.record,
        )
        if renews and (promised > record.epoch or known_generation > record.generation):
            self.etcd.renew(promised, max(known_generation, record.generation) + 1)  # as an operator does
        holder = self.etcd.now.holder
        if holder and (self.nodes[holder].state is None or not self.nodes[holder].is_dialing):
            self.etcd.hold(None)
        order = [self.nodes[name] for name in names]
        self.random.shuffle(order)
        for node in order:
            self.boot(node)
            self.give(node, on.LeaseExtended(self.now_ms + TTL_MS))
            if not node.is_etcd_restored:
                self.give(node, on.Seen(*self.etcd.now))
            if node.is_dialing:
                for to in names:
                    if to != node.name and self.wire.open(node.name, to):
                        self.give(node, on.Connected(to))
        for _ in range(3):
            for pair, back in self.wire.waiting():
                for _ in range(10):
                    self.receive(pair, back)
        for node in order:
            self.give(node, on.Flush())
            self.give(node, on.Tick(self.now_ms))
            self.report_log_begin(node)
        self.release()

    def has_converged(self) -> bool:
        """Check that one leads, nothing is in progress, and all disks have its log."""
        leaders = [node for node in self.nodes.values() if node.state and node.state.role is Role.LEADER]
        if len(leaders) != 1 or leaders[0].unreleased or self.swaps:
            return False
        state = leaders[0].state
        assert state and state.lead
        if state.lead.joining or state.lead.former or state.lead.committed != state.log.end:
            return False
        length = len(leaders[0].disk.entries)
        all_replicas = {node.replica for node in self.nodes.values()}
        return set(state.lead.replicas) <= all_replicas and all(
            len(node.disk.entries) == length and (node.disk.synced == length or self.fault == "no_sync")
            for node in self.nodes.values()
        )  # fmt: skip


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Break one rule of the protocol on purpose. The faults of the disk are applied with the effects."""
    if fault == "no_seal":
        with mock.patch.object(election, "has_majority", lambda state: True):
            yield
    elif fault == "acknowledges_alone":
        with mock.patch.object(leading, "find_position", lambda state, *_: state.log.end):
            yield
    elif fault == "promises_twice":
        with mock.patch.object(following, "is_promised_to_another", lambda state, hello: False):
            yield
    elif fault == ELECTS_BY_OLD_SET:
        with (
            mock.patch.object(following, "is_of_older_set", lambda state, hello: False),
            mock.patch.object(election, "knows_newer_set", lambda state, record: False),
            mock.patch.object(leading, "has_stored_set", lambda state, replicas: True),
        ):
            yield
    elif fault == "serves_before_epoch":
        with mock.patch.object(leading, "is_of_own_epoch", lambda lead, position: True):
            yield
    else:
        yield


def run(
    seed: int, steps: int, fault: str = "", *, restores: bool = False, trace: list[str] | None = None
) -> Simulation:
    """Run one seed; raises Fault."""
    simulation = Simulation(seed, fault, restores=restores, trace=trace)
    try:
        simulation.run(steps)
    except Fault as violation:
        options = f"{' --restores' if restores else ''}{f' --fault {fault}' if fault else ''}"
        command = f"python -m tests.cluster.simulation --seed {seed} --steps {steps}{options} --shrink"
        violation.add_note(f"the smallest list of disturbances: {command}")
        raise
    return simulation


def shrunk(seed: int, steps: int, fault: str = "", *, restores: bool = False) -> list[Disturbance]:
    """Return the smallest list of disturbances with which a failing seed breaks the same invariant."""

    def run_without(without: Collection[Disturbance]) -> tuple[str, list[Disturbance]]:
        """Return the broken invariant, or an empty text, and the disturbances that took place."""
        simulation = Simulation(seed, fault, restores=restores)
        try:
            simulation.run(steps, without)
        except Fault as violation:
            return str(violation).partition(":")[0], simulation.disturbances
        return "", simulation.disturbances

    invariant, disturbances = run_without(())
    return shrink(disturbances, lambda part: run_without(set(disturbances).difference(part))[0] == invariant)


def restored_to_old_set(seed: int, fault: str = "") -> None:
    """Restore the coordinator from a copy of before a change of the set, and start only replicas of the old set.

    They lack committed rows. Then all is repaired. Raises Fault.
    """
    simulation = Simulation(seed, fault)
    simulation.healing = True
    with broken(fault):
        while not (leader := simulation.running(Role.LEADER)):
            simulation.heal_once()
        old = [simulation.nodes[name.split("/")[0]] for name in simulation.etcd.now.record.replicas]
        behind, removed = (node for node in old if node is not leader)
        (added,) = (node for node in simulation.nodes.values() if node not in old)
        wanted = (leader.replica, behind.replica, added.replica)
        while set(simulation.etcd.now.record.replicas) != set(wanted) or simulation.etcd.now.record.former:
            simulation.give(leader, on.ReplicasWanted(wanted))
            simulation.heal_once()
        simulation.kill(behind, power=False)
        simulation.kill(removed, power=False)
        committed = len(simulation.checks.committed)
        simulation.append()
        while len(simulation.checks.committed) == committed:
            simulation.heal_once((leader.name, added.name))
        for node in (leader, added):
            simulation.kill(node, power=False)
        of_old_set = [state for state in simulation.etcd.history if state.record.generation == 1]
        simulation.etcd.history = of_old_set[-1:]
        simulation.etcd.hold(None)
        for _ in range(100):
            simulation.heal_once((behind.name, removed.name), renews=False)
        simulation.heal()


def main() -> int:
    """Run one seed, or many, and print the violations."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--restores", action="store_true", help="restore the coordinator from old copies")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--shrink", action="store_true", help="print the smallest list of disturbances")
    parser.add_argument("--trace", action="store_true", help="print all events and effects")
    options = parser.parse_args()
    faulty_seeds = epochs = rows = 0
    for seed in range(options.seed, options.seed + options.seeds):
        trace: list[str] | None = [] if options.trace else None
        try:
            simulation = run(seed, options.steps, options.fault, restores=options.restores, trace=trace)
            epochs, rows = epochs + simulation.epochs, rows + len(simulation.checks.acknowledged)
        except Fault as fault:
            faulty_seeds += 1
            if faulty_seeds <= 10:
                print(f"seed {seed}: {fault}")
                if options.shrink:
                    smallest = shrunk(seed, options.steps, options.fault, restores=options.restores)
                    print("".join(f"  step {number}: {name}\n" for number, name in smallest), end="")
        for line in trace or ():
            print(line)
    print(
        f"{options.seeds} seeds, {epochs} epochs led, {rows} rows acknowledged, {faulty_seeds} seeds with a fault"
    )
    return 1 if faulty_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
