"""What a leader does about a wish of its operators: another set of replicas, or to give way.

A wish is read with the record, again and again until it is gone: the leader tells the protocol of it, and removes it
when the record says that it has come true. A command that ends takes its wish with it.
"""

from __future__ import annotations

from enum import StrEnum

from timeball.cluster.coordinator import GroupView
from timeball.cluster.record import node_of
from timeball.cluster.replica import Replica, Role


class Step(StrEnum):
    """The next step about a wish."""

    NOTHING = "nothing"
    SETTLE = "settle"  # it has come true
    WANT = "want"  # tell the protocol of the set
    FORGET = "forget"  # the set is not asked for any more
    HAND_OVER = "hand over"


def next_step(view: GroupView, state: Replica) -> Step:
    """Return what the replica in this state does about the group's wish."""
    lead, record = state.lead, view.record
    if lead is None or state.role is not Role.LEADER or record is None:
        return Step.NOTHING
    if view.asked is None:
        return Step.FORGET if lead.wanted else Step.NOTHING
    wish = view.asked.wish
    if wish.replicas:
        return Step.SETTLE if set(record.replicas) == set(wish.replicas) else Step.WANT
    if wish.hand_over_to == state.rules.node:
        return Step.SETTLE
    peer = lead.peers.get(wish.hand_over_to)
    # In the row: it lacks at most the commit that is on its way, so nothing stands still for long.
    is_ready = peer is not None and peer.acked is not None and peer.sent == state.log.end
    is_in = wish.hand_over_to in map(node_of, record.replicas)
    return Step.HAND_OVER if is_ready and is_in else Step.NOTHING
