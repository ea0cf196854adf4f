"""The leader's reaction to a wish of its operators: another set of replicas, or a hand-over to another node.

The wish is read together with the record, at every read until it is gone. The leader passes it to the protocol and
removes it when the record shows that it is fulfilled. The wish also disappears when the operator's command ends.
"""

from __future__ import annotations

from enum import StrEnum

from timeball.cluster.coordination.coordinator import GroupView
from timeball.cluster.protocol.record import node_of
from timeball.cluster.protocol.replica import Replica, Role


class Step(StrEnum):
    """The next action for a wish."""

    NOTHING = "nothing"
    SETTLE = "settle"  # remove the wish: it is fulfilled
    WANT = "want"  # pass the wanted set to the protocol
    FORGET = "forget"  # the wish is gone: the protocol is to drop the wanted set
    HAND_OVER = "hand over"  # begin the hand-over


def next_step(view: GroupView, state: Replica) -> Step:
    """Choose the action for the group's wish on a replica in this state."""
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
    # The node was sent everything and lacks at most the commit in flight, so the hand-over stops sends only briefly.
    is_ready = peer is not None and peer.acked is not None and peer.sent == state.log.end
    is_in = wish.hand_over_to in map(node_of, record.replicas)
    return Step.HAND_OVER if is_ready and is_in else Step.NOTHING
