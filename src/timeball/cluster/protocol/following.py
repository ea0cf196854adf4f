"""The follower: writes, syncs, acknowledges and applies the log of the leader that it accepts.

A follower accepts messages only from the connection with the highest epoch, and only after its promise of this epoch
is synced. Before it writes a frame, the leader's CUT names the end of the common log, and the follower removes its
log after this position. That part belongs to an abandoned epoch and was never committed.

A batch is everything that has arrived: it is written, synced once and acknowledged once. A batch has at most
`batch_bytes` and does not span two segments. So after a power failure, a hole in the last segment is normally a torn
batch, whose rows were not acknowledged. It is damage only if a whole frame after the hole has a `synced_to` more than
`batch_bytes` after the hole. Then the bytes at the hole had been synced before.
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
    Promise,
    Refuse,
    Want,
)
from timeball.cluster.protocol.positions import BEGINNING, Position, cut, extend
from timeball.cluster.protocol.replica import Log, Replica, Role, Source
from timeball.log import format as fmt
from timeball.model.errors import Corrupt, PeerError

Step = tuple[Replica, list[Effect]]


def receive(state: Replica, node: str, message: Message) -> Step:
    """Handle a message of a leader or a candidate. Raises PeerError."""
    if isinstance(message, Hello):
        return _promise(state, node, message)
    if message.epoch < state.promised:
        return state, [Send(node, Refuse(state.promised))]
    source = state.source
    if source is None or source.node != node or message.epoch > state.promised:
        return state, []  # the connection has been replaced, or has sent no HELLO
    match message:
        case Cut():
            return _agree(state, source, message)
        case Begin() | Data() if source.matched:
            return write(state, message)
        case Fetch():
            begin = Position(message.ordinal, message.position, message.end_seq)
            return state, [Ship(node, message.epoch, begin, fetched=True)]
        case File() | Want():
            return state, [PassOn(node, message)]
        case Ping():
            pong = Pong(message.epoch, state.wall_ms, message.boot_ms)
            state = replace(state, off_ms=message.off_ms)
            state, effects = _apply(replace(state, committed_seq=max(state.committed_seq, message.committed)))
            return state, [Send(node, pong), *effects]
        case _:
            raise PeerError(f"{type(message).__name__} from {node}, which has not said where the logs agree")


def _promise(state: Replica, node: str, hello: Hello) -> Step:
    if hello.epoch < state.promised:
        return state, [Send(node, Refuse(state.promised))]
    effects: list[Effect] = []
    # Sync before sending the ends: a candidate relies on these frames, so they must survive a crash of this replica.
    if state.unsynced_bytes:
        effects.append(Sync())
    if hello.epoch > state.promised:
        effects.append(KeepPromise(hello.epoch))
    promise = Promise(hello.epoch, state.rules.replica, state.log.ends, first_seq=state.first.seq)
    effects.append(Send(node, promise))
    # With the new source, later messages from a leader of a lower epoch are refused.
    return replace(state, promised=hello.epoch, source=Source(node), unsynced_bytes=0), effects


def _agree(state: Replica, source: Source, message: Cut) -> Step:
    at = Position(message.ordinal, message.position, message.end_seq)
    if at > state.log.end:
        raise PeerError(f"CUT at {at}, but the log ends at {state.log.end}")
    if at == BEGINNING and state.applied_seq:
        return begin_anew(state)
    assert at.seq >= state.applied_seq, f"CUT at seq {at.seq} below committed rows, up to {state.applied_seq}"
    state, effects = cut_log(state, at)
    ack = Ack(message.epoch, *at)
    return replace(state, source=replace(source, matched=True)), [*effects, Send(source.node, ack)]


def begin_anew(state: Replica) -> Step:
    """End the process: the other log begins after rows that this log lacks, and the caches cannot skip rows.

    The next start has applied no row, so its log may be cut to the beginning. The replica keeps its incarnation: all
    rows that it has acknowledged are covered by a committed snapshot in the other log (see `positions.continuing`).
    """
    reason = "the others have dropped rows that this log lacks"
    return replace(state, role=Role.STOPPED, source=None, seal=None), [StopServing(reason)]


def cut_log(state: Replica, at: Position) -> Step:
    """Remove the log after `at`, including the header of an empty segment.

    The next writer may begin that segment with another header.
    """
    if at == state.log.end and state.log.is_at_a_frame:
        return state, []
    log = Log(cut(state.log.ends, at), at.ordinal, at.end, at.seq)
    return replace(state, log=log), [CutLog(at)]


def write(state: Replica, message: Begin | Data | Bytes) -> Step:
    """Write frames or begin a segment, exactly at the end of the log. Raises PeerError for any other position."""
    log = state.log
    if isinstance(message, Begin):
        if log.ordinal and (message.ordinal != log.ordinal + 1 or message.first_seq != log.seq):
            raise PeerError(f"BEGIN of segment {message.ordinal} behind {log.ordinal}")
        # Sync first: recovery relies on it that only the last segment can be torn.
        effects: list[Effect] = [Sync()] if state.unsynced_bytes else []
        begun = Log(log.ends, message.ordinal, len(message.header), message.first_seq)
        return replace(state, log=begun, unsynced_bytes=0), [*effects, BeginSegment(message)]
    if (message.ordinal, message.position) != (log.ordinal, log.place):
        raise PeerError(
            f"frames for segment {message.ordinal}, byte {message.position}; the log goes on in "
            f"{log.ordinal} at {log.place}"
        )
    frames = read_frames(message.frames, message.ordinal, message.position, log.seq)
    ends = log.ends
    for frame in frames:
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
        state, more = flush(state)
        effects += more
    return state, effects


def flush(state: Replica) -> Step:
    """Sync the written frames, acknowledge them, and apply the committed rows."""
    effects: list[Effect] = []
    if state.unsynced_bytes:
        effects.append(Sync())
        if state.source and state.source.matched:
            effects.append(Send(state.source.node, Ack(state.promised, *state.log.end)))
        state = replace(state, unsynced_bytes=0)
    state, more = _apply(state)
    return state, effects + more


def _apply(state: Replica) -> Step:
    """Apply the rows that are committed and synced here.

    Nothing is applied before the source has matched, because until then this log may differ from the leader's.
    """
    if state.unsynced_bytes or not (state.source and state.source.matched):
        return state, []
    seq = min(state.committed_seq, state.log.end.seq)
    if seq <= state.applied_seq:
        return state, []
    return replace(state, applied_seq=seq), [Apply(seq)]


# Checks of the frames in a message, before they are written.
#
# A replica writes the leader's bytes unchanged, so a byte that was corrupted on the way would stay corrupted. Therefore
# the CRC-32C of every frame is verified here, and its numbers are compared with those of the message around it.


class Shipped(NamedTuple):
    """A frame of a message: its epoch and its end."""

    epoch: int
    end: Position


def read_frames(frames: bytes, ordinal: int, position: int, first_seq: int) -> list[Shipped]:
    """Decode the frames from `position` on. Raises PeerError unless they are whole and in sequence."""
    buffer, found, place, seq = pa.py_buffer(frames), [], 0, first_seq
    while place < len(frames):
        try:
            frame = fmt.read_frame(buffer, place, origin=position)
        except Corrupt as error:
            raise PeerError(f"frames for segment {ordinal}: {error}") from error
        if frame is None or frame.first_seq != seq:
            raise PeerError(
                f"frames for segment {ordinal}, byte {position + place}: expected seq {seq}, "
                f"got {'no frame' if frame is None else frame.first_seq}"
            )
        place, seq = frame.end, frame.next_seq
        found.append(Shipped(frame.epoch, Position(ordinal, position + place, seq)))
    return found
