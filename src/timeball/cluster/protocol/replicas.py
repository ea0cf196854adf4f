"""Change of the set of replicas, and hand-over of the lead: the two swaps that a leader proposes.

A new set counts *in addition to* the old one, from before its swap is proposed. A candidate needs a majority of the
set in the record that it swaps: the old set until the leader's swap, the new set afterwards. So a commit must have a
majority in both. The swap is proposed when everything committed has a majority in the new set too. If the answer to
the swap is lost, both sets go on counting until the record is read.

A replica joins as a learner: it receives the log like a follower, but neither counts nor becomes a candidate until it
has the log and the data files. A node whose disk is new comes back as another incarnation. The leader then proposes
by itself to replace the old incarnation in the record, once the new one has everything.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.protocol.effects import Effect, Hold, Holder, Propose
from timeball.cluster.protocol.events import Proposed, ReplicasWanted, Seen
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.leading import reached, stop
from timeball.cluster.protocol.replica import Lead, Replica, Role, node_of


def want(state: Replica, event: ReplicasWanted) -> Step:
    """Begin to change the set, unless a change is under way. This leader must be in the new set.

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
    return advance(replace(state, lead=replace(lead, handing_to=node)))


def advance(state: Replica) -> Step:
    """Take the next step of a change of the set or of a hand-over, if its condition holds."""
    lead = state.lead
    if lead is None or state.role is not Role.LEADER or lead.is_proposed or state.record is None:
        return state, []
    if lead.handing_to:
        return _hand(state, lead)
    if not lead.joining:
        # A wanted incarnation whose node is back with another one will never catch up: give that set up.
        is_gone = any(lead.peers[n].replica != r for r in lead.wanted if (n := node_of(r)) in lead.peers)
        wanted = _replaced(lead) if is_gone else lead.wanted or _replaced(lead)
        # Count a new replica only when it has caught up, else every commit would wait for it.
        if not wanted or not all(
            _has_all(state, replica) for replica in wanted if replica not in lead.replicas
        ):
            return state, []
        lead = replace(lead, wanted=(), joining=wanted)
        state = replace(state, lead=lead)
    if wanted_end(state) < lead.committed:
        return state, []
    assert state.record
    record = replace(state.record, replicas=lead.joining, generation=state.record.generation + 1)
    return _propose(state, lead, Propose(state.revision, record, Holder.KEEP))


def wanted_end(state: Replica) -> tuple[int, int, int]:
    """Find the position up to which the new set has the log."""
    assert state.lead
    return reached(state, state.lead.joining)


def conclude(state: Replica, event: Proposed) -> Step:
    """Handle the answer to a leader's proposal."""
    lead = state.lead
    assert lead
    state = replace(state, lead=replace(lead, is_proposed=False))
    if lead.handing_to:
        return stop(state, f"handed over to {lead.handing_to}")
    if event.succeeded:
        return _adopt(state, event.revision, event)
    return state, []  # the next step proposes again, unless the record names another leader by then


def see(state: Replica, event: Seen) -> Step:
    """Handle a record that was read while this replica leads."""
    assert state.lead
    if event.revision <= state.revision:
        # The holder's key went with this leader's lease, but the leader goes on, because all replicas answer. Create
        # the key again: other nodes find the leader by it.
        is_lost = event.holder is None and event.revision == state.revision and not state.lead.handing_to
        return state, [Hold()] if is_lost else []
    if event.record.leader != state.rules.replica or event.record.epoch != state.lead.epoch:
        return stop(state, "another leads")
    return _adopt(state, event.revision, event)


def _adopt(state: Replica, revision: int, event: Seen | Proposed) -> Step:
    """Count the record's set alone."""
    assert state.lead
    lead = replace(state.lead, replicas=event.record.replicas, joining=(), is_proposed=False)
    return advance(replace(state, revision=revision, record=event.record, lead=lead))


def _hand(state: Replica, lead: Lead) -> Step:
    peer = lead.peers.get(lead.handing_to)
    if peer is None or peer.replica not in lead.replicas or not peer.acked == state.log.end == lead.committed:
        return state, []
    assert state.record
    record = replace(state.record, epoch=lead.epoch + 1, leader=peer.replica)
    return _propose(state, lead, Propose(state.revision, record, Holder.RELEASE))


def _propose(state: Replica, lead: Lead, proposal: Propose) -> Step:
    effects: list[Effect] = [proposal]
    return replace(state, lead=replace(lead, is_proposed=True)), effects


def _has_all(state: Replica, replica: str) -> bool:
    """Check that a replica has all committed rows and the data files that they name."""
    assert state.lead
    peer = state.lead.peers.get(node_of(replica))
    return (
        peer is not None
        and peer.replica == replica
        and peer.acked is not None
        and peer.acked >= state.lead.committed
        and peer.complete_seq >= peer.met_seq
    )


def _replaced(lead: Lead) -> tuple[str, ...]:
    """Build the set in which a node's new incarnation replaces the old one. Empty when there is no new one."""
    news = {peer.replica for peer in lead.peers.values()} - set(lead.replicas)
    for replica in sorted(news):
        if node_of(replica) in map(node_of, lead.replicas):
            return tuple(replica if node_of(r) == node_of(replica) else r for r in lead.replicas)
    return ()
