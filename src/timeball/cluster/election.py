"""Becoming leader: swap the record, seal what lower epochs have written, open the own one.

CANDIDATE has proposed a record with the next epoch. SEALING asks all for their promise; when a majority of the record's
replicas has promised, nothing of a lower epoch can be acknowledged any more, and what was is in the log of one of them.
If one of them knows more (a later last epoch, or the same and a longer log), its log is fetched first (I6). SYNCING
appends one EPOCH row, and leads when it is committed (I7).

The etcd lease is no part of this: a record that is read late, or a holder's key that ended too early, makes a replica
try, no more.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster import following
from timeball.cluster.effects import (
    AppendEpoch,
    Dial,
    Effect,
    HangUp,
    Hold,
    Holder,
    KeepPromise,
    Propose,
    Resign,
    Send,
    Sync,
)
from timeball.cluster.events import Proposed, Seen
from timeball.cluster.following import Step
from timeball.cluster.leading import meet
from timeball.cluster.messages import Begin, Bytes, Fetch, Hello, Promise
from timeball.cluster.positions import BEGINNING, Ends, continuing, knowledge
from timeball.cluster.record import Record, majority, node_of
from timeball.cluster.replica import Lead, Replica, Role, Seal


def see(state: Replica, event: Seen) -> Step:
    """Take a record that was read; stand if the group has no holder."""
    state = adopt(state, event.revision, event.record)
    if event.revision != state.revision:
        return state, []
    vacant_since_ms = 0 if event.holder is not None else state.vacant_since_ms or state.now_ms
    state, record = replace(state, vacant_since_ms=vacant_since_ms), event.record
    # Sealed all the same, its epoch would be over before it began, and a hand-over would count from the later record.
    if state.seal and record.epoch > state.seal.epoch:
        return give_up(state)
    # A hand-over named this replica, or the answer to the own proposal was lost. Rule 2 of replica.py.
    if state.role is Role.FOLLOWER and record.leader == state.rules.replica and record.epoch > state.promised:
        return seal(state, record)
    return stand(state, "") if event.holder is None and not _is_handed_over(state) else (state, [])


def _is_handed_over(state: Replica) -> bool:
    """Return whether the record has just named another replica, which needs a moment to make the holder's key.

    A later epoch of this replica's would only be in its way. The moment is bounded: it may have died.
    """
    record = state.record
    return (
        record is not None
        and record.leader not in ("", state.rules.replica)
        and record.epoch > state.promised
        and state.now_ms - state.revised_ms < state.rules.hand_over_ms
    )


def adopt(state: Replica, revision: int, record: Record) -> Replica:
    """Take a record unless it is older than the one known; it decides who is a learner."""
    if revision < state.revision:
        return state
    revised_ms = state.now_ms if revision > state.revision else state.revised_ms
    state = replace(state, revision=revision, record=record, revised_ms=revised_ms)
    if state.role in (Role.LEARNER, Role.FOLLOWER):
        is_in = state.rules.replica in record.replicas
        state = replace(state, role=Role.FOLLOWER if is_in else Role.LEARNER)
    return state


def replace_leader(state: Replica, node: str) -> Step:
    """Stand in the place of a node that has died, unless another one has been named meanwhile."""
    if state.record is None or node_of(state.record.leader) != node:
        return state, []
    return stand(state, node)


def stand(state: Replica, displaces: str) -> Step:
    """Propose to lead in the next epoch."""
    record = state.record
    if state.role is not Role.FOLLOWER or record is None or not state.rules.stands:
        return state, []
    if _stands_back(state):
        return state, []
    # A replica that has promised a later epoch knows that this record is old, and would be refused by itself.
    if record.epoch < state.promised:
        return state, []
    proposal = replace(record, epoch=record.epoch + 1, leader=state.rules.replica)
    proposed = Propose(state.revision, proposal, Holder.TAKE, displaces)
    return replace(state, role=Role.CANDIDATE), [proposed]


def _stands_back(state: Replica) -> bool:
    """Return whether another replica, whose clock is right, is to stand first.

    A leader releases by its own clock. But a group without a leader releases nothing: the others have a bounded time.
    """
    waited_ms = state.now_ms - state.vacant_since_ms if state.vacant_since_ms else 0
    return state.off_ms > state.rules.off_ms_max and waited_ms < state.rules.stand_back_ms


def hear(state: Replica, event: Proposed) -> Step:
    """Take the answer to the own proposal."""
    if state.role is Role.CANDIDATE:
        state = replace(state, role=Role.FOLLOWER)
    if not event.succeeded:
        return state, []  # lost, or unknown: then the record will say
    state = adopt(state, event.revision, event.record)
    if state.role is Role.FOLLOWER and event.record.epoch > state.promised:
        return seal(state, event.record)
    return state, [Resign()]  # a later epoch was promised meanwhile


def seal(state: Replica, record: Record) -> Step:
    """Promise the own epoch, then ask all others to."""
    assert record.epoch > state.promised, "a replica never stands twice in one epoch"
    effects: list[Effect] = [Sync()] if state.unsynced_bytes else []
    effects += [KeepPromise(record.epoch), Hold(), Dial(record.epoch)]
    state = replace(
        state, role=Role.SEALING, promised=record.epoch, source=None, unsynced_bytes=0,
        seal=Seal(record.epoch, state.now_ms, {}),
    )  # fmt: skip
    return _judge(state, effects)


def greet(state: Replica, node: str) -> Step:
    """Begin a new connection that was opened here."""
    if not state.epoch:
        return state, []
    return state, [Send(node, Hello(state.epoch, state.rules.group, state.rules.replica))]


def collect(state: Replica, node: str, promise: Promise) -> Step:
    """Count a promise of the own epoch."""
    assert state.seal
    promises = {**state.seal.promises, node: promise}
    state = replace(state, seal=replace(state.seal, promises=promises))
    return (state, []) if state.seal and state.seal.fetching else _judge(state, [])


def fetched(state: Replica, node: str, message: Begin | Bytes) -> Step:
    """Write what another replica had more; ask for the rest, or look again who knows most."""
    seal = state.seal
    assert seal
    if seal.fetching != node:
        return state, []
    state, effects = following.write(state, message)
    goal = seal.promises[node].ends
    if isinstance(message, Begin):
        return state, effects
    if knowledge(state.log.ends) < knowledge(goal):
        return state, [*effects, Send(node, Fetch(seal.epoch, *state.log.end))]
    if state.unsynced_bytes:
        effects.append(Sync())
    state = replace(state, seal=replace(seal, fetching=""), unsynced_bytes=0)
    return _judge(state, effects)


def lose(state: Replica, node: str) -> Step:
    """Forget the promise of a node whose connection ended; it gives another one over the next."""
    assert state.seal
    promises = {name: promise for name, promise in state.seal.promises.items() if name != node}
    if state.seal.fetching == node:
        return give_up(state)  # the own log may be cut to what both have: another may know more now
    return replace(state, seal=replace(state.seal, promises=promises)), []


def give_up(state: Replica) -> Step:
    """Go back to following. Nothing was served, so the process goes on."""
    effects: list[Effect] = [Sync()] if state.unsynced_bytes else []
    state = replace(state, role=Role.FOLLOWER, seal=None, source=None, unsynced_bytes=0)
    if state.record:
        state = adopt(state, state.revision, state.record)
    return state, [*effects, HangUp(), Resign()]


def has_majority(state: Replica) -> bool:
    """Return whether most replicas of the swapped record, this one included, have promised the epoch."""
    assert state.seal and state.record
    promised = {state.rules.replica, *(promise.replica for promise in state.seal.promises.values())}
    replicas = state.record.replicas
    return len(promised.intersection(replicas)) >= majority(replicas)


def _judge(state: Replica, effects: list[Effect]) -> Step:
    """Fetch from the replica that knows most, or open the epoch when that is this one."""
    if not has_majority(state):
        return state, effects
    assert state.seal and state.record
    most, node = _most(state)
    if not node:
        return _open(state, effects)
    at = continuing(most, state.log.ends, state.seal.promises[node].first_seq)
    if at == BEGINNING and state.applied_seq:
        state, anew = following.begin_anew(state)
        return state, [*effects, HangUp(), Resign(), *anew]
    # Behind the match the own log is of an epoch that a majority has left behind: it was never committed.
    state, cuts = following.cut_log(state, at)
    fetch = Send(node, Fetch(state.epoch, *state.log.end))
    assert state.seal
    return replace(state, seal=replace(state.seal, fetching=node)), [*effects, *cuts, fetch]


def _most(state: Replica) -> tuple[Ends, str]:
    """Return the ends of the log that says most, and the node that has it: none when this one has."""
    assert state.seal and state.record
    most, found = state.log.ends, ""
    for node, promise in state.seal.promises.items():
        # A learner's log counts for nothing: it may lack what was committed, or hold what was lost.
        if promise.replica in state.record.replicas and knowledge(promise.ends) > knowledge(most):
            most, found = promise.ends, node
    return most, found


def _open(state: Replica, effects: list[Effect]) -> Step:
    """Append the EPOCH row, and tell those that have promised where both logs agree."""
    seal, record = state.seal, state.record
    assert seal and record
    lead = Lead(seal.epoch, state.now_ms, record.replicas, {})
    state = replace(state, role=Role.SYNCING, seal=None, lead=lead)
    for node, promise in seal.promises.items():
        state, more = meet(state, node, promise)
        effects += more
    return state, [*effects, AppendEpoch(lead.epoch)]
