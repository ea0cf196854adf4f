"""Whole brokers of one group in a deterministic simulation: `python -m tests.cluster.broker_simulation --seed 7`.

simulation.py tests the protocol alone. This tests the code above it: three machines, each with its broker, its
replica's log, caches and data files on `CrashFiles` (simulated_machine.py). Clients send, cancel, move, consume and
compact, also at a former leader. Machines lose their power, between any two calls to the disk, or their
process, pause, and get empty disks. Connections end, block one way and lag. Leases end early, etcd is unreachable, the
clocks are up to `SKEW_MS` apart. Then everything is repaired and becomes due, and the checker of the crash tests
(tests/crash/checker.py) compares the answers with the stored state. A seed gives the same run each time.

`--fault NAME` breaks one rule on purpose (FAULTS): the simulation must find it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import msgspec
from tests.cluster.memory_store import Memory
from tests.cluster.simulated_machine import CLUSTER, GROUP, TTL_MS, Machine
from tests.cluster.simulated_wire import Wire
from tests.cluster.simulation import broken
from tests.crash.checker import Observed, Outcome, Row, check
from tests.crash.world import World
from tests.crash_files import CrashFiles, PowerCut

from timeball.cluster.protocol.replica import Record, Role
from timeball.cluster.replica_log import ReplicaLog
from timeball.io.clock import ManualClock
from timeball.model.config import MIB
from timeball.model.errors import Corrupt, TimeballError
from timeball.node.node import Node

NAMES = ("a", "b", "c")
STEPS = 400
SKEW_MS = 400
NEVER_MS = 2**62
DELAYS_MS = (None, None, 1_000, 1_500, 3_000, 6_000, 12_000)  # further apart than the clocks, except None
BODY_BYTES = (20, 20, 30_000)
SEGMENT_BYTES = (MIB // 8, MIB)  # small, so that retention removes the first ones
HEAL_ROUNDS, HEAL_STEP_MS = 1_500, 40
FAULTS = ("no_sync", "acknowledges_alone")


class Fault(AssertionError):
    """A violation, as text."""


class SeenFromOutside(Observed):
    """An observer with the fastest of the clocks: a message may be early by the distance of the clocks."""

    def see(self, row: Row, now_ms: int) -> None:
        super().see(row, now_ms + SKEW_MS)


class Client(World):
    """The operations of the crash tests' world, for one process of one machine."""

    def __init__(self, simulation: Simulation, machine: Machine, node: Node) -> None:
        super().__init__(machine.files, simulation.clock, simulation.observed)
        self._simulation, self._machine, self.node = simulation, machine, node
        self._epoch = machine.epochs[-1]

    async def cancel(self, keys: Iterable[str]) -> None:
        """Cancel messages, and record when the first cancel of each was requested."""
        key_list, begun_ms = list(keys), self.clock.boot
        for key in key_list:
            self._simulation.cancelled_ms.setdefault(key, self.clock.wall)
        await super().cancel(key_list)
        self._forget_excused_verdicts(key_list, begun_ms)

    async def reschedule(self, keys: Iterable[str], delay_ms: int) -> None:
        """Give messages another delay."""
        key_list, begun_ms = list(keys), self.clock.boot
        await super().reschedule(key_list, delay_ms)
        self._forget_excused_verdicts(key_list, begun_ms)

    async def look_up(self, keys: Iterable[str]) -> None:
        """Look acknowledged messages up, which must be found."""
        for key in keys:
            begun_ms = self.clock.boot
            if not await self.broker.find(key) and not self.files.cut:
                self.observed.verdicts.setdefault(key, []).append("not_found")
                self._forget_excused_verdicts([key], begun_ms)

    def _forget_excused_verdicts(self, keys: list[str], begun_ms: int) -> None:
        """Forget a `not_found` of a replaced leader whose lease etcd has ended too early: it relied on it.

        No other verdict is excused: each is in a row, which only a majority commits.
        """
        is_excused = begun_ms < self._simulation.leases_hold_from_ms
        if is_excused and self._epoch != self._simulation.record().epoch:
            for verdicts in (self.observed.verdicts.get(key, []) for key in keys):
                if verdicts and verdicts[-1] == "not_found":
                    verdicts.pop()

    async def apply_retention(self) -> None:
        """Apply retention. Removed rows count as seen. A broker runs one retention at a time, so this does as well."""
        if self._machine.retaining_node is not self.node:
            self._machine.retaining_node = self.node
            await self.consume()
            await super().apply_retention()
            self._machine.retaining_node = None

    def fresh_keys(self, count: int) -> list[str]:
        self._simulation.keys += count
        return [f"k{self._simulation.keys - number:05d}" for number in range(count)]


