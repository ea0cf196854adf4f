"""Leading: ship the log, count acknowledgements, commit.

For each replica the leader first takes the place up to which both logs agree (positions.py), has the rest cut,
and ships from there: older frames read from its segments, and the present commit as it is written once the replica has
all before it. Committed is what is on the disk of a majority *and* is followed by, or is, a frame of the leader's own
epoch (I4): a frame of a lower epoch may be on a majority and still be cut by a later leader (Raft's figure 8).

A leader stops when it is refused, sees another in the record, loses its majority, or loses its lease while not all
replicas answer it. None of these protects an acknowledgement: the others' promises do.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from timeball.cluster.effects import (
    BeginSegment,
    Commit,
    Effect,
    HangUp,
    Resign,
    Send,
    Serve,
    Ship,
    StopServing,
    Sync,
    Write,
)
from timeball.cluster.events import Appended, Shipped
from timeball.cluster.following import Step
from timeball.cluster.messages import Ack, Complete, Cut, Data, Ping, Pong, Promise
from timeball.cluster.positions import BEGINNING, Position, continuing, extend
from timeball.cluster.record import majority, node_of
from timeball.cluster.replica import Lead, Log, Peer, Replica, Role

QUICK_MS = 200  # an answer's round trip, whose half is what it may be wrong by


def meet(state: Replica, node: str, promise: Promise) -> Step:
    """Begin with a replica that has promised the epoch: say where both logs agree."""
    lead = _lead(state)
    at = continuing(state.log.ends, promise.ends, state.first.seq)
    peer = Peer(promise.replica, at, heard_ms=state.now_ms, met_seq=state.log.end.seq)
    lead = _with_peer(lead, node, peer)
    return replace(state, lead=lead), [Send(node, Cut(lead.epoch, *at))]


def append(state: Replica, event: Appended) -> Step:
    """Ship a commit to the replicas that have all before it, write it, sync it."""
    lead, log = _lead(state), state.log
    if state.role is Role.LEADER and not may_go_on(state, event.now_ms):
        return stop(state, "the lease is over")
    end = Position(event.ordinal, event.position + len(event.frames), event.end_seq)
    data = Data(lead.epoch, event.ordinal, event.position, event.end_seq, lead.committed.seq, event.frames)
    effects: list[Effect] = []
    peers = dict(lead.peers)
    for node, peer in lead.peers.items():
        # In the row: the disks of all write at the same time. The others are sent this later, from the segments.
        if peer.sent == log.end and not peer.is_shipping:
            effects += [Send(node, event.begin)] if event.begin else []
            effects.append(Send(node, data))
            peers[node] = replace(peer, sent=end)
    effects += [BeginSegment(event.begin)] if event.begin else []
    effects += [Write(event.ordinal, event.position, event.frames), Sync()]
    lead = replace(lead, peers=peers, opened=lead.opened or end)
    log = Log(extend(log.ends, lead.epoch, end), end.ordinal, end.end, end.seq)
    state, more = count(replace(state, lead=lead, log=log))
    return state, effects + more


def acknowledge(state: Replica, node: str, ack: Ack) -> Step:
    """Count an acknowledgement, and send that replica what it lacks."""
    lead = _lead(state)
    peer = lead.peers.get(node)
    if peer is None:
        return state, []
    acked = Position(ack.ordinal, ack.position, ack.end_seq)
    peer = replace(peer, acked=acked, heard_ms=state.now_ms)
    # Counted first: what is sent next tells how far all is committed, and must stand behind the Commit itself.
    state, effects = count(replace(state, lead=_with_peer(lead, node, peer)))
    state, more = _supply(state, node)
    return state, effects + more


def hear(state: Replica, node: str) -> Step:
    """Know that a replica answers."""
    lead = _lead(state)
    if node not in lead.peers:
        return state, []
    peer = replace(lead.peers[node], heard_ms=state.now_ms)
    return replace(state, lead=_with_peer(lead, node, peer)), []


def complete(state: Replica, node: str, message: Complete) -> Step:
    """Know up to which row a replica has all data files."""
    lead = _lead(state)
    peer = lead.peers.get(node)
    if peer is None:
        return state, []
    peer = replace(peer, complete_seq=message.end_seq, heard_ms=state.now_ms)
    return replace(state, lead=_with_peer(lead, node, peer)), []


def have_enough(state: Replica, others: Collection[str]) -> bool:
    """Return whether these replicas and this one are most of each set that counts (with `--acks all`: all of it)."""
    lead, having = _lead(state), {*others, state.rules.replica}
    return all(
        len(having.intersection(replicas)) >= (len(replicas) if state.rules.acks_all else majority(replicas))
        for replicas in (lead.replicas, lead.joining)
        if replicas
    )


def shipped(state: Replica, event: Shipped) -> Step:
    """Go on behind what was read from the segments."""
    lead = _lead(state)
    peer = lead.peers.get(event.node)
    if peer is None or not peer.is_shipping:
        return state, []
    peer = replace(peer, sent=event.end, is_shipping=False)
    return replace(state, lead=_with_peer(lead, event.node, peer)), []


def _supply(state: Replica, node: str) -> Step:
    """Have older frames read for a replica that has acknowledged all it was sent, one message at a time."""
    lead = _lead(state)
    peer = lead.peers[node]
    if peer.is_shipping or peer.acked != peer.sent or peer.sent == state.log.end:
        return state, []
    if peer.sent > BEGINNING and peer.sent.seq < state.first.seq:
        # Dropped while it was catching up: it begins anew, as one that comes too late (`meet`).
        lead = _with_peer(lead, node, replace(peer, sent=BEGINNING, acked=None))
        return replace(state, lead=lead), [Send(node, Cut(lead.epoch, *BEGINNING))]
    lead = _with_peer(lead, node, replace(peer, is_shipping=True))
    return replace(state, lead=lead), [Ship(node, lead.epoch, peer.sent)]


def lose(state: Replica, node: str) -> Step:
    """Forget a replica whose connection ended; it begins again with a promise."""
    lead = _lead(state)
    peers = {name: peer for name, peer in lead.peers.items() if name != node}
    handing_to = "" if lead.handing_to == node and not lead.is_proposed else lead.handing_to
    lead = replace(lead, peers=peers, handing_to=handing_to)
    # A set that was not proposed is dropped with the replica it waits for; one on its way may be in the record already.
    if lead.joining and not lead.is_proposed and node in {node_of(replica) for replica in lead.joining}:
        lead = replace(lead, joining=(), wanted=lead.joining)
    return replace(state, lead=lead), []


def reached(state: Replica, replicas: tuple[str, ...]) -> Position:
    """Return up to where most of these replicas (all of them with `--acks all`) have the log on their disks."""
    lead = _lead(state)
    ends = {peer.replica: peer.acked for peer in lead.peers.values() if peer.acked}
    ends[state.rules.replica] = state.log.end
    order = sorted((ends.get(replica, BEGINNING) for replica in replicas), reverse=True)
    return order[-1 if state.rules.acks_all else majority(replicas) - 1]


def is_of_own_epoch(lead: Lead, position: Position) -> bool:
    """Return whether a frame of the leader's epoch stands at or before this position."""
    return lead.opened is not None and position >= lead.opened


