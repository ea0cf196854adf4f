"""The follower: checks, writes, syncs, acknowledges and applies the log of the leader that it accepts.

A follower accepts messages only from the connection with the highest epoch, and only after its promise of this epoch
is synced. Before it writes a frame, the leader's CUT names the end of the common log, and the follower removes its
log after this position. That part belongs to an abandoned epoch and was never committed.

A batch is everything that has arrived: it is written, synced once and acknowledged once. A batch has at most
`batch_bytes` and does not span two segments. So after a power failure, a hole in the last segment is normally a torn
batch, whose rows were not acknowledged. The hole is damage only if a whole frame after it has a `synced_to` more than
`batch_bytes` after the hole, because then the bytes in the hole had been synced.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from timeball.cluster.protocol.effects import (
    Apply,
    BeginSegment,
    CutLog,
    Effect,
    KeepPromise,
    PassOn,
    Send,
    Ship,
    StopServing,
    Sync,
    Write,
)
from timeball.cluster.protocol.messages import (
    BEGINNING,
    Ack,
    Begin,
    Bytes,
    Cut,
    Data,
    Fetch,
    File,
    Hello,
    Message,
    Ping,
    Pong,
    Position,
    Promise,
    Refuse,
    Want,
    cut,
    extend,
)
from timeball.cluster.protocol.replica import Log, Replica, Role, Source
from timeball.log import format as fmt
from timeball.model.errors import Corrupt, PeerError

Step = tuple[Replica, list[Effect]]


def receive(state: Replica, node: str, message: Message) -> Step:
    """Handle a message of a leader or a candidate. Raises PeerError."""
    if isinstance(message, Hello):
        return _handle_hello(state, node, message)
    source = state.source
    if message.epoch < state.promised:
        # On the connection of this epoch's own leader the message is only late, as the answer to a WANT of an earlier
        # leader may be. A REFUSE of this epoch would stop the leader.
        is_late = source is not None and source.node == node
        return state, [] if is_late else [Send(node, Refuse(state.promised))]
    if source is None or source.node != node or message.epoch > state.promised:
        return state, []  # the connection has been replaced, or has sent no HELLO
    match message:
        case Cut():
            return _handle_cut(state, source, message)
        case Begin() | Data() if source.matched:
            return write(state, message)
        case Fetch():
            begin = Position(message.ordinal, message.position, message.end_seq)
            return state, [Ship(node, message.epoch, begin, fetched=True)]
        case File() | Want():
            return state, [PassOn(node, message)]
        case Ping():
            pong = Pong(message.epoch, state.wall_ms, message.boot_ms)
            state = replace(state, deviation_ms=message.deviation_ms, heard_ms=state.now_ms)
            state, effects = _apply(replace(state, committed_seq=max(state.committed_seq, message.committed)))
            return state, [Send(node, pong), *effects]
        case _:
            raise PeerError(f"{type(message).__name__} from {node}, which has not said where the logs agree")


def _handle_hello(state: Replica, node: str, hello: Hello) -> Step:
    """Promise the epoch in a HELLO durably and accept its sender as the source, or refuse it.

    A lower epoch is refused, and also one that is promised to another replica. etcd gives each epoch to one replica
    only, but forgets that when it is restored from an old copy.
    """
    if hello.epoch < state.promised or is_promised_to_another(state, hello):
        return state, [Send(node, Refuse(state.promised))]
    # An earlier version of Timeball names no set.
    members = hello.members if hello.members.generation else state.members
    effects: list[Effect] = []
    # Sync before sending the ends: a candidate relies on these frames, so they must survive a crash of this replica.
    if state.unsynced_bytes:
        effects.append(Sync())
    if hello.epoch > state.promised or not state.promised_to or members != state.members:
        effects.append(KeepPromise(hello.epoch, hello.replica, members))
    promise = Promise(
        hello.epoch, state.rules.replica, state.log.ends, first_seq=state.first.seq, generation=members.generation
    )  # fmt: skip
    effects.append(Send(node, promise))
    # With the new source, later messages from a leader of a lower epoch are refused.
    state = replace(state, promised=hello.epoch, promised_to=hello.replica, members=members)
    return replace(state, source=Source(node), unsynced_bytes=0), effects


def is_promised_to_another(state: Replica, hello: Hello) -> bool:
    """Check whether another replica than the sender may lead in the epoch of a HELLO."""
    return hello.epoch == state.promised and state.promised_to not in ("", hello.replica)


def is_of_older_set(state: Replica, hello: Hello) -> bool:
    """Check whether a candidate asks for a promise by an older set of replicas than this replica knows.

    etcd was then restored from a copy that is older than the last change of the set. A leader may have an older set: a
    majority of it had not stored the newer one, so that change had not ended.
    """
    return (
        not hello.is_elected
        and 0 < hello.members.generation < state.members.generation
        and hello.epoch >= state.promised
        and not is_promised_to_another(state, hello)
    )


def _handle_cut(state: Replica, source: Source, message: Cut) -> Step:
    """Remove the log after the common end that the source names. From now on its frames are accepted."""
    cut_at = Position(message.ordinal, message.position, message.end_seq)
    if cut_at > state.log.end:
        raise PeerError(f"CUT at {cut_at}, but the log ends at {state.log.end}")
    if cut_at == BEGINNING and state.applied_seq:
        return stop_for_restart(state)
    assert cut_at.seq >= state.applied_seq, (
        f"CUT at seq {cut_at.seq} below committed rows, up to {state.applied_seq}"
    )
    state, effects = cut_log(state, cut_at)
    ack = Ack(message.epoch, *cut_at)
    return replace(state, source=replace(source, matched=True)), [*effects, Send(source.node, ack)]


def stop_for_restart(state: Replica) -> Step:
    """End the process: the other log begins after rows that this log lacks, and the caches cannot skip rows.

    The next start has applied no row, so its log may be cut to the beginning. The replica keeps its incarnation: a
    committed snapshot in the other log covers all rows that it has acknowledged (`messages.find_resume_position`).
    """
    reason = "the others have dropped rows that this log lacks"
    return replace(state, role=Role.STOPPED, source=None, seal=None), [StopServing(reason)]


def cut_log(state: Replica, cut_at: Position) -> Step:
    """Remove the log after `cut_at`, including the header of an empty segment.

    The header goes too, because the next leader may begin that segment with another header.
    """
    if cut_at == state.log.end and state.log.is_at_a_frame:
        return state, []
    log = Log(cut(state.log.ends, cut_at), cut_at.ordinal, cut_at.end, cut_at.seq)
    return replace(state, log=log), [CutLog(cut_at)]


def write(state: Replica, message: Begin | Data | Bytes) -> Step:
    """Write frames or begin a segment at the end of the log.

    Raises PeerError for any other position, and for frames that are damaged or out of order.
    """
    log = state.log
    if isinstance(message, Begin):
        if log.ordinal and (message.ordinal != log.ordinal + 1 or message.first_seq != log.seq):
            raise PeerError(f"BEGIN of segment {message.ordinal} behind {log.ordinal}")
        # Sync first: recovery relies on the rule that only the last segment can be torn.
        effects: list[Effect] = [Sync()] if state.unsynced_bytes else []
        new_log = Log(log.ends, message.ordinal, len(message.header), message.first_seq)
        return replace(state, log=new_log, unsynced_bytes=0), [*effects, BeginSegment(message)]
    if (message.ordinal, message.position) != (log.ordinal, log.next_byte):
        raise PeerError(
            f"frames for segment {message.ordinal}, byte {message.position}; the log goes on in "
            f"{log.ordinal} at {log.next_byte}"
        )
    frames = check_frames(message.frames, message.ordinal, message.position, log.seq)
    ends = log.ends
    for frame in frames:
        # Epochs grow along a log, and the sender leads in the epoch of its message.
        if not (ends[-1].epoch if ends else 0) <= frame.epoch <= message.epoch:
            raise PeerError(f"a frame of epoch {frame.epoch} in the log of epoch {message.epoch}")
        ends = extend(ends, frame.epoch, frame.end)
    end = frames[-1].end
    effects = []
    if state.unsynced_bytes and state.unsynced_bytes + len(message.frames) > state.rules.batch_bytes:
        # Keep the batch bound. In a longer batch, a frame's `synced_to` (of the leader's disk) could lie more than a
        # batch after a hole that is only torn here, and recovery would take the hole for damage.
        state, effects = flush(state)
    effects.append(Write(message.ordinal, message.position, message.frames))
    committed = message.committed if isinstance(message, Data) else 0
    state = replace(
        state,
        log=Log(ends, end.ordinal, end.end, end.seq),
        unsynced_bytes=state.unsynced_bytes + len(message.frames),
        committed_seq=max(state.committed_seq, committed),
    )
    if state.unsynced_bytes >= state.rules.batch_bytes:
        state, further_effects = flush(state)
        effects += further_effects
    return state, effects


def flush(state: Replica) -> Step:
    """Sync the written frames, acknowledge them, and apply the committed rows."""
    effects: list[Effect] = []
    if state.unsynced_bytes:
        effects.append(Sync())
        if state.source and state.source.matched:
            effects.append(Send(state.source.node, Ack(state.promised, *state.log.end)))
        state = replace(state, unsynced_bytes=0)
    state, further_effects = _apply(state)
    return state, effects + further_effects


def _apply(state: Replica) -> Step:
    """Apply the rows that are committed and on this disk.

    Nothing is applied before the source has matched, because until then this log may differ from the leader's.
    """
    if state.unsynced_bytes or not (state.source and state.source.matched):
        return state, []
    seq = min(state.committed_seq, state.log.end.seq)
    if seq <= state.applied_seq:
        return state, []
    return replace(state, applied_seq=seq), [Apply(seq)]


# ---- checks of the frames in a message, before they are written ----------------------------------------------
# A replica writes the leader's bytes unchanged, so a byte that was corrupted on the way would stay corrupted. Therefore
# the CRC-32C of every frame is verified here, and its numbers are compared with those of the message around it.


class CheckedFrame(NamedTuple):
    """The epoch and the end of a frame whose checksum and numbers are right."""

    epoch: int
    end: Position


def check_frames(frames: bytes, ordinal: int, position: int, first_seq: int) -> list[CheckedFrame]:
    """Check frames that belong at byte `position` of segment `ordinal`, and describe each of them.

    Raises PeerError unless they are whole, match their checksums, and are in sequence from row `first_seq` on.
    """
    buffer, checked, offset, seq = pa.py_buffer(frames), [], 0, first_seq
    while offset < len(frames):
        try:
            frame = fmt.read_frame(buffer, offset, origin=position)
        except Corrupt as error:
            raise PeerError(f"frames for segment {ordinal}: {error}") from error
        if frame is None or frame.first_seq != seq:
            raise PeerError(
                f"frames for segment {ordinal}, byte {position + offset}: expected seq {seq}, "
                f"got {'no frame' if frame is None else frame.first_seq}"
            )
        offset, seq = frame.end, frame.next_seq
        checked.append(CheckedFrame(frame.epoch, Position(ordinal, position + offset, seq)))
    return checked
