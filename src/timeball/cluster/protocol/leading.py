"""The leader: ships the log, counts acknowledgements, commits.

For each replica the leader first finds the position up to which both logs agree (messages.py) and has the rest of
the replica's log cut. It ships from there: older frames are read from the segments, and a replica that has everything
before the present commit receives that commit as it is written. A position is committed when a majority has the log
up to it on disk *and* a frame of the leader's own epoch ends at or before it (I4). A frame of a lower epoch alone is
not enough: a majority may have it, and a later leader may still cut it (figure 8 of the Raft paper).

A leader stops when it is refused, when the record names another leader, when it loses its majority, or when it loses
its lease while not all replicas answer it. Acknowledged rows do not depend on these checks: the promises of the other
replicas protect them.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from timeball.cluster.protocol.effects import (
    BeginSegment,
    Commit,
    Effect,
    HangUp,
    KeepPromise,
    Resign,
    Send,
    Serve,
    Ship,
    StopServing,
    Sync,
    Write,
)
from timeball.cluster.protocol.events import Appended, Shipped
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.messages import (
    BEGINNING,
    Ack,
    Complete,
    Cut,
    Data,
    Hello,
    Members,
    Ping,
    Pong,
    Position,
    Promise,
    extend,
    find_resume_position,
)
from timeball.cluster.protocol.replica import Lead, Log, Peer, Replica, Role, majority, node_of

# Longest round trip of a PING whose PONG counts. The measured offset of the clock is wrong by at most half of it.
QUICK_MS = 200


def hello_to(state: Replica, node: str) -> Send:
    """Build the HELLO of this leader or candidate to a node."""
    hello = Hello(
        state.epoch, state.rules.group, state.rules.replica, members=state.members,
        is_elected=state.lead is not None,
    )  # fmt: skip
    return Send(node, hello)


def handle_promise(state: Replica, node: str, promise: Promise) -> Step:
    """Add a replica that has promised the epoch, and send it the position up to which both logs are equal (CUT).

    If the set of replicas has changed since the HELLO, send another HELLO instead.
    """
    lead = _lead(state)
    # A replica of an earlier version sends generation 0: it stores no sets.
    if 0 < promise.generation < state.members.generation:
        return state, [hello_to(state, node)]
    common_end = find_resume_position(state.log.ends, promise.ends, state.first.seq)
    peer = Peer(
        promise.replica, common_end, heard_ms=state.now_ms, seq_at_connect=state.log.end.seq,
        generation=promise.generation,
    )  # fmt: skip
    previous = lead.peers.get(node)
    # It has promised again on the same connection, because of `announce_set`.
    if previous is not None and previous.replica == peer.replica:
        peer = replace(
            peer, seq_at_connect=previous.seq_at_connect, complete_seq=previous.complete_seq,
            clock_ahead_ms=previous.clock_ahead_ms,
        )  # fmt: skip
    lead = _with_peer(lead, node, peer)
    return replace(state, lead=lead), [Send(node, Cut(lead.epoch, *common_end))]


def announce_set(state: Replica, members: Members) -> Step:
    """Store a new set of replicas with the promise, and let the others store it: they promise the epoch again.

    A replica that promises again gets nothing until both logs are compared, as on a new connection.
    """
    lead = _lead(state)
    peers = {node: replace(peer, is_shipping=True) for node, peer in lead.peers.items()}
    state = replace(state, members=members, lead=replace(lead, peers=peers))
    keep = KeepPromise(state.promised, state.promised_to, members)
    return state, [keep, *(hello_to(state, node) for node in peers)]


def has_stored_set(state: Replica, replicas: tuple[str, ...]) -> bool:
    """Check that a majority of these replicas has stored the set of the record."""
    generation = state.members.generation
    peers = {peer.replica for peer in _lead(state).peers.values() if peer.generation >= generation}
    return len({state.rules.replica, *peers}.intersection(replicas)) >= majority(replicas)


def handle_appended(state: Replica, event: Appended) -> Step:
    """Send a new commit to the replicas that have everything before it, then write and sync it."""
    lead, log = _lead(state), state.log
    if state.role is Role.LEADER and not may_keep_leading(state, event.now_ms):
        return stop_leading(state, "the lease is over")
    end = Position(event.ordinal, event.position + len(event.frames), event.end_seq)
    data = Data(lead.epoch, event.ordinal, event.position, event.end_seq, lead.committed.seq, event.frames)
    effects: list[Effect] = []
    peers = dict(lead.peers)
    for node, peer in lead.peers.items():
        # The Send effects come before the Write, so that all disks write at the same time. The other replicas get this
        # commit later, from the segments.
        if peer.sent == log.end and not peer.is_shipping:
            effects += [Send(node, event.begin)] if event.begin else []
            effects.append(Send(node, data))
            peers[node] = replace(peer, sent=end)
    effects += [BeginSegment(event.begin)] if event.begin else []
    effects += [Write(event.ordinal, event.position, event.frames), Sync()]
    lead = replace(lead, peers=peers, opening_end=lead.opening_end or end)
    log = Log(extend(log.ends, lead.epoch, end), end.ordinal, end.end, end.seq)
    state, further_effects = advance_commit(replace(state, lead=lead, log=log))
    return state, effects + further_effects


def handle_ack(state: Replica, node: str, ack: Ack) -> Step:
    """Record an acknowledgement, commit the entries that it completes, and ship the frames that the replica lacks."""
    lead = _lead(state)
    peer = lead.peers.get(node)
    if peer is None:
        return state, []
    acked = Position(ack.ordinal, ack.position, ack.end_seq)
    peer = replace(peer, acked=acked, heard_ms=state.now_ms)
    # Count first: the next message to the replica states the committed end, so the Commit effect must come before it.
    state, effects = advance_commit(replace(state, lead=_with_peer(lead, node, peer)))
    state, further_effects = _ship_next(state, node)
    return state, effects + further_effects


def record_answer(state: Replica, node: str) -> Step:
    """Record that a replica has answered."""
    lead = _lead(state)
    if node not in lead.peers:
        return state, []
    peer = replace(lead.peers[node], heard_ms=state.now_ms)
    return replace(state, lead=_with_peer(lead, node, peer)), []


def handle_complete(state: Replica, node: str, message: Complete) -> Step:
    """Record up to which row a replica has all data files."""
    lead = _lead(state)
    peer = lead.peers.get(node)
    if peer is None:
        return state, []
    peer = replace(peer, complete_seq=message.end_seq, heard_ms=state.now_ms)
    return replace(state, lead=_with_peer(lead, node, peer)), []


def has_quorum(state: Replica, others: Collection[str]) -> bool:
    """Check that `others` and this replica contain enough replicas of each set that counts (`_counting_sets`)."""
    lead, holders = _lead(state), {*others, state.rules.replica}
    return all(
        len(holders.intersection(replicas)) >= count for replicas, count in _counting_sets(state, lead)
    )


def _counting_sets(state: Replica, lead: Lead) -> list[tuple[tuple[str, ...], int]]:
    """List the sets that count, each with the number of its replicas that are needed.

    A majority of the former set is enough also with `--acks all`, because it may contain a replica that is gone.
    """
    sets = [
        (replicas, needed_count(state, replicas)) for replicas in (lead.replicas, lead.joining) if replicas
    ]
    return [*sets, (lead.former, majority(lead.former))] if lead.former else sets


def needed_count(state: Replica, replicas: tuple[str, ...]) -> int:
    """Compute how many of these replicas a commit needs: a majority, or all with `--acks all`."""
    return len(replicas) if state.rules.acks_all else majority(replicas)


def handle_shipped(state: Replica, event: Shipped) -> Step:
    """Record that a Ship effect has sent frames from the segments."""
    lead = _lead(state)
    peer = lead.peers.get(event.node)
    if peer is None or not peer.is_shipping:
        return state, []
    peer = replace(peer, sent=event.end, is_shipping=False)
    return replace(state, lead=_with_peer(lead, event.node, peer)), []


def _ship_next(state: Replica, node: str) -> Step:
    """Ship older frames, one message at a time, to a replica that has acknowledged everything sent before."""
    lead = _lead(state)
    peer = lead.peers[node]
    if peer.is_shipping or peer.acked != peer.sent or peer.sent == state.log.end:
        return state, []
    if peer.sent > BEGINNING and peer.sent.seq < state.first.seq:
        # Retention has deleted the next frames while the replica was catching up. It begins again from the first
        # segment, as in `handle_promise`.
        lead = _with_peer(lead, node, replace(peer, sent=BEGINNING, acked=None))
        return replace(state, lead=lead), [Send(node, Cut(lead.epoch, *BEGINNING))]
    lead = _with_peer(lead, node, replace(peer, is_shipping=True))
    return replace(state, lead=lead), [Ship(node, lead.epoch, peer.sent)]


def handle_disconnect(state: Replica, node: str) -> Step:
    """Remove a replica whose connection has ended. It sends a promise again on its next connection."""
    lead = _lead(state)
    peers = {name: peer for name, peer in lead.peers.items() if name != node}
    hand_over_node = "" if lead.hand_over_node == node and not lead.is_proposed else lead.hand_over_node
    lead = replace(lead, peers=peers, hand_over_node=hand_over_node)
    # A new set that waits for this replica no longer counts: it becomes a requested set again. But if its swap is in
    # flight, the set may be in the record already, so it still counts.
    if lead.joining and not lead.is_proposed and node in {node_of(replica) for replica in lead.joining}:
        lead = replace(lead, joining=(), wanted=lead.joining)
    return replace(state, lead=lead), []


def find_position(state: Replica, replicas: tuple[str, ...], count: int) -> Position:
    """Find the position up to which `count` of these replicas have the log on disk."""
    lead = _lead(state)
    ends = {peer.replica: peer.acked for peer in lead.peers.values() if peer.acked}
    ends[state.rules.replica] = state.log.end
    descending = sorted((ends.get(replica, BEGINNING) for replica in replicas), reverse=True)
    return descending[count - 1]


def is_of_own_epoch(lead: Lead, position: Position) -> bool:
    """Check that the log up to this position contains a frame of the leader's own epoch (I4)."""
    return lead.opening_end is not None and position >= lead.opening_end


