"""The state machine of a replica: `step` passes each event to the function that handles it in the replica's role."""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.protocol import election, following, leading, replicas
from timeball.cluster.protocol.effects import Effect, PassOn
from timeball.cluster.protocol.events import (
    Appended,
    Connected,
    Disconnected,
    Dropped,
    Event,
    Flush,
    HandOver,
    LeaderDied,
    LeaseExtended,
    Proposed,
    Received,
    ReplicasWanted,
    Seen,
    Shipped,
    Tick,
)
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.messages import (
    Ack,
    Begin,
    Bytes,
    Complete,
    File,
    Have,
    Hello,
    Message,
    Pong,
    Promise,
    Refuse,
    Want,
)
from timeball.cluster.protocol.replica import Replica, Role

LEADS = (Role.SYNCING, Role.LEADER)


def step(state: Replica, event: Event) -> tuple[Replica, list[Effect]]:
    """Compute the state after `event` and the effects to carry out, in this order."""
    if state.role is Role.STOPPED:
        return state, []
    match event:
        case Received():
            # After a slow sync the last tick may be old. With its time, a late PONG would look like a quick one.
            if event.now_ms:
                state = replace(state, now_ms=event.now_ms, wall_ms=event.wall_ms)
            return _receive(state, event.node, event.message)
        case Tick():
            return _tick(replace(state, now_ms=event.now_ms, wall_ms=event.wall_ms))
        case Dropped():
            return replace(state, first=event.first), []
        case LeaseExtended():
            return replace(state, lease_until_ms=event.until_ms), []
        case Connected():
            return election.greet(state, event.node)
        case Disconnected():
            return _disconnect(state, event)
    return _lead(state, event) if state.role in LEADS else _follow(state, event)


def _follow(state: Replica, event: Event) -> Step:
    match event:
        case Flush():
            return following.flush(state) if state.role is not Role.SEALING else (state, [])
        case Seen():
            return election.see(state, event)
        case Proposed():
            return election.hear(state, event)
        case LeaderDied():
            return election.replace_leader(state, event.node)
    return state, []  # an event for a leader; this replica leads no more


def _lead(state: Replica, event: Event) -> Step:
    match event:
        case Appended():
            state, effects = leading.append(state, event)
        case Shipped():
            state, effects = leading.shipped(state, event)
        case Seen():
            return replicas.see(state, event)
        case Proposed():
            return replicas.conclude(state, event)
        case ReplicasWanted():
            return replicas.want(state, event)
        case HandOver():
            return replicas.hand_over(state, event.node)
        case _:
            return state, []
    return _advanced(state, effects)


def _advanced(state: Replica, effects: list[Effect]) -> Step:
    state, more = replicas.advance(state)
    return state, effects + more


def _receive(state: Replica, node: str, message: Message) -> Step:
    if isinstance(message, Hello) and message.epoch > state.promised:
        if state.role in LEADS:
            return leading.stop(state, f"epoch {message.epoch} has begun")
        if state.role is Role.SEALING:
            state, effects = election.give_up(state)
            state, more = following.receive(state, node, message)
            return state, effects + more
        return following.receive(state, node, message)
    if isinstance(message, Refuse):
        # A REFUSE of this epoch or a lower one comes from an older connection. Only a later epoch ends this one.
        return _refused(state, message) if message.epoch > state.promised else (state, [])
    if state.epoch and message.epoch == state.epoch and not isinstance(message, Hello):
        return _answered(state, node, message)
    return following.receive(state, node, message)


def _answered(state: Replica, node: str, message: Message) -> Step:
    """Handle an answer in the epoch that this replica leads or is a candidate for."""
    if state.role is Role.SEALING:
        match message:
            case Promise():
                return election.collect(state, node, message)
            case Begin() | Bytes():
                return election.fetched(state, node, message)
        return state, []
    match message:
        case Promise():
            state, effects = leading.meet(state, node, message)
        case Ack():
            state, effects = leading.acknowledge(state, node, message)
        case Pong():
            state, effects = leading.hear_clock(state, node, message)
        case Have() | Want() | File():
            state, effects = leading.hear(state, node)
            effects = [*effects, PassOn(node, message)]
        case Complete():
            state, effects = leading.complete(state, node, message)
        case _:
            return state, []
    return _advanced(state, effects)


def _refused(state: Replica, message: Refuse) -> Step:
    if state.role in LEADS:
        return leading.stop(state, f"epoch {message.epoch} is promised")
    return election.give_up(state) if state.role is Role.SEALING else (state, [])


def _disconnect(state: Replica, event: Disconnected) -> Step:
    if event.opened_here:
        if state.role in LEADS:
            return leading.lose(state, event.node)
        return election.lose(state, event.node) if state.role is Role.SEALING else (state, [])
    if state.source and state.source.node == event.node:
        return replace(state, source=None), []
    return state, []


def _tick(state: Replica) -> Step:
    if state.role in LEADS:
        return leading.tick(state)
    if state.seal and state.now_ms - state.seal.since_ms > state.rules.quorum_ms:
        return election.give_up(state)
    return state, []
