"""Changing the set of replicas, and handing the lead over: two swaps that a leader proposes.

A new set counts *besides* the old one from before the swap is proposed: a candidate reads the set in the record that it
swaps, so until the swap it seals the old set, and from then on the new one. The swap is proposed when all that was
committed has a majority in the new set too. When its answer is lost both go on counting until the record tells.

A replica joins as a learner: it is shipped the log like a follower, and neither counts nor stands before it has the log
and the data files. A node whose disk is
new comes back as another incarnation, which replaces the one in the record by itself, once it has all.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.effects import Effect, Hold, Holder, Propose
from timeball.cluster.events import Proposed, ReplicasWanted, Seen
from timeball.cluster.following import Step
from timeball.cluster.leading import reached, stop
from timeball.cluster.record import node_of
from timeball.cluster.replica import Lead, Replica, Role


def want(state: Replica, event: ReplicasWanted) -> Step:
    """Begin to change the set, unless a change is under way; this leader has to stay in it.

    The present set takes back what was asked for and has not begun.
    """
    lead = state.lead
    if lead is None or lead.joining or state.rules.replica not in event.replicas:
        return state, []
    if set(event.replicas) == set(lead.replicas):
        return replace(state, lead=replace(lead, wanted=())), []
    return advance(replace(state, lead=replace(lead, wanted=event.replicas)))


def hand_over(state: Replica, node: str) -> Step:
    """Begin to give way to a node."""
    lead = state.lead
    peer = lead.peers.get(node) if lead else None
    if lead is None or lead.joining or peer is None or peer.replica not in lead.replicas:
        return state, []
    return advance(replace(state, lead=replace(lead, handing_to=node)))


def advance(state: Replica) -> Step:
    """Take the next step of a change or a hand-over, if it is time."""
    lead = state.lead
    if lead is None or state.role is not Role.LEADER or lead.is_proposed or state.record is None:
        return state, []
    if lead.handing_to:
        return _hand(state, lead)
    if not lead.joining:
        # A set with an incarnation that is gone would be waited for in vain.
        is_gone = any(lead.peers[n].replica != r for r in lead.wanted if (n := node_of(r)) in lead.peers)
        wanted = _replaced(lead) if is_gone else lead.wanted or _replaced(lead)
        # Until it has all, its acknowledgements would only hold the commits up.
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
    """Return up to where the new set has the log."""
    assert state.lead
    return reached(state, state.lead.joining)


def conclude(state: Replica, event: Proposed) -> Step:
    """Take the answer to a leader's proposal."""
    lead = state.lead
    assert lead
    state = replace(state, lead=replace(lead, is_proposed=False))
    if lead.handing_to:
        return stop(state, f"handed over to {lead.handing_to}")
    if event.succeeded:
        return _adopt(state, event.revision, event)
    return state, []  # proposed again, or the record tells that it is another's


def see(state: Replica, event: Seen) -> Step:
    """Take a record that was read while leading."""
    assert state.lead
    if event.revision <= state.revision:
        # Its lease had ended, and it went on, as all replicas answer: others must find the group's leader all the same.
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
    """Return whether a replica has all that is committed, and the data files that it names."""
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
    """Return the set with a node's new incarnation in the place of the one that is gone; empty when there is none."""
    news = {peer.replica for peer in lead.peers.values()} - set(lead.replicas)
    for replica in sorted(news):
        if node_of(replica) in map(node_of, lead.replicas):
            return tuple(replica if node_of(r) == node_of(replica) else r for r in lead.replicas)
    return ()