def advance_commit(state: Replica) -> Step:
    """Commit up to the position that enough replicas of each set that counts have on disk.

    The first commit of the epoch makes a SYNCING replica the LEADER.
    """
    lead = _lead(state)
    end = min(find_position(state, replicas, count) for replicas, count in _counting_sets(state, lead))
    if end <= lead.committed or not is_of_own_epoch(lead, end):
        return state, []
    state = replace(state, lead=replace(lead, committed=end), committed_seq=end.seq, applied_seq=end.seq)
    effects: list[Effect] = [Commit(end)]
    if state.role is Role.SYNCING:
        state = replace(state, role=Role.LEADER)
        effects.append(Serve(lead.epoch))
    return state, effects


def handle_tick(state: Replica) -> Step:
    """Stop if the lease is over or no majority has answered for `quorum_ms`. Else send PING with the committed end."""
    lead = _lead(state)
    if not may_keep_leading(state, state.now_ms):
        return stop_leading(state, "the lease is over")
    heard_ms = {peer.replica: peer.heard_ms for peer in lead.peers.values()}
    quorum_heard_ms = max(_time_of_majority_ms(state, lead.replicas, heard_ms), lead.since_ms)
    if state.now_ms - quorum_heard_ms > state.rules.quorum_ms:
        return stop_leading(state, "no majority answers")
    ping = Ping(lead.epoch, state.wall_ms, state.now_ms, lead.committed.seq)
    deviations_ms = clock_deviations_ms(state)
    return state, [
        Send(node, replace(ping, deviation_ms=deviations_ms.get(node, 0)))
        for node, peer in lead.peers.items()
        if peer.acked is not None
    ]


