"""Election of a leader: swap the record, seal the lower epochs, open the new epoch.

A CANDIDATE has proposed a record with the next epoch. When the swap succeeds it becomes SEALING and asks all replicas
for their promise. When a majority of the record's replicas has promised, no row of a lower epoch can be acknowledged
any more, and each row acknowledged before is in the log of one of them. If one of them has a later last epoch, or the
same and a longer log, the candidate fetches that log first (I6). Then it is SYNCING: it appends one EPOCH row, and
leads when this row is committed (I7).

Correctness does not depend on the etcd lease. An outdated read of the record, or a holder's key that ends too early,
only makes a replica become a candidate.
"""

from __future__ import annotations

import zlib

from msgspec.structs import replace

from timeball.cluster.protocol import following, leading
from timeball.cluster.protocol.effects import (
    AppendEpoch,
    Dial,
    Effect,
    HangUp,
    Hold,
    Holder,
    KeepPromise,
    Propose,
    Resign,
    Send,
    Sync,
)
from timeball.cluster.protocol.events import Proposed, Seen
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.messages import (
    BEGINNING,
    Begin,
    Bytes,
    Ends,
    Fetch,
    Promise,
    Refuse,
    find_resume_position,
    log_order_key,
)
from timeball.cluster.protocol.replica import Lead, Record, Replica, Role, Seal, majority, node_of

FREE_SHORT_EPOCHS = 2  # so many short epochs in a row cause no wait, as after crashes or during an upgrade


def handle_seen(state: Replica, event: Seen) -> Step:
    """Handle a record that was read from etcd, and become a candidate if the group has no holder."""
    state = store_record(state, event.revision, event.record)
    if event.revision != state.revision:
        return state, []
    vacant_since_ms = 0 if event.holder is not None else state.vacant_since_ms or state.now_ms
    etcd_ms = state.etcd_ms if event.etcd_ms is None else event.etcd_ms
    state, record = replace(state, vacant_since_ms=vacant_since_ms, etcd_ms=etcd_ms), event.record
    # Another replica has begun a later epoch, so this one cannot serve. It would also be unsafe: with the later record,
    # a hand-over by this leader could name an epoch that already has a leader (docs/decisions/0049).
    if state.seal and record.epoch > state.seal.epoch:
        return give_up(state)
    # The record names this replica after a hand-over, or after a swap of its own whose answer was lost. The comparison
    # with `promised` is rule 2 of replica.py.
    if (
        state.role is Role.FOLLOWER
        and record.leader == state.rules.replica
        and record.epoch > state.promised
        and not knows_newer_set(state, record)
    ):
        return start_sealing(state, record)
    if event.holder is not None or _is_handed_over(state) or _hears_its_leader(state):
        return state, []
    return become_candidate(state, "")


def _is_handed_over(state: Replica) -> bool:
    """Check whether the record has just named another replica, which needs a moment to create the holder's key.

    If this replica began a later epoch now, it would only disturb the hand-over. The wait is bounded by
    `hand_over_ms`, because the other replica may have died.
    """
    record = state.record
    return (
        record is not None
        and record.leader not in ("", state.rules.replica)
        and record.epoch > state.promised
        and state.now_ms - state.revised_ms < state.rules.hand_over_ms
    )


def _hears_its_leader(state: Replica) -> bool:
    """Check whether the leader answers, so that it can create the holder's key again.

    The key ends with the leader's lease when etcd did not answer for a while. An election then would interrupt a leader
    that has served all the time.
    """
    record, source = state.record, state.source
    return (
        record is not None
        and source is not None
        and node_of(record.leader) == source.node
        and record.epoch == state.promised
        and state.now_ms - state.heard_ms <= state.rules.heard_ms_max
        and state.now_ms - state.vacant_since_ms < state.rules.hold_ms
    )


def store_record(state: Replica, revision: int, record: Record) -> Replica:
    """Store a record, unless it is older than the stored one.

    A learner or follower becomes a follower if it is in the record, else a learner.
    """
    if revision < state.revision:
        return state
    if state.record is None or record.epoch > state.record.epoch:
        # Epochs that began and ended between two reads of the record count as well.
        new_epochs = 0 if state.record is None else record.epoch - state.record.epoch
        is_short = state.now_ms - state.epoch_since_ms < state.rules.steady_ms
        short_epochs = state.short_epochs + new_epochs if is_short else 0
        state = replace(state, epoch_since_ms=state.now_ms, short_epochs=short_epochs)
    revised_ms = state.now_ms if revision > state.revision else state.revised_ms
    state = replace(state, revision=revision, record=record, revised_ms=revised_ms)
    if state.role in (Role.LEARNER, Role.FOLLOWER):
        is_in_record = state.rules.replica in record.replicas
        state = replace(state, role=Role.FOLLOWER if is_in_record else Role.LEARNER)
    return state


