"""Single steps of the replication protocol. tests/cluster/simulation.py runs whole groups."""

from __future__ import annotations

import msgspec
import pytest
from tests.cluster.simulated_disk import SEGMENT_BYTES, make_frame

from timeball.cluster.protocol import effects as do
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.effects import Effect
from timeball.cluster.protocol.following import check_frames
from timeball.cluster.protocol.leading import confirmed_ms
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import (
    BEGINNING,
    Ack,
    Begin,
    Bytes,
    Complete,
    Cut,
    Data,
    EpochEnd,
    Fetch,
    File,
    Have,
    Hello,
    Members,
    Ping,
    Pong,
    Position,
    Promise,
    Refuse,
)
from timeball.cluster.protocol.replica import Log, Record, Replica, Role, Rules
from timeball.model.errors import PeerError

SET = ("a/1", "b/1", "c/1")
MEMBERS = Members(1, SET)
NEWER = Members(2, ("a/1", "b/1", "d/1"))
HEADER = b"h" * 64


def run_events(state: Replica, *events: on.Event) -> tuple[Replica, list[Effect]]:
    """Step the state by these events. Returns the last state, and the effects of the last event."""
    effects: list[Effect] = []
    for event in events:
        state, effects = step(state, event)
    return state, effects


def row(epoch: int, seq: int) -> bytes:
    """Build the frame of a row. Frames have 128 bytes and begin at byte 64, so row n ends at byte 64 + 128 * n."""
    position = 64 + 128 * (seq - 1)
    return make_frame(epoch, seq, position, position, "M", seq).raw


def follower(epoch: int = 1) -> Replica:
    """Make the follower b of a, with one row of this epoch, which it has synced and acknowledged."""
    state = Replica(Rules("b/1"))
    return run_events(
        state,
        on.Received("a", Hello(epoch, "g1", "a/1")),
        on.Received("a", Cut(epoch, *BEGINNING)),
        on.Received("a", Begin(epoch, 1, SEGMENT_BYTES, 1, HEADER)),
        on.Received("a", Data(epoch, 1, 64, 2, 0, row(epoch, 1))),
        on.Flush(),
    )[0]


def leader() -> Replica:
    """Make a the leader of epoch 1, whose EPOCH row is committed because b has acknowledged it."""
    state = Replica(Rules("a/1"), lease_until_ms=10_000)
    state, effects = run_events(state, on.Seen(1, Record(0, "", SET), None))
    assert effects == [do.Propose(1, Record(1, "a/1", SET), do.Holder.TAKE)] and state.role is Role.CANDIDATE
    state, effects = run_events(state, on.Proposed(2, Record(1, "a/1", SET), True))
    assert effects[0] == do.KeepPromise(1, "a/1", MEMBERS) and state.role is Role.SEALING
    state, effects = run_events(state, on.Received("b", Promise(1, "b/1", (), generation=1)))
    assert effects == [do.Send("b", Cut(1, *BEGINNING)), do.AppendEpoch(1)] and state.role is Role.SYNCING
    begin = Begin(1, 1, SEGMENT_BYTES, 1, HEADER)
    state, effects = run_events(state, on.Appended(1, 64, 2, row(1, 1), 0, begin))
    assert [type(effect) for effect in effects] == [do.Send, do.Send, do.BeginSegment, do.Write, do.Sync]
    state, effects = run_events(state, on.Received("b", Ack(1, 1, 192, 2)))
    assert effects == [do.Commit(Position(1, 192, 2)), do.Serve(1)] and state.role is Role.LEADER
    return state


def test_a_promise_is_stored_before_it_is_sent() -> None:
    _, effects = run_events(Replica(Rules("b/1")), on.Received("a", Hello(4, "g1", "a/1")))
    assert effects == [do.KeepPromise(4, "a/1", Members()), do.Send("a", Promise(4, "b/1", ()))]