class Simulation:
    """One run. All chance comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock, self.wire, self.keys = ManualClock(), Wire(), 0
        self.memory, self.observed = Memory(self.clock), SeenFromOutside()
        self.broken: list[str] = []
        self.cancelled_ms: dict[str, int] = {}  # when the first cancel of each key was requested
        self.deaths = 0
        self.leases_hold_from_ms = (
            0  # boot clock after which no leader relies on a lease that was ended early
        )
        segment_bytes = self.random.choice(SEGMENT_BYTES)
        self.machines = [Machine(name, self.memory, self.wire, self.random, segment_bytes) for name in NAMES]
        for machine in self.machines:
            machine.others = {other.name: other for other in self.machines}
            machine.clock.step_wall(self.random.randint(-SKEW_MS // 2, SKEW_MS // 2))
        scale = [self.random.choice((0.3, 1, 1, 3)) for _ in range(5)]
        actions = (
            (self.ask, 30), (self.boot, 4), (self.resume, 2), (self.unblock, 2), (self.reach, 2),
            (self.cut_power, 0.7 * scale[0]), (self.kill, 0.7 * scale[0]),
            (self.black_out, 0.3 * scale[0]), (self.pause, 0.6 * scale[1]),
            (self.block, 0.8 * scale[2]), (self.cut, 0.8 * scale[2]), (self.expire, 0.3 * scale[3]),
            (self.unreach, 0.4 * scale[3]), (self.wipe, 0.4 * scale[4]), (self.hand_over, 0.3 * scale[4]),
            (lambda: None, 50),
        )  # fmt: skip
        self.actions, self.weights = [action for action, _ in actions], [weight for _, weight in actions]

    def run(self, steps: int = STEPS) -> None:
        """Run with faults, then repair and compare. Raises Fault."""
        try:
            self._begin()
            for action in self.random.choices(self.actions, self.weights, k=steps):
                action()
                self.pass_time(self.random.choice((1, 5, 20, 50, 50)))
            self._compare(self._heal())
        finally:
            for machine in self.machines:
                if machine.is_up:
                    machine.die()

    def _begin(self) -> None:
        """Start all machines, write the first record, and wait for a leader."""
        for machine in self.machines:
            machine.start()
        first = self.machines[0]
        record = Record(0, "", tuple(machine.replica for machine in self.machines))
        first.loop.run_until_complete(first.coordinator.change(GROUP, 0, record))
        for _ in range(200):
            self.pass_time(20)
            if self.leaders():
                return
        raise Fault("no leader at the beginning")

    def pass_time(self, ms: int) -> None:
        """Let time pass and give each machine a turn, in any order."""
        for clock in (self.clock, *(machine.clock for machine in self.machines)):
            clock.advance(ms)
        order = list(self.machines)
        self.random.shuffle(order)
        for machine in order:
            machine.turn()
            self.bury(machine)

    def bury(self, machine: Machine) -> None:
        """End a process that wants to end, or whose disk has lost its power. Raises Fault for an unexpected end."""
        if not machine.is_up or (machine.ended is None and not machine.files.cut):
            return
        # A disk without power may raise any error. Otherwise the process may end only because it lost the lead.
        is_expected = isinstance(machine.ended, TimeballError) and not isinstance(machine.ended, Corrupt)
        if not machine.files.cut and not is_expected:
            raise Fault(f"{machine.name} ended: {machine.ended!r}") from machine.ended
        self.end(machine, loses_power=machine.files.cut and self.random.random() < 0.5)

    def end(self, machine: Machine, *, loses_power: bool) -> None:
        """End a process. With `loses_power`, everything that was not synced may be lost."""
        machine.die()
        self.deaths += 1
        if loses_power:
            machine.files = machine.files.crash(self.random.getrandbits(32))
        machine.files.cut = False
        if machine.unexpected_errors:
            raise Fault(f"{machine.name}: {machine.unexpected_errors}")

    def leaders(self) -> list[Machine]:
        """Return the machines that serve, or believe that they do."""
        return [machine for machine in self.machines if machine.is_up and machine.node is not None]

    # -- clients -----------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Let a client make a request to a machine that serves."""
        serving = self.leaders()
        if not serving:
            return
        machine = self.random.choice(serving)
        assert machine.node is not None
        client, random = Client(self, machine, machine.node), self.random
        # Retention may have removed messages released or cancelled long ago, and then they are not found.
        since_ms = self.clock.wall - 1_000
        known_keys = [
            key
            for key, message in self.observed.sent.items()
            if message.acked and min(message.due_ms or 0, self.cancelled_ms.get(key, NEVER_MS)) >= since_ms
        ]
        some_keys = random.sample(known_keys, min(len(known_keys), random.randint(1, 3)))
        delays_ms = random.choices(DELAYS_MS, k=random.randint(1, 4))
        topic, body_bytes, delay_ms = (
            random.choice("xy"),
            random.choice(BODY_BYTES),
            random.choice((1_500, 4_000)),
        )
        verbs: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (10, lambda: client.send(topic, delays_ms, body_bytes)),
            (4, lambda: client.cancel(some_keys)),
            (3, lambda: client.reschedule(some_keys[:1], delay_ms)),
            (3, lambda: client.look_up(some_keys[:1])),
            (4, client.consume),
            (1, client.save_offsets),
            (0.7, client.checkpoint),
            (0.5, client.compact),
            (2, client.apply_retention),
        ]  # fmt: skip
        self.give(machine, *random.choices([verb for _, verb in verbs], [weight for weight, _ in verbs]))

    def give(self, machine: Machine, verb: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Run a client's request on a machine's event loop."""

        async def attempt() -> Any:
            try:
                return await verb()
            except (TimeballError, PowerCut):
                return None  # not answered
            except Exception as error:
                if not machine.files.cut:
                    self.broken.append(f"{machine.name}: {''.join(traceback.format_exception(error))}")
                return None

        return machine.loop.create_task(attempt())

    # -- faults ------------------------------------------------------------------------------------------------------

    def any(self, *, up: bool = True) -> Machine | None:
        """Return a machine that is up or down, often one that serves."""
        machines = [machine for machine in self.machines if machine.is_up == up]
        serving = [machine for machine in self.leaders() if machine in machines]
        if serving and self.random.random() < 0.5:
            machines = serving
        return self.random.choice(machines) if machines else None

    def boot(self) -> None:
        """Start a machine that is down."""
        if machine := self.any(up=False):
            machine.start()
            self.bury(machine)

    def cut_power(self) -> None:
        """End the process at one of the next calls to its disk, half of the time with a power cut."""
        if (machine := self.any()) and machine.files.crash_at is None:
            machine.files.crash_at = machine.files.calls + self.random.randint(1, 40)

    def kill(self) -> None:
        """End a process now, half of the time with a power cut. Often one that has just received something."""
        machine = self.any()
        if machine is not None and machine.node is not None and self.random.random() < 0.5:
            client = Client(self, machine, machine.node)
            self.give(machine, lambda: client.send("x", [None, 1_500]))
            for _ in range(self.random.randint(1, 4)):
                machine.turn()
        if machine is not None and machine.is_up:
            self.end(machine, loses_power=self.random.random() < 0.5)

    def black_out(self) -> None:
        """Cut the power of all machines at once."""
        for machine in self.machines:
            if machine.is_up:
                self.end(machine, loses_power=True)

    def pause(self) -> None:
        """Suspend a process, until `resume`."""
        if machine := self.any():
            machine.is_paused = True

    def resume(self) -> None:
        """Let suspended processes continue."""
        for machine in self.machines:
            machine.is_paused = False

    def block(self) -> None:
        """Block one direction between two machines."""
        one, other = self.random.sample(NAMES, 2)
        self.wire.blocked.add((one, other))

    def unblock(self) -> None:
        """Unblock all directions."""
        self.wire.blocked.clear()

    def cut(self) -> None:
        """End a connection."""
        if self.wire.connections:
            self.wire.end(self.random.choice(sorted(self.wire.connections)), self.random)

    def expire(self) -> None:
        """End a lease early."""
        if self.memory.leases:
            self.memory.end(self.random.choice(sorted(self.memory.leases)))
            self.leases_hold_from_ms = self.clock.boot + TTL_MS

    def unreach(self) -> None:
        """Cut a machine off from etcd, until `reach`."""
        if machine := self.any():
            machine.is_without_store = True

    def reach(self) -> None:
        """Let all reach etcd again."""
        for machine in self.machines:
            machine.is_without_store = False

    def hand_over(self) -> None:
        """Ask a leader to hand over to another machine."""
        serving = [machine for machine in self.leaders() if not machine.is_paused]
        if serving:
            machine = self.random.choice(serving)
            other = self.random.choice([name for name in NAMES if name != machine.name])
            machine.loop.call_soon(machine.hand_over, other)

    def wipe(self) -> None:
        """Give a machine an empty disk."""
        machine = self.random.choice(self.machines)
        if self.may_lose(machine):
            if machine.is_up:
                machine.die()
            machine.files, machine.is_blank = CrashFiles(), True

    def may_lose(self, machine: Machine) -> bool:
        """Check that without this machine each counting set lacks at most one replica. A set of three bears no more."""
        sets = [self.record().replicas, self.record().former]
        for other in self.machines:
            if other.is_up and other.thread is not None and (lead := other.thread.state.lead):
                sets += [lead.replicas, lead.joining, lead.wanted, lead.former]
        intact = {other.replica for other in self.machines if other is not machine and not other.is_blank}
        return all(len(set(replicas) - intact) <= 1 for replicas in sets)

    def record(self) -> Record:
        """Return the group's record."""
        return msgspec.json.decode(self.memory.keys[f"tb/{CLUSTER}/state/{GROUP}"].value, type=Record)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _heal(self) -> Outcome:
        """Repair all, let all become due, and return the final state."""
        self.unblock(), self.resume(), self.reach()
        for machine in self.machines:
            machine.files.crash_at, machine.is_calm = None, True
        reading: asyncio.Task[Any] | None = None
        for number in range(HEAL_ROUNDS):
            while machine := self.any(up=False):
                machine.start()
            self.pass_time(HEAL_STEP_MS)
            for serving in self.leaders() if number % 50 == 0 else ():
                assert serving.node is not None
                self.give(serving, Client(self, serving, serving.node).consume)  # before retention removes it
            leader = self._settled_leader()
            if reading is not None and reading.done() and not reading.cancelled() and reading.result():
                if leader is not None:
                    return reading.result()  # type: ignore[no-any-return]
                reading = None
            elif leader is not None and leader.node is not None and (reading is None or reading.done()):
                reading = self.give(leader, partial(self._read, Client(self, leader, leader.node)))
        states = {
            machine.name: (machine.role, machine.replica, machine.ended)
            for machine in self.machines
            if machine.is_up
        }
        raise Fault(f"no convergence: {states}, {self.record()}")

    async def _read(self, client: Client) -> Outcome:
        await client.consume()
        return await client.outcome()

    def _settled_leader(self) -> Machine | None:
        """Return the leader when all replicas count, all due messages are released, and all logs equal its own."""
        leaders = self.leaders()
        if len(leaders) != 1 or not all(machine.is_up for machine in self.machines):
            return None
        leader = leaders[0]
        assert leader.node is not None
        last_ms = max(
            (max(message.due_ms or 0, *message.maybe_due, 0) for message in self.observed.sent.values()),
            default=0,
        )
        is_settled = leader.node.broker.scheduling.scheduler.settled_before_ms > last_ms
        if leader.role is not Role.LEADER or not is_settled or self.clock.wall < last_ms + 2 * SKEW_MS:
            return None
        if set(self.record().replicas) != {machine.replica for machine in self.machines}:
            return None
        ends = {machine.thread.state.log.end for machine in self.machines if machine.thread}
        return leader if len(ends) == 1 else None

    def _compare(self, outcome: Outcome) -> None:
        """Compare the answers with the final state. Raises Fault."""
        logs = [machine.content() for machine in self.machines]
        common_names = set.intersection(
            *map(set, logs)
        )  # a follower removes segments a moment later than its leader
        if not common_names or any(log[name] != logs[0][name] for log in logs for name in common_names):
            self.broken.append("the logs are not the same bytes")
        faults = [f"{fault.kind}: {fault.text}" for fault in check(self.observed, outcome)]
        faults += self.broken + [text for machine in self.machines for text in machine.unexpected_errors]
        if faults:
            raise Fault("; ".join(faults[:5]))

    @property
    def epochs(self) -> list[int]:
        """Return the epochs in which a broker served."""
        return sorted(epoch for machine in self.machines for epoch in machine.epochs)

    @property
    def acknowledged(self) -> list[str]:
        """Return the acknowledged keys."""
        return [key for key, sent in self.observed.sent.items() if sent.acked]


@contextmanager
def faulty(fault: str) -> Iterator[None]:
    """Break one rule on purpose."""
    if fault == "no_sync":
        with mock.patch.object(ReplicaLog, "sync", lambda self: None):
            yield
    else:
        with broken(fault):
            yield


def run(seed: int, steps: int = STEPS, fault: str = "") -> Simulation:
    """Run one seed; raises Fault."""
    simulation = Simulation(seed)
    logging.disable(logging.CRITICAL)  # crashes and elections log many lines
    try:
        with faulty(fault):
            simulation.run(steps)
    finally:
        logging.disable(logging.NOTSET)
        gc.collect()  # the disks of the seed
    return simulation


def main() -> int:
    """Run one seed, or many, and print the violations."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.broker_simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--fault", choices=FAULTS, default="")
    options = parser.parse_args()
    faulty_seeds = epochs = acknowledged = deaths = 0
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            simulation = run(seed, options.steps, options.fault)
        except Fault as fault:
            faulty_seeds += 1
            print(f"seed {seed}: {fault}")
            continue
        epochs, deaths = epochs + len(simulation.epochs), deaths + simulation.deaths
        acknowledged += len(simulation.acknowledged)
    print(
        f"{options.seeds} seeds, {epochs} epochs served, {deaths} deaths, {acknowledged} messages acknowledged, "
        f"{faulty_seeds} seeds with a fault"
    )
    return 1 if faulty_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