def replace_dead_leader(state: Replica, node: str) -> Step:
    """Become a candidate after `node` has died, unless the record names another leader by now."""
    if state.record is None or node_of(state.record.leader) != node:
        return state, []
    return become_candidate(state, node)


def become_candidate(state: Replica, displaces: str) -> Step:
    """Become a candidate if the rules allow it now: propose to lead in the next epoch.

    `displaces`: a node that is known to be dead and may still hold the group, or "".
    """
    record = state.record
    if state.role is not Role.FOLLOWER or record is None or not state.rules.may_be_candidate:
        return state, []
    waited_ms = state.now_ms - state.vacant_since_ms if state.vacant_since_ms else 0
    if _defers_to_others(state, waited_ms) or waited_ms < back_off_ms(state):
        return state, []
    # This replica has promised a later epoch, so the record is outdated and the swap would fail. Or etcd was restored
    # from a copy that is older than the last change of the set.
    if record.epoch < state.promised or knows_newer_set(state, record):
        return state, []
    proposal = replace(record, epoch=record.epoch + 1, leader=state.rules.replica)
    proposed = Propose(state.revision, proposal, Holder.TAKE, displaces)
    return replace(state, role=Role.CANDIDATE), [proposed]


def knows_newer_set(state: Replica, record: Record) -> bool:
    """Check whether this replica knows a newer set than the record's, whose majority may lack committed rows."""
    return record.generation < max(state.members.generation, state.refused_generation)


def back_off_ms(state: Replica) -> int:
    """Compute how long this replica waits before it becomes a candidate, from the time when the group had no holder.

    When the coordinator is slow, each new leader loses its lease soon, and elections would follow each other. A replica
    with a shorter round trip to the coordinator waits less. The wait differs between replicas and epochs, so that not
    all become candidates at once.
    """
    rules, record = state.rules, state.record
    wait_ms = 4 * state.etcd_ms if state.etcd_ms > rules.quick_etcd_ms else 0
    if state.short_epochs > FREE_SHORT_EPOCHS:
        doublings = min(state.short_epochs - FREE_SHORT_EPOCHS - 1, 16)
        wait_ms = max(wait_ms, rules.back_off_ms << doublings)
    epoch = 0 if record is None else record.epoch
    jitter = zlib.crc32(f"{rules.replica} {epoch}".encode()) / 2**32
    return int(min(wait_ms, rules.back_off_ms_max) * (0.5 + 0.5 * jitter))


def _defers_to_others(state: Replica, waited_ms: int) -> bool:
    """Check whether this replica waits because its clock deviates, so that others become candidates first.

    A leader releases messages by its own clock, so a deviating clock should not lead. But a group without a leader
    releases nothing, so this replica waits for at most `defer_ms`.
    """
    return state.deviation_ms > state.rules.deviation_ms_max and waited_ms < state.rules.defer_ms


def handle_proposed(state: Replica, event: Proposed) -> Step:
    """Handle the outcome of this candidate's swap of the record."""
    if state.role is Role.CANDIDATE:
        state = replace(state, role=Role.FOLLOWER)
    if not event.succeeded:
        return state, []  # the swap failed, or its outcome is unknown until the record is read
    state = store_record(state, event.revision, event.record)
    if (
        state.role is Role.FOLLOWER
        and event.record.epoch > state.promised
        and not knows_newer_set(state, event.record)
    ):
        return start_sealing(state, event.record)
    return state, [Resign()]  # this replica has promised a later epoch since it proposed


def start_sealing(state: Replica, record: Record) -> Step:
    """Promise the new epoch, then ask all other replicas for their promise."""
    assert record.epoch > state.promised, "a replica never is a candidate twice in one epoch"
    effects: list[Effect] = [Sync()] if state.unsynced_bytes else []
    effects += [KeepPromise(record.epoch, state.rules.replica, record.members), Hold(), Dial(record.epoch)]
    state = replace(
        state, role=Role.SEALING, promised=record.epoch, promised_to=state.rules.replica, members=record.members,
        source=None, unsynced_bytes=0, seal=Seal(record.epoch, state.now_ms, {}),
    )  # fmt: skip
    return _continue_election(state, effects)


def send_hello(state: Replica, node: str) -> Step:
    """Send HELLO on a new connection that was opened here."""
    return state, [leading.hello_to(state, node)] if state.epoch else []


def handle_promise(state: Replica, node: str, promise: Promise) -> Step:
    """Count a promise of this candidate's epoch."""
    assert state.seal
    promises = {**state.seal.promises, node: promise}
    state = replace(state, seal=replace(state.seal, promises=promises))
    return (state, []) if state.seal and state.seal.fetching else _continue_election(state, [])