def test_an_epoch_is_promised_to_one_replica_only() -> None:
    """etcd names one leader for each epoch, unless it was restored from an old copy."""
    state, _ = run_events(Replica(Rules("b/1")), on.Received("a", Hello(4, "g1", "a/1")))
    assert run_events(state, on.Received("c", Hello(4, "g1", "c/1"))) == (state, [do.Send("c", Refuse(4))])
    assert run_events(leader(), on.Received("c", Hello(1, "g1", "c/1")))[1] == [do.Send("c", Refuse(1))]
    # The same replica may connect again.
    assert run_events(state, on.Received("a", Hello(4, "g1", "a/1")))[1] == [
        do.Send("a", Promise(4, "b/1", ()))
    ]


def test_a_leader_whose_holder_key_has_ended_creates_it_again_unless_it_hands_over() -> None:
    record = Record(1, "a/1", SET)
    state = leader()
    assert run_events(state, on.Seen(2, record, "a")) == (state, [])
    assert run_events(state, on.Seen(2, record, None)) == (state, [do.Hold()])
    assert run_events(state, on.Seen(1, record, None)) == (state, []), "the read is older than the record"
    _, effects = run_events(state, on.HandOver("b"), on.Seen(2, record, None))
    assert do.Hold() not in effects, "a leader that hands over releases the group"


def test_a_lead_is_confirmed_by_answers_to_a_later_ping() -> None:
    state, _ = run_events(leader(), on.Tick(1_000))
    assert confirmed_ms(state) == 0
    state, _ = run_events(
        state, on.Received("b", Pong(1, 0, 900), 1_010), on.Received("b", Ack(1, 1, 192, 2))
    )
    assert confirmed_ms(state) == 900, "the time of the PING, and no later answer"
    state, _ = run_events(state, on.Tick(2_000), on.Received("c", Pong(1, 0, 2_000), 2_010))
    assert confirmed_ms(state) == 900, "c has not promised"
    assert state.lead
    with_former = msgspec.structs.replace(state.lead, former=("a/1", "c/1", "d/1"))
    with_two_sets = msgspec.structs.replace(state, lead=with_former)
    assert confirmed_ms(with_two_sets) == 0, "a majority of each set"
    state, _ = run_events(state, on.Disconnected("b", True))
    assert confirmed_ms(state) == 0


def test_an_acknowledgement_follows_the_sync() -> None:
    state = follower()
    _, effects = run_events(state, on.Received("a", Data(1, 1, 192, 3, 2, row(1, 2))), on.Flush())
    assert effects == [do.Sync(), do.Send("a", Ack(1, 1, 320, 3)), do.Apply(2)]


def test_any_message_of_a_lower_epoch_is_refused() -> None:
    state, _ = run_events(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    for message in (Data(1, 1, 192, 3, 2, row(1, 2)), Hello(1, "g1", "a/1"), Cut(1, *BEGINNING)):
        assert step(state, on.Received("a", message)) == (state, [do.Send("a", Refuse(2))])


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Data(1, 1, 320, 4, 0, row(1, 3)), id="a frame is missing before"),
        pytest.param(Data(1, 1, 192, 3, 0, row(1, 2)[:-1] + b"x"), id="a changed byte"),
        pytest.param(Data(1, 1, 192, 3, 0, row(2, 2)), id="a frame of a later epoch"),
        pytest.param(Begin(1, 3, SEGMENT_BYTES, 2, HEADER), id="a segment is missing before"),
        pytest.param(Cut(1, 1, 960, 8), id="a cut after the end"),
    ],
)
def test_a_follower_refuses_anything_but_the_next_whole_frame(message: Data) -> None:
    with pytest.raises(PeerError):
        step(follower(), on.Received("a", message))