def handle_pong(state: Replica, node: str, pong: Pong) -> Step:
    """Record that a replica has answered this PING, and the offset of its clock, if the answer was quick."""
    lead = _lead(state)
    if node not in lead.peers:
        return state, []
    peer = replace(lead.peers[node], heard_ms=state.now_ms, answered_ms=pong.boot_ms)
    round_trip_ms = state.now_ms - pong.boot_ms
    # The other clock was read at an unknown moment of the round trip, so a slow answer is too imprecise.
    if 0 <= round_trip_ms <= QUICK_MS:
        peer = replace(peer, clock_ahead_ms=pong.wall_ms - (state.wall_ms - round_trip_ms // 2))
    return replace(state, lead=_with_peer(lead, node, peer)), []


def clock_deviations_ms(state: Replica) -> dict[str, int]:
    """Compute how far each other node's clock deviates from the median of the set, in ms, as absolute values.

    Empty if the offsets of too few clocks are known.
    """
    lead = _lead(state)
    ahead_ms = {
        node: peer.clock_ahead_ms
        for node, peer in lead.peers.items()
        if peer.clock_ahead_ms is not None and peer.replica in lead.replicas
    }
    offsets_ms = sorted([0, *ahead_ms.values()])
    if len(offsets_ms) < majority(lead.replicas) or len(offsets_ms) < 3:
        return {}  # of two clocks that differ, either may be wrong
    # With an even count, use the middle value nearer to the leader's own clock, by which it has released messages.
    median_ms = min(offsets_ms[(len(offsets_ms) - 1) // 2 : len(offsets_ms) // 2 + 1], key=abs)
    return {node: abs(ahead - median_ms) for node, ahead in ahead_ms.items()}


def may_keep_leading(state: Replica, now_ms: int) -> bool:
    """Check that the lease is valid, or that all other replicas have answered lately.

    While all others answer, none of them can be part of a majority that another leader has.
    """
    if now_ms <= state.lease_until_ms:
        return True
    others = [replica for replica in _lead(state).replicas if replica != state.rules.replica]
    heard_ms = {peer.replica: peer.heard_ms for peer in _lead(state).peers.values()}
    return state.rules.may_lead_without_lease and all(
        now_ms - heard_ms.get(replica, 0) <= state.rules.quorum_ms // 2 and replica in heard_ms
        for replica in others
    )


def confirmed_ms(state: Replica) -> int:
    """Find the latest boot time at which a majority of each set is known to have promised no later epoch.

    A replica that answers a PING has promised no later epoch since before the PING was sent. No later leader can have
    committed a row by then, because it needs the promises of a majority.
    """
    lead = _lead(state)
    answered_ms = {peer.replica: peer.answered_ms for peer in lead.peers.values()}
    sets = (lead.replicas, lead.joining, lead.former)
    return min(_time_of_majority_ms(state, replicas, answered_ms) for replicas in sets if replicas)


def _time_of_majority_ms(state: Replica, replicas: tuple[str, ...], times_ms: dict[str, int]) -> int:
    """Find the latest time that a majority of these replicas has reached, this one with the present time.

    `times_ms`: the time of each other replica. A replica without one counts with 0.
    """
    times_ms = {**times_ms, state.rules.replica: state.now_ms}
    descending = sorted((times_ms.get(replica, 0) for replica in replicas), reverse=True)
    return descending[majority(replicas) - 1]


def stop_leading(state: Replica, reason: str) -> Step:
    """Build the state and the effects with which a replica stops leading.

    A leader becomes STOPPED, and its process ends. The next start reads the log from the disk and begins as a follower.
    A SYNCING replica has served nothing, so it becomes a follower in the same process.
    """
    if state.role is Role.SYNCING:
        return replace(state, role=Role.FOLLOWER, lead=None), [HangUp(), Resign()]
    stopped = replace(state, role=Role.STOPPED, lead=None, seal=None, source=None)
    return stopped, [StopServing(reason), HangUp(), Resign()]


def _lead(state: Replica) -> Lead:
    assert state.lead is not None
    return state.lead


def _with_peer(lead: Lead, node: str, peer: Peer) -> Lead:
    return replace(lead, peers={**lead.peers, node: peer})
