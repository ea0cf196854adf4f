"""A follower writes, syncs, acknowledges and applies; it decides nothing but whom to believe.

It believes the connection that has brought the highest epoch, and only after the promise of this epoch is on its disk.
Before it writes a frame, the leader says by CUT where both logs agree, and what stands behind that is removed: it is of
an epoch that was lost, and never was committed.

A batch is all that has arrived: written, synced once, acknowledged once. It has a bound (`batch_bytes`), and none spans
two segments. So after a power cut a hole in the last segment is a torn batch, and not damage to acknowledged rows,
unless a whole frame behind it says (`synced_to`) that a batch or more behind the hole was on the disk.
"""

from __future__ import annotations

from msgspec.structs import replace

from timeball.cluster.effects import (
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
from timeball.cluster.frames import read_frames
from timeball.cluster.messages import (
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
from timeball.cluster.positions import BEGINNING, Position, cut, extend
from timeball.cluster.replica import Log, Replica, Role, Source
from timeball.errors import PeerError

Step = tuple[Replica, list[Effect]]


def receive(state: Replica, node: str, message: Message) -> Step:
    """Take a message of a leader or a candidate."""
    if isinstance(message, Hello):
        return _promise(state, node, message)
    if message.epoch < state.promised:
        return state, [Send(node, Refuse(state.promised))]
    source = state.source
    if source is None or source.node != node or message.epoch > state.promised:
        return state, []  # of a connection that has been replaced, or without a HELLO
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
    # Synced before it is told: a candidate that relies on a frame must find it after this replica's next crash.
    if state.unsynced_bytes:
        effects.append(Sync())
    if hello.epoch > state.promised:
        effects.append(KeepPromise(hello.epoch))
    promise = Promise(hello.epoch, state.rules.replica, state.log.ends, first_seq=state.first.seq)
    effects.append(Send(node, promise))
    # What a leader of a lower epoch still sends comes from another source now, and is refused.
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
    """End the process: retention has dropped what comes next at the others, and the caches have no way on from here.

    The next start has applied nothing, so its log may be cut to the beginning. The replica stays itself: what it has
    acknowledged is below a committed snapshot that the other log has (positions.continuing).
    """
    reason = "the others have dropped rows that this log lacks"
    return replace(state, role=Role.STOPPED, source=None, seal=None), [StopServing(reason)]


def cut_log(state: Replica, at: Position) -> Step:
    """Remove what stands behind `at`, the header of an empty segment too: the next writer may begin it otherwise."""
    if at == state.log.end and state.log.is_at_a_frame:
        return state, []
    log = Log(cut(state.log.ends, at), at.ordinal, at.end, at.seq)
    return replace(state, log=log), [CutLog(at)]


def write(state: Replica, message: Begin | Data | Bytes) -> Step:
    """Write frames, or begin a segment, at exactly the end of the log; raises PeerError for any other place."""
    log = state.log
    if isinstance(message, Begin):
        if log.ordinal and (message.ordinal != log.ordinal + 1 or message.first_seq != log.seq):
            raise PeerError(f"BEGIN of segment {message.ordinal} behind {log.ordinal}")
        # Synced first: of the segments, only the last may be torn.
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
        # Else a frame of this message could say that more than a batch behind a hole was on the leader's disk.
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
    """Sync what was written, acknowledge it, and apply the committed rows."""
    effects: list[Effect] = []
    if state.unsynced_bytes:
        effects.append(Sync())
        if state.source and state.source.matched:
            effects.append(Send(state.source.node, Ack(state.promised, *state.log.end)))
        state = replace(state, unsynced_bytes=0)
    state, more = _apply(state)
    return state, effects + more


def _apply(state: Replica) -> Step:
    """Apply the rows committed and on the own disk. Both logs agree up to the own end once the source has matched."""
    if state.unsynced_bytes or not (state.source and state.source.matched):
        return state, []
    seq = min(state.committed_seq, state.log.end.seq)
    if seq <= state.applied_seq:
        return state, []
    return replace(state, applied_seq=seq), [Apply(seq)]