def test_a_cut_removes_the_frames_of_an_abandoned_epoch() -> None:
    state, _ = run_events(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    state, effects = run_events(state, on.Received("c", Cut(2, *BEGINNING)))
    assert effects == [do.CutLog(BEGINNING), do.Send("c", Ack(2, *BEGINNING))] and state.log == Log()


def test_checked_frames_are_described_by_their_epochs_and_ends() -> None:
    frames = check_frames(row(1, 1) + row(3, 2), 1, 64, 1)
    assert frames == [(1, Position(1, 192, 2)), (3, Position(1, 320, 3))]


def test_a_candidate_fetches_a_more_complete_log_before_it_opens_its_epoch() -> None:
    state = Replica(Rules("a/1"))
    state, _ = run_events(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, effects = run_events(state, on.Received("b", Promise(2, "b/1", (EpochEnd(1, 1, 192, 2),))))
    assert [type(effect) for effect in effects] == [do.Send] and state.role is Role.SEALING


def test_the_promise_of_a_learner_does_not_count() -> None:
    state = Replica(Rules("a/1"))
    state, _ = run_events(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, effects = run_events(state, on.Received("b", Promise(2, "b/2", ())))
    assert effects == [] and state.role is Role.SEALING


def test_a_replica_does_not_lead_in_an_epoch_that_it_has_promised_before() -> None:
    state = Replica(Rules("a/1"), promised=2)
    state, effects = run_events(state, on.Seen(5, Record(2, "a/1", SET), "a"))
    assert effects == [] and state.role is Role.FOLLOWER


def test_a_sealing_replica_gives_up_when_a_later_epoch_is_in_the_record() -> None:
    state = Replica(Rules("a/1"))
    state, _ = run_events(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, effects = run_events(state, on.Seen(3, Record(3, "b/1", SET), "b"))
    assert effects == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER


def test_a_candidate_that_gives_up_releases_the_group_before_it_syncs() -> None:
    state = Replica(Rules("a/1"))
    state, _ = run_events(
        state,
        on.Seen(1, Record(1, "c/1", SET), None),
        on.Proposed(2, Record(2, "a/1", SET), True),
        on.Received("b", Promise(2, "b/1", (EpochEnd(1, 1, 320, 3),))),
        on.Received("b", Begin(2, 1, SEGMENT_BYTES, 1, HEADER)),
        on.Received("b", Bytes(2, 1, 64, 2, row(1, 1))),
    )
    assert state.unsynced_bytes
    _, effects = run_events(state, on.Disconnected("b", True))
    assert effects == [do.HangUp(), do.Resign(), do.Sync()], "the sync comes last, because the disk may hang"


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(on.Received("b", Refuse(2)), id="refused"),
        pytest.param(on.Received("c", Hello(2, "g1", "c/1")), id="another candidate"),
        pytest.param(on.Seen(3, Record(2, "b/1", SET), "b"), id="another leader in the record"),
        pytest.param(on.Tick(20_000), id="no lease at a tick"),
        pytest.param(on.Appended(1, 192, 3, row(1, 2), 20_000), id="no lease at a commit"),
    ],
)
def test_a_leader_stops_when_another_may_lead(event: on.Event) -> None:
    state, effects = run_events(leader(), event)
    assert isinstance(effects[0], do.StopServing) and state.role is Role.STOPPED
    assert step(state, on.Received("b", Ack(1, 1, 320, 3))) == (state, [])


def test_a_new_incarnation_joins_once_it_has_all_rows_and_files() -> None:
    state, effects = run_events(leader(), on.Received("c", Promise(1, "c/2", ())))
    assert effects == [do.Send("c", Cut(1, *BEGINNING))]
    state, effects = run_events(state, on.Received("c", Ack(1, *BEGINNING)))
    assert effects == [do.Ship("c", 1, BEGINNING)]
    state, _ = run_events(state, on.Shipped("c", Position(1, 192, 2)))
    state, effects = run_events(state, on.Received("c", Ack(1, 1, 192, 2)))
    assert effects == [], "it has no data files yet"
    state, effects = run_events(state, on.Received("c", Complete(1, 1)))
    assert effects == []
    state, effects = run_events(state, on.Received("c", Complete(1, 2)))
    new = Record(1, "a/1", ("a/1", "b/1", "c/2"), 2, SET)
    assert effects == [do.Propose(2, new, do.Holder.KEEP)]
    state, effects = run_events(state, on.Proposed(3, new, True))
    assert state.lead and state.lead.replicas == new.replicas and not state.lead.joining
    hello = Hello(1, "cluster/g1", "a/1", members=new.members, is_elected=True)
    assert effects == [do.KeepPromise(1, "a/1", new.members), do.Send("b", hello), do.Send("c", hello)]
    # The change ends when a majority of the former set has stored the new one.
    ends = (EpochEnd(1, 1, 192, 2),)
    state, effects = run_events(state, on.Received("c", Promise(1, "c/2", ends, generation=2)))
    assert effects == [do.Send("c", Cut(1, 1, 192, 2))]
    state, effects = run_events(state, on.Received("b", Promise(1, "b/1", ends, generation=2)))
    end_of_change = Record(1, "a/1", new.replicas, 2)
    assert effects[1:] == [do.Propose(3, end_of_change, do.Holder.KEEP)]
    state, effects = run_events(state, on.Proposed(4, end_of_change, True))
    assert effects == [] and state.lead and not state.lead.former


def test_a_commit_needs_the_former_set_until_the_change_has_ended() -> None:
    """The new set may commit alone only when a majority of the former one would refuse to elect a leader."""
    record = Record(1, "a/1", ("a/1", "d/1", "e/1"), 2, SET)
    state, _ = run_events(
        leader(),
        on.Seen(3, record, "a"),
        on.Received("d", Promise(1, "d/1", (), generation=2)),
        on.Received("d", Ack(1, *BEGINNING)),
        on.Appended(1, 192, 3, row(1, 2), 0),
        on.Shipped("d", Position(1, 320, 3)),
    )
    state, effects = run_events(state, on.Received("d", Ack(1, 1, 320, 3)))
    assert effects == []
    state, effects = run_events(state, on.Received("b", Ack(1, 1, 320, 3)))
    assert effects == [do.Commit(Position(1, 320, 3))]


# ---- etcd restored from a copy that is older than the last change of the set -------------------------------------


def follower_of_newer_set() -> Replica:
    """Make the follower b in epoch 1, which has stored the set NEWER."""
    return run_events(Replica(Rules("b/1")), on.Received("a", Hello(1, "g1", "a/1", members=NEWER)))[0]


def test_a_replica_refuses_a_candidate_of_an_older_set_unless_it_is_elected_already() -> None:
    state, candidate = follower_of_newer_set(), Hello(2, "g1", "c/1", members=MEMBERS)
    assert state.members == NEWER
    assert run_events(state, on.Received("c", candidate)) == (state, [do.Send("c", Refuse(2, 2))])
    assert run_events(state, on.Seen(1, Record(1, "a/1", SET), None))[1] == [], "it becomes no candidate"
    assert run_events(state, on.Seen(1, Record(2, "b/1", SET), None))[1] == [], "nor by a hand-over"
    # A majority of the older set has elected this candidate, so the change to the newer set had not ended.
    elected = msgspec.structs.replace(candidate, is_elected=True)
    state, effects = run_events(state, on.Received("c", elected))
    assert effects[0] == do.KeepPromise(2, "c/1", MEMBERS) and state.members == MEMBERS


def test_a_leader_refuses_a_candidate_of_an_older_set_and_continues() -> None:
    state, _ = run_events(leader(), on.Seen(3, Record(1, "a/1", NEWER.replicas, 2), "a"))
    candidate = Hello(2, "g1", "c/1", members=MEMBERS)
    assert run_events(state, on.Received("c", candidate)) == (state, [do.Send("c", Refuse(2, 2))])
    assert run_events(state, on.Received("d", Refuse(1, 3))) == (state, []), "the leader is elected already"


def test_a_candidate_gives_up_when_a_majority_knows_a_newer_set() -> None:
    state = Replica(Rules("c/1"))
    state, _ = run_events(
        state, on.Seen(1, Record(1, "a/1", SET), None), on.Proposed(2, Record(2, "c/1", SET), True),
        on.Received("a", Refuse(2, 2)),
    )  # fmt: skip
    assert state.role is Role.SEALING, "c and b may still be a majority"
    state, effects = run_events(state, on.Received("b", Refuse(2, 2)))
    assert effects == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER
    assert run_events(state, on.Seen(2, Record(2, "c/1", SET), None))[1] == [], "it does not try again"
    renewed = Record(2, "", NEWER.replicas, 3)
    assert run_events(state, on.Seen(3, renewed, None))[1] == [], "c is not in the newest set"


def test_an_elected_leader_sends_another_hello_to_a_replica_that_refused_its_set() -> None:
    state = Replica(Rules("c/1"))
    _, effects = run_events(
        state, on.Seen(1, Record(1, "a/1", SET), None), on.Proposed(2, Record(2, "c/1", SET), True),
        on.Received("a", Refuse(2, 2)), on.Received("b", Promise(2, "b/1", (), generation=1)),
    )  # fmt: skip
    hello = Hello(2, "cluster/g1", "c/1", members=MEMBERS, is_elected=True)
    assert do.Send("a", hello) in effects


# ---- waiting before an election ----------------------------------------------------------------------------------


def test_a_replica_waits_when_the_coordinator_is_slow_or_epochs_are_short() -> None:
    record = Record(1, "a/1", SET)
    state = run_events(follower(), on.Tick(5_000), on.Seen(1, record, "a"))[0]
    slow, effects = run_events(state, on.Seen(1, record, None, 1_000))
    assert effects == [], "it waits for 2 to 4 s"
    assert run_events(slow, on.Tick(6_999), on.Seen(1, record, None, 1_000))[1] == []
    assert run_events(slow, on.Tick(9_000), on.Seen(1, record, None, 1_000))[1] != []
    assert run_events(slow, on.Seen(1, record, None, 10))[1] != [], "the coordinator is quick again"
    for epoch in (2, 3, 4):
        state = run_events(state, on.Tick(5_000 + epoch), on.Seen(epoch, Record(epoch, "c/1", SET), "c"))[0]
    newest = Record(4, "c/1", SET)
    waiting, effects = run_events(state, on.Tick(5_600), on.Seen(4, newest, None))
    assert effects == [], "the third short epoch in a row"
    assert run_events(waiting, on.Tick(5_900), on.Seen(4, newest, None))[1] != []
    # After a long epoch, a candidate waits for nothing.
    steady = run_events(state, on.Tick(60_000), on.Seen(5, Record(5, "a/1", SET), "a"), on.Tick(60_600))[0]
    assert run_events(steady, on.Seen(5, Record(5, "a/1", SET), None))[1] != []


def test_a_syncing_replica_that_must_stop_becomes_a_follower() -> None:
    state = Replica(Rules("a/1"), lease_until_ms=10_000)
    state, _ = run_events(
        state, on.Seen(1, Record(0, "", SET), None), on.Proposed(2, Record(1, "a/1", SET), True),
        on.Received("b", Promise(1, "b/1", (), generation=1)),
        on.Appended(1, 64, 2, row(1, 1), 0, Begin(1, 1, SEGMENT_BYTES, 1, HEADER)),
    )  # fmt: skip
    assert state.role is Role.SYNCING
    later, effects = run_events(state, on.Received("c", Hello(2, "g1", "c/1", members=MEMBERS)))
    assert effects[:2] == [do.HangUp(), do.Resign()] and later.role is Role.FOLLOWER
    assert isinstance(effects[-1], do.Send) and isinstance(effects[-1].message, Promise)
    state, effects = run_events(state, on.Tick(20_000))
    assert effects == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER


def test_a_hand_over_swaps_the_record_once_the_successor_has_the_whole_log() -> None:
    state, effects = run_events(leader(), on.HandOver("b"))
    assert effects == [do.Propose(2, Record(2, "b/1", SET), do.Holder.RELEASE)]
    state, effects = run_events(state, on.Proposed(3, Record(2, "b/1", SET), True))
    assert isinstance(effects[0], do.StopServing)
    state, effects = run_events(follower(), on.Seen(3, Record(2, "b/1", SET), None))
    assert effects[0] == do.KeepPromise(2, "b/1", MEMBERS) and state.role is Role.SEALING


def test_messages_about_files_are_passed_on_unless_their_epoch_is_lower() -> None:
    file = File(1, 0, 10, "bucket=2026-11-24/0.parquet", 0, b"")
    state = follower()
    assert step(state, on.Received("a", file)) == (state, [do.PassOn("a", file)])
    later, _ = run_events(state, on.Received("c", Hello(2, "g1", "c/1")))
    assert step(later, on.Received("a", file)) == (later, [do.Send("a", Refuse(2))])
    have = Have(1, 10, "bucket=2026-11-24/0.parquet")
    assert do.PassOn("b", have) in step(leader(), on.Received("b", have))[1]


def test_a_late_answer_about_a_file_on_a_leader_s_connection_is_not_refused() -> None:
    """A follower that answers a WANT may lead the next epoch by then: it sends the answer as the leader."""
    late = File(1, 0, 10, "bucket=2026-11-24/0.parquet", 0, b"0123456789")
    state, _ = run_events(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    assert step(state, on.Received("c", late)) == (state, [])


def test_a_candidate_that_lacks_rows_which_the_other_log_no_longer_has_restarts() -> None:
    state, _ = run_events(
        follower(),
        on.Received("a", Ping(1, 0, 0, 2)),
        on.Seen(1, Record(1, "c/1", SET), None),
        on.Proposed(2, Record(2, "b/1", SET), True),
    )
    ends = (EpochEnd(1, 9, 192, 90),)
    fetching, effects = run_events(state, on.Received("a", Promise(2, "a/1", ends, first_seq=2)))
    assert effects[-1] == do.Send("a", Fetch(2, 1, 192, 2)) and fetching.role is Role.SEALING
    stopped, effects = run_events(state, on.Received("a", Promise(2, "a/1", ends, first_seq=3)))
    assert do.Resign() in effects and isinstance(effects[-1], do.StopServing) and stopped.role is Role.STOPPED


# ---- retention, and the length of a batch ----------------------------------------------------------------------


def test_a_follower_that_lacks_deleted_rows_is_cut_to_the_beginning() -> None:
    state = run_events(leader(), on.Dropped(Position(4, 64, 9)))[0]
    _, effects = run_events(state, on.Received("c", Promise(1, "c/1", (EpochEnd(1, 1, 192, 2),))))
    assert effects == [do.Send("c", Cut(1, *BEGINNING))]
    # A log that ends where the leader's log begins is continued from there.
    state = run_events(leader(), on.Dropped(Position(2, 64, 2)))[0]
    _, effects = run_events(state, on.Received("c", Promise(1, "c/1", (EpochEnd(1, 1, 192, 2),))))
    assert effects == [do.Send("c", Cut(1, 1, 192, 2))]


def test_a_follower_is_cut_to_the_beginning_if_its_next_segment_is_deleted() -> None:
    state, effects = run_events(
        leader(),
        on.Received("c", Promise(1, "c/1", ())),
        on.Received("c", Ack(1, *BEGINNING)),
        on.Appended(1, 192, 3, row(1, 2), 0),
        on.Appended(1, 320, 4, row(1, 3), 0),
        on.Shipped("c", Position(1, 320, 3)),
        on.Dropped(Position(2, 64, 4)),
        on.Received("c", Ack(1, 1, 320, 3)),
    )
    assert effects[-1] == do.Send("c", Cut(1, *BEGINNING))
    state, effects = run_events(state, on.Received("c", Ack(1, *BEGINNING)))
    assert effects == [do.Ship("c", 1, BEGINNING)]


def test_a_follower_that_has_applied_rows_restarts_before_its_log_is_cut_to_the_beginning() -> None:
    state, effects = run_events(follower(), on.Received("a", Ping(1, 0, 0, 2)))
    assert do.Apply(2) in effects
    state, effects = run_events(
        state, on.Received("a", Hello(1, "g1", "a/1")), on.Received("a", Cut(1, *BEGINNING))
    )
    assert state.role is Role.STOPPED and isinstance(effects[-1], do.StopServing)
    assert not any(isinstance(effect, do.CutLog) for effect in effects)


def test_a_message_that_would_make_a_batch_too_long_is_written_after_a_sync() -> None:
    state = run_events(follower())[0]
    state = msgspec.structs.replace(state, rules=Rules("b/1", batch_bytes=300))
    frames = [row(1, seq) for seq in range(2, 6)]
    state, effects = run_events(state, on.Received("a", Data(1, 1, 192, 4, 2, frames[0] + frames[1])))
    assert [type(effect) for effect in effects] == [do.Write]
    _, effects = run_events(state, on.Received("a", Data(1, 1, 448, 6, 2, frames[2] + frames[3])))
    assert [type(effect) for effect in effects] == [do.Sync, do.Send, do.Apply, do.Write]


# ---- hand-over --------------------------------------------------------------------------------------------------


def test_only_the_named_replica_becomes_a_candidate_at_once_after_a_hand_over() -> None:
    handed_over, older = Record(2, "c/1", SET), Record(1, "a/1", SET)
    state = run_events(follower(), on.Seen(1, older, "a"), on.Tick(5_000), on.Seen(2, handed_over, None))[0]
    assert state.role is Role.FOLLOWER
    state, effects = run_events(
        state, on.Tick(5_000 + Rules("b/1").hand_over_ms - 1), on.Seen(2, handed_over, None)
    )
    assert effects == []
    # The named replica has not begun in time, so another one may become a candidate.
    state, effects = run_events(
        state, on.Tick(5_000 + Rules("b/1").hand_over_ms), on.Seen(2, handed_over, None)
    )
    assert [type(effect) for effect in effects] == [do.Propose]


def test_no_follower_becomes_a_candidate_while_its_leader_may_create_the_holder_key_again() -> None:
    rules, led = Rules("b/1"), Record(1, "a/1", SET)
    state = run_events(follower(), on.Seen(1, led, "a"), on.Tick(5_000), on.Received("a", Ping(1, 0, 0, 2)))[
        0
    ]
    state, effects = run_events(state, on.Tick(5_000 + rules.heard_ms_max), on.Seen(1, led, None))
    assert effects == []
    _, effects = run_events(state, on.Tick(5_001 + rules.heard_ms_max), on.Seen(1, led, None))
    assert [type(effect) for effect in effects] == [do.Propose], "the leader's last PING is too old"
    # A leader that sends PINGs but does not create the key may not serve.
    late_ms = 5_000 + rules.heard_ms_max + rules.hold_ms
    state = run_events(state, on.Tick(late_ms - 1), on.Received("a", Ping(1, 0, 0, 2)))[0]
    state, effects = run_events(state, on.Seen(1, led, None))
    assert effects == []
    _, effects = run_events(state, on.Tick(late_ms), on.Seen(1, led, None))
    assert [type(effect) for effect in effects] == [do.Propose]


def test_a_follower_becomes_a_candidate_at_once_if_the_holder_of_an_old_record_is_gone() -> None:
    state = run_events(follower(), on.Seen(1, Record(1, "a/1", SET), "a"), on.Tick(5_000))[0]
    _, effects = run_events(state, on.Seen(1, Record(1, "a/1", SET), None))
    assert [type(effect) for effect in effects] == [do.Propose]
