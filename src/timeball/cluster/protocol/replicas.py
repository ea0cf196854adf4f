"""Change of the set of replicas, and hand-over of the lead: the two swaps that a leader proposes.

A new set counts *in addition to* the old one, from before its swap is proposed. A candidate needs a majority of the
set in the record that it swaps: the old set until the leader's swap, the new set afterwards. So a commit must have a
majority in both. The swap is proposed when everything committed has a majority in the new set too. If the answer to
the swap is lost, both sets count until the record is read again.

A replica joins as a learner: it receives the log like a follower, but neither counts nor becomes a candidate until it
has the log and the data files. A node whose disk is new comes back as another incarnation. The leader then proposes
by itself to replace the old incarnation in the record, once the new one has everything.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.protocol.effects import Effect, Hold, Holder, Propose
from timeball.cluster.protocol.events import Proposed, ReplicasWanted, Seen
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.leading import find_quorum_position, stop_leading
from timeball.cluster.protocol.replica import Lead, Replica, Role, node_of


def request_set(state: Replica, event: ReplicasWanted) -> Step:
    """Begin a requested change of the set, unless a change is under way. The new set must contain this leader.

    A request for the present set withdraws an earlier request that has not begun.
    """
    lead = state.lead
    if lead is None or lead.joining or state.rules.replica not in event.replicas:
        return state, []
    if set(event.replicas) == set(lead.replicas):
        return replace(state, lead=replace(lead, wanted=())), []
    return advance(replace(state, lead=replace(lead, wanted=event.replicas)))


def hand_over(state: Replica, node: str) -> Step:
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
    if not lead.joining:
        # If a node of the wanted set has come back with another incarnation, the wanted one never catches up.
        is_outdated = any(lead.peers[n].replica != r for r in lead.wanted if (n := node_of(r)) in lead.peers)
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
    record = replace(state.record, replicas=lead.joining, generation=state.record.generation + 1)
    return _propose(state, lead, Propose(state.revision, record, Holder.KEEP))


def new_set_end(state: Replica) -> tuple[int, int, int]:
    """Find the position up to which a majority of the new set has the log."""
    assert state.lead
    return find_quorum_position(state, state.lead.joining)


def handle_proposed(state: Replica, event: Proposed) -> Step:
    """Handle the outcome of a leader's swap of the record."""
    lead = state.lead
    assert lead
    state = replace(state, lead=replace(lead, is_proposed=False))
    if lead.hand_over_node:
        return stop_leading(state, f"handed over to {lead.hand_over_node}")
    if event.succeeded:
        return _adopt(state, event.revision, event)
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
        return stop_leading(state, "another leads")
    return _adopt(state, event.revision, event)


def _adopt(state: Replica, revision: int, event: Seen | Proposed) -> Step:
    """Store the record: from now on only its set counts."""
    assert state.lead
    lead = replace(state.lead, replicas=event.record.replicas, joining=(), is_proposed=False)
    return advance(replace(state, revision=revision, record=event.record, lead=lead))


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
