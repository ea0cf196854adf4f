"""The state machine of a replica, and the two swaps that a leader proposes: another set of replicas, and a hand-over.

`step` passes each event to the function that handles it in the replica's role.

A new set counts *in addition to* the old one, from before its swap is proposed. A candidate needs a majority of the set
in the record that it swaps: the old set until the leader's swap, the new set afterwards. So a commit must have a
majority in both. The swap is proposed when everything committed has a majority in the new set too. If the answer to the
swap is lost, both sets count until the record is read again.

After the swap, the leader and the other replicas store the new set beside their promise. The former set counts until a
majority of it has done so. A second swap then removes it from the record, and the change has ended.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.protocol import election, following, leading
from timeball.cluster.protocol.effects import Effect, Hold, Holder, PassOn, Propose, Send
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
from timeball.cluster.protocol.leading import find_position, needed_count, stop_leading
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
    Position,
    Promise,
    Refuse,
    Want,
)
from timeball.cluster.protocol.replica import Lead, Replica, Role, node_of

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
            return handle_seen(state, event)
        case Proposed():
            return handle_proposed(state, event)
        case ReplicasWanted():
            return handle_replicas_wanted(state, event)
        case HandOver():
            return begin_hand_over(state, event.node)
        case _:
            return state, []
    return _then_advance(state, effects)


def _then_advance(state: Replica, effects: list[Effect]) -> Step:
    """Let a pending change of the set, or a hand-over, take its next step after an event of the log."""
    state, further_effects = advance(state)
    return state, effects + further_effects


def _receive(state: Replica, node: str, message: Message) -> Step:
    """Pass a message to the function for the role of its sender: leader, candidate, or replica that answers."""
    if isinstance(message, Hello) and following.is_of_older_set(state, message):
        return state, [Send(node, Refuse(message.epoch, state.members.generation))]
    if isinstance(message, Hello) and message.epoch > state.promised:
        effects: list[Effect] = []
        if state.role in LEADS:
            state, effects = leading.stop_leading(state, f"epoch {message.epoch} has begun")
        elif state.role is Role.SEALING:
            state, effects = election.give_up(state)
        if state.role is Role.STOPPED:
            return state, effects
        state, further_effects = following.receive(state, node, message)
        return state, effects + further_effects
    if isinstance(message, Refuse):
        # A REFUSE of a lower epoch comes from an older connection. One of the same epoch comes from a replica that has
        # promised it to another: etcd was restored from an old copy.
        return _handle_refusal(state, node, message) if message.epoch >= state.promised else (state, [])
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
            state, effects = leading.record_answer(state, node)
            effects = [*effects, PassOn(node, message)]
        case Complete():
            state, effects = leading.handle_complete(state, node, message)
        case _:
            return state, []
    return _then_advance(state, effects)


def _handle_refusal(state: Replica, node: str, message: Refuse) -> Step:
    """Stop leading, or give up the candidacy: another replica has promised a later epoch, or knows a newer set.

    A leader is elected already, so a newer set cannot be in use (`following.is_of_older_set`).
    """
    if state.role in LEADS and not message.generation:
        return leading.stop_leading(state, f"epoch {message.epoch} is promised")
    return election.handle_refusal(state, message, node) if state.role is Role.SEALING else (state, [])


def _handle_disconnect(state: Replica, event: Disconnected) -> Step:
    """Handle the end of a connection. A follower has no source any more if it was the connection of its source."""
    if event.opened_here:
        if state.role in LEADS:
            return leading.handle_disconnect(state, event.node)
        return election.handle_disconnect(state, event.node) if state.role is Role.SEALING else (state, [])
    if state.source and state.source.node == event.node:
        return replace(state, source=None), []
    return state, []


def _tick(state: Replica) -> Step:
    """Check the time limits of a leader or of a sealing candidate."""
    if state.role in LEADS:
        return leading.handle_tick(state)
    if state.seal and state.now_ms - state.seal.since_ms > state.rules.quorum_ms:
        return election.give_up(state)
    return state, []


# ---- change of the set of replicas, and hand-over of the lead ------------------------------------------------
# A replica joins as a learner: it receives the log like a follower, but neither counts nor becomes a candidate until it
# has the log and the data files. A node whose disk is new comes back as another incarnation. The leader then proposes
# by itself to replace the old incarnation in the record, once the new one has everything.


def handle_replicas_wanted(state: Replica, event: ReplicasWanted) -> Step:
    """Begin a requested change of the set, unless a change is under way. The new set must contain this leader.

    A request for the present set withdraws an earlier request that has not begun.
    """
    lead = state.lead
    if lead is None or lead.joining or state.rules.replica not in event.replicas:
        return state, []
    if set(event.replicas) == set(lead.replicas):
        return replace(state, lead=replace(lead, wanted=())), []
    return advance(replace(state, lead=replace(lead, wanted=event.replicas)))


def begin_hand_over(state: Replica, node: str) -> Step:
    """Begin to hand the lead over to a node."""
    lead = state.lead
    peer = lead.peers.get(node) if lead else None
    if lead is None or lead.joining or peer is None or peer.replica not in lead.replicas:
        return state, []
    return advance(replace(state, lead=replace(lead, hand_over_node=node)))


def advance(state: Replica) -> Step:
    """Take the next step of a hand-over or of a change of the set, if its condition holds."""
    lead = state.lead
    if lead is None or state.role is not Role.LEADER or lead.is_proposed or state.record is None:
        return state, []
    if lead.hand_over_node:
        return _propose_hand_over(state, lead)
    if lead.former:
        return _propose_end_of_change(state, lead)
    if not lead.joining:
        # Also false until a majority of the set runs a version that stores sets.
        if not leading.has_stored_set(state, lead.replicas):
            return state, []
        # If a node of the wanted set has come back with another incarnation, the wanted one never catches up.
        is_outdated = any(
            lead.peers[node].replica != replica
            for replica in lead.wanted
            if (node := node_of(replica)) in lead.peers
        )
        wanted = _replace_incarnations(lead) if is_outdated else lead.wanted or _replace_incarnations(lead)
        # Count a new replica only when it has caught up, else every commit would wait for it.
        if not wanted or not all(
            _has_caught_up(state, replica) for replica in wanted if replica not in lead.replicas
        ):
            return state, []
        lead = replace(lead, wanted=(), joining=wanted)
        state = replace(state, lead=lead)
    if new_set_end(state) < lead.committed:
        return state, []
    assert state.record
    record = replace(
        state.record, replicas=lead.joining, generation=state.record.generation + 1, former=lead.replicas
    )
    return _propose(state, lead, Propose(state.revision, record, Holder.KEEP))


def new_set_end(state: Replica) -> Position:
    """Find the position up to which a majority of the new set has the log."""
    assert state.lead
    joining = state.lead.joining
    return find_position(state, joining, needed_count(state, joining))


def handle_proposed(state: Replica, event: Proposed) -> Step:
    """Handle the outcome of a leader's swap of the record. After a hand-over it stops, also if the swap failed."""
    lead = state.lead
    assert lead
    state = replace(state, lead=replace(lead, is_proposed=False))
    if lead.hand_over_node:
        return stop_leading(state, f"handed over to {lead.hand_over_node}")
    if event.succeeded:
        return _store_record(state, event)
    return state, []  # `advance` proposes again later, unless the record names another leader by then