def handle_refusal(state: Replica, refusal: Refuse, node: str) -> Step:
    """Give up. If a replica refuses only the set, give up once too few replicas are left for a majority of it."""
    assert state.seal and state.record
    if not refusal.generation:
        return give_up(state)
    replicas, refused_by = state.record.replicas, state.seal.refused_by | {node}
    state = replace(state, seal=replace(state.seal, refused_by=refused_by))
    if sum(node_of(replica) not in refused_by for replica in replicas) >= majority(replicas):
        return state, []
    return give_up(replace(state, refused_generation=max(state.refused_generation, refusal.generation)))


def handle_fetched(state: Replica, node: str, message: Begin | Bytes) -> Step:
    """Write fetched frames of a longer log. Then fetch more, or continue the election once this log is as long."""
    seal = state.seal
    assert seal
    if seal.fetching != node:
        return state, []
    state, effects = following.write(state, message)
    wanted_ends = seal.promises[node].ends
    if isinstance(message, Begin):
        return state, effects
    if log_order_key(state.log.ends) < log_order_key(wanted_ends):
        return state, [*effects, Send(node, Fetch(seal.epoch, *state.log.end))]
    if state.unsynced_bytes:
        effects.append(Sync())
    state = replace(state, seal=replace(seal, fetching=""), unsynced_bytes=0)
    return _continue_election(state, effects)


def handle_disconnect(state: Replica, node: str) -> Step:
    """Drop the promise of a node whose connection has ended. The node promises again on its next connection."""
    assert state.seal
    promises = {name: promise for name, promise in state.seal.promises.items() if name != node}
    if state.seal.fetching == node:
        # The local log may have been cut for the fetch, so a log that was shorter may now be the longest.
        return give_up(state)
    return replace(state, seal=replace(state.seal, promises=promises)), []


def give_up(state: Replica) -> Step:
    """Become a follower again. This candidate has served nothing, so its process need not end."""
    # The sync comes last: the group must not wait for a disk that hangs.
    effects: list[Effect] = [HangUp(), Resign(), *([Sync()] if state.unsynced_bytes else [])]
    state = replace(state, role=Role.FOLLOWER, seal=None, source=None, unsynced_bytes=0)
    if state.record:
        state = store_record(state, state.revision, state.record)
    return state, effects


def has_majority(state: Replica) -> bool:
    """Check whether a majority of the record's replicas, this one included, has promised the epoch."""
    assert state.seal and state.record
    promised = {state.rules.replica, *(promise.replica for promise in state.seal.promises.values())}
    replicas = state.record.replicas
    return len(promised.intersection(replicas)) >= majority(replicas)


def _continue_election(state: Replica, effects: list[Effect]) -> Step:
    """Wait for a majority of promises. Then fetch the longest log, or open the epoch if this replica has it."""
    if not has_majority(state):
        return state, effects
    assert state.seal and state.record
    longest, node = _find_longest_log(state)
    if not node:
        return _open_epoch(state, effects)
    common_end = find_resume_position(longest, state.log.ends, state.seal.promises[node].first_seq)
    if common_end == BEGINNING and state.applied_seq:
        state, restart = following.stop_for_restart(state)
        return state, [*effects, HangUp(), Resign(), *restart]
    # After the common part, the local log has frames of a lower epoch than the last epoch of the other log. The leader
    # of that last epoch had all committed rows, so the rest of the local log was never committed and may be removed.
    state, cut_effects = following.cut_log(state, common_end)
    fetch = Send(node, Fetch(state.epoch, *state.log.end))
    assert state.seal
    return replace(state, seal=replace(state.seal, fetching=node)), [*effects, *cut_effects, fetch]


def _find_longest_log(state: Replica) -> tuple[Ends, str]:
    """Find the ends of the most complete log, and the node that has it ("" for this one)."""
    assert state.seal and state.record
    longest, owner = state.log.ends, ""
    for node, promise in state.seal.promises.items():
        # Ignore learners: a learner's log may lack committed rows or hold rows of an abandoned epoch.
        if promise.replica in state.record.replicas and log_order_key(promise.ends) > log_order_key(longest):
            longest, owner = promise.ends, node
    return longest, owner


def _open_epoch(state: Replica, effects: list[Effect]) -> Step:
    """Become SYNCING: append the EPOCH row, and send CUT to each replica that has promised."""
    seal, record = state.seal, state.record
    assert seal and record
    lead = Lead(seal.epoch, state.now_ms, record.replicas, {}, former=record.former)
    state = replace(state, role=Role.SYNCING, seal=None, lead=lead)
    for node, promise in seal.promises.items():
        state, further_effects = leading.handle_promise(state, node, promise)
        effects += further_effects
    effects += [leading.hello_to(state, node) for node in sorted(seal.refused_by)]
    return state, [*effects, AppendEpoch(lead.epoch)]
