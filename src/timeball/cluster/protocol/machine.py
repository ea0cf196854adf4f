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
            return election.send_hello(state, event.node)
        case Disconnected():
            return _handle_disconnect(state, event)
    return _step_leader(state, event) if state.role in LEADS else _step_follower(state, event)


def _step_follower(state: Replica, event: Event) -> Step:
    """Handle an event as a learner, follower, candidate or sealing candidate."""
    match event:
        case Flush():
            return following.flush(state) if state.role is not Role.SEALING else (state, [])
        case Seen():
            return election.handle_seen(state, event)
        case Proposed():
            return election.handle_proposed(state, event)
        case LeaderDied():
            return election.replace_dead_leader(state, event.node)
    return state, []  # an event for a leader, but this replica does not lead any more


def _step_leader(state: Replica, event: Event) -> Step:
    """Handle an event while this replica is SYNCING or LEADER."""
    match event:
        case Appended():
            state, effects = leading.handle_appended(state, event)
        case Shipped():
            state, effects = leading.handle_shipped(state, event)
        case Seen():
            return replicas.handle_seen(state, event)
        case Proposed():
            return replicas.handle_proposed(state, event)
        case ReplicasWanted():
            return replicas.request_set(state, event)
        case HandOver():
            return replicas.hand_over(state, event.node)
        case _:
            return state, []
    return _then_advance(state, effects)


def _then_advance(state: Replica, effects: list[Effect]) -> Step:
    """Let a pending change of the set, or a hand-over, take its next step after an event of the log."""
    state, further_effects = replicas.advance(state)
    return state, effects + further_effects


def _receive(state: Replica, node: str, message: Message) -> Step:
    if isinstance(message, Hello) and message.epoch > state.promised:
        if state.role in LEADS:
            return leading.stop_leading(state, f"epoch {message.epoch} has begun")
        if state.role is Role.SEALING:
            state, effects = election.give_up(state)
            state, further_effects = following.receive(state, node, message)
            return state, effects + further_effects
        return following.receive(state, node, message)
    if isinstance(message, Refuse):
        # A REFUSE of this epoch or a lower one comes from an older connection. Only a later epoch ends this one.
        return _handle_refusal(state, message) if message.epoch > state.promised else (state, [])
    if state.epoch and message.epoch == state.epoch and not isinstance(message, Hello):
        return _handle_answer(state, node, message)
    return following.receive(state, node, message)


def _handle_answer(state: Replica, node: str, message: Message) -> Step:
    """Handle an answer in the epoch that this replica leads or is a candidate for."""
    if state.role is Role.SEALING:
        match message:
            case Promise():
                return election.handle_promise(state, node, message)
            case Begin() | Bytes():
                return election.handle_fetched(state, node, message)
        return state, []
    match message:
        case Promise():
            state, effects = leading.handle_promise(state, node, message)
        case Ack():
            state, effects = leading.handle_ack(state, node, message)
        case Pong():
            state, effects = leading.handle_pong(state, node, message)
        case Have() | Want() | File():
            state, effects = leading.note_answer(state, node)
            effects = [*effects, PassOn(node, message)]
        case Complete():
            state, effects = leading.handle_complete(state, node, message)
        case _:
            return state, []
    return _then_advance(state, effects)


def _handle_refusal(state: Replica, message: Refuse) -> Step:
    """Stop leading, or give up the candidacy: another replica has promised a later epoch."""
    if state.role in LEADS:
        return leading.stop_leading(state, f"epoch {message.epoch} is promised")
    return election.give_up(state) if state.role is Role.SEALING else (state, [])


def _handle_disconnect(state: Replica, event: Disconnected) -> Step:
    if event.opened_here:
        if state.role in LEADS:
            return leading.handle_disconnect(state, event.node)
        return election.handle_disconnect(state, event.node) if state.role is Role.SEALING else (state, [])
    if state.source and state.source.node == event.node:
        return replace(state, source=None), []
    return state, []


def _tick(state: Replica) -> Step:
    if state.role in LEADS:
        return leading.handle_tick(state)
    if state.seal and state.now_ms - state.seal.since_ms > state.rules.quorum_ms:
        return election.give_up(state)
    return state, []