def count(state: Replica) -> Step:
    """Commit what a majority has: of the old and of the new set while the set changes."""
    lead = _lead(state)
    to = min(reached(state, replicas) for replicas in (lead.replicas, lead.joining) if replicas)
    if to <= lead.committed or not is_of_own_epoch(lead, to):
        return state, []
    state = replace(state, lead=replace(lead, committed=to), committed_seq=to.seq, applied_seq=to.seq)
    effects: list[Effect] = [Commit(to)]
    if state.role is Role.SYNCING:
        state = replace(state, role=Role.LEADER)
        effects.append(Serve(lead.epoch))
    return state, effects


def tick(state: Replica) -> Step:
    """Stop when this leader cannot or must not lead; tell the others the end of the committed log."""
    lead = _lead(state)
    if not may_go_on(state, state.now_ms):
        return stop(state, "the lease is over")
    if state.now_ms - max(_heard_ms(state), lead.since_ms) > state.rules.quorum_ms:
        return stop(state, "no majority answers")
    ping = Ping(lead.epoch, state.wall_ms, state.now_ms, lead.committed.seq)
    off_ms = clocks_off_ms(state)
    return state, [
        Send(node, replace(ping, off_ms=off_ms.get(node, 0)))
        for node, peer in lead.peers.items()
        if peer.acked is not None
    ]


def hear_clock(state: Replica, node: str, pong: Pong) -> Step:
    """Know that a replica answers, and by how much its clock is ahead of this one."""
    state, effects = hear(state, node)
    lead = _lead(state)
    round_trip_ms = state.now_ms - pong.boot_ms
    # An answer that took long tells little: the other's clock was read at any moment in between.
    if node in lead.peers and 0 <= round_trip_ms <= QUICK_MS:
        peer = replace(lead.peers[node], ahead_ms=pong.wall_ms - (state.wall_ms - round_trip_ms // 2))
        state = replace(state, lead=_with_peer(lead, node, peer))
    return state, effects


def clocks_off_ms(state: Replica) -> dict[str, int]:
    """Return how far each other replica's clock is off the median of the set; none while too few are known."""
    lead = _lead(state)
    ahead_ms = {
        node: peer.ahead_ms
        for node, peer in lead.peers.items()
        if peer.ahead_ms is not None and peer.replica in lead.replicas
    }
    known = sorted([0, *ahead_ms.values()])
    if len(known) < majority(lead.replicas) or len(known) < 3:
        return {}  # of two clocks that differ none is known to be right
    # Of an even number the one that is nearer to the leader's own: it has kept promises by that.
    middle = min(known[(len(known) - 1) // 2 : len(known) // 2 + 1], key=abs)
    return {node: abs(ahead - middle) for node, ahead in ahead_ms.items()}


def may_go_on(state: Replica, now_ms: int) -> bool:
    """Return whether the lease holds, or all other replicas answer, so that no majority is without this leader."""
    if now_ms <= state.lease_until_ms:
        return True
    others = [replica for replica in _lead(state).replicas if replica != state.rules.replica]
    heard = {peer.replica: peer.heard_ms for peer in _lead(state).peers.values()}
    return state.rules.leads_without_coordinator and all(
        now_ms - heard.get(replica, 0) <= state.rules.quorum_ms // 2 and replica in heard
        for replica in others
    )


def _heard_ms(state: Replica) -> int:
    """Return until when a majority, this one included, was heard."""
    lead = _lead(state)
    heard = {peer.replica: peer.heard_ms for peer in lead.peers.values()}
    heard[state.rules.replica] = state.now_ms
    return sorted((heard.get(replica, 0) for replica in lead.replicas), reverse=True)[
        majority(lead.replicas) - 1
    ]


def stop(state: Replica, reason: str) -> Step:
    """End this leader's process: the next start reads the disk and follows."""
    stopped = replace(state, role=Role.STOPPED, lead=None, seal=None, source=None)
    return stopped, [StopServing(reason), HangUp(), Resign()]


def _lead(state: Replica) -> Lead:
    assert state.lead is not None
    return state.lead


def _with_peer(lead: Lead, node: str, peer: Peer) -> Lead:
    return replace(lead, peers={**lead.peers, node: peer})