def handle_seen(state: Replica, event: Seen) -> Step:
    """Handle a record that was read while this replica leads."""
    assert state.lead
    if event.revision <= state.revision:
        # The holder's key was deleted with this leader's lease, but the leader continues, because all replicas answer.
        # Create the key again, because other nodes find the leader by it.
        lost_holder = (
            event.holder is None and event.revision == state.revision and not state.lead.hand_over_node
        )
        return state, [Hold()] if lost_holder else []
    if event.record.leader != state.rules.replica or event.record.epoch != state.lead.epoch:
        state, effects = stop_leading(state, "another leads")
        if state.role is Role.STOPPED:
            return state, effects
        state, further_effects = election.handle_seen(state, event)
        return state, effects + further_effects
    return _store_record(state, event)


def _store_record(state: Replica, event: Seen | Proposed) -> Step:
    """Store the record of the event. From now on its sets count: the new one, and the former one if it names one."""
    assert state.lead
    record = event.record
    lead = replace(state.lead, replicas=record.replicas, former=record.former, joining=(), is_proposed=False)
    effects: list[Effect] = []
    state = replace(state, revision=event.revision, record=record, lead=lead)
    if record.members != state.members:
        state, effects = leading.announce_set(state, record.members)
    return _then_advance(state, effects)


def _propose_end_of_change(state: Replica, lead: Lead) -> Step:
    """Propose the record without the former set, once a majority of it has stored the new one."""
    if not leading.has_stored_set(state, lead.former):
        return state, []
    assert state.record
    return _propose(state, lead, Propose(state.revision, replace(state.record, former=()), Holder.KEEP))


def _propose_hand_over(state: Replica, lead: Lead) -> Step:
    """Propose the record of the next epoch, once the node has the whole log and all of it is committed."""
    peer = lead.peers.get(lead.hand_over_node)
    if peer is None or peer.replica not in lead.replicas or not peer.acked == state.log.end == lead.committed:
        return state, []
    assert state.record
    record = replace(state.record, epoch=lead.epoch + 1, leader=peer.replica)
    return _propose(state, lead, Propose(state.revision, record, Holder.RELEASE))


def _propose(state: Replica, lead: Lead, proposal: Propose) -> Step:
    effects: list[Effect] = [proposal]
    return replace(state, lead=replace(lead, is_proposed=True)), effects


def _has_caught_up(state: Replica, replica: str) -> bool:
    """Check that a replica has all committed rows and the data files that they name."""
    assert state.lead
    peer = state.lead.peers.get(node_of(replica))
    return (
        peer is not None
        and peer.replica == replica
        and peer.acked is not None
        and peer.acked >= state.lead.committed
        and peer.complete_seq >= peer.seq_at_connect
    )


def _replace_incarnations(lead: Lead) -> tuple[str, ...]:
    """Build the set in which a connected new incarnation replaces its node's old one. Empty if there is none."""
    new_incarnations = {peer.replica for peer in lead.peers.values()} - set(lead.replicas)
    for replica in sorted(new_incarnations):
        if node_of(replica) in map(node_of, lead.replicas):
            return tuple(
                replica if node_of(member) == node_of(replica) else member for member in lead.replicas
            )
    return ()
