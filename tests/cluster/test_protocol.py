"""Single steps of the replication protocol. tests/cluster/simulation.py runs all of it together."""

from __future__ import annotations

import msgspec
import pytest
from tests.cluster.simulated_disk import SEGMENT_BYTES, make_frame

from timeball.cluster.protocol import effects as do
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.effects import Effect
from timeball.cluster.protocol.following import read_frames
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


def steps(state: Replica, *events: on.Event) -> tuple[Replica, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        state, effects = step(state, event)
    return state, effects


def row(epoch: int, seq: int) -> bytes:
    position = 64 + 128 * (seq - 1)
    return make_frame(epoch, seq, position, position, "M", seq).raw


def follower(epoch: int = 1) -> Replica:
    """A follower with one row of this epoch, which it has synced and acknowledged."""
    state = Replica(Rules("b/1"))
    return steps(
        state,
        on.Received("a", Hello(epoch, "g1", "a/1")),
        on.Received("a", Cut(epoch, *BEGINNING)),
        on.Received("a", Begin(epoch, 1, SEGMENT_BYTES, 1, HEADER)),
        on.Received("a", Data(epoch, 1, 64, 2, 0, row(epoch, 1))),
        on.Flush(),
    )[0]


def leader() -> Replica:
    """A leader of epoch 1 whose EPOCH row is committed by b."""
    state = Replica(Rules("a/1"), lease_until_ms=10_000)
    state, wanted = steps(state, on.Seen(1, Record(0, "", SET), None))
    assert wanted == [do.Propose(1, Record(1, "a/1", SET), do.Holder.TAKE)] and state.role is Role.CANDIDATE
    state, wanted = steps(state, on.Proposed(2, Record(1, "a/1", SET), True))
    assert wanted[0] == do.KeepPromise(1, "a/1", MEMBERS) and state.role is Role.SEALING
    state, wanted = steps(state, on.Received("b", Promise(1, "b/1", (), generation=1)))
    assert wanted == [do.Send("b", Cut(1, *BEGINNING)), do.AppendEpoch(1)] and state.role is Role.SYNCING
    begin = Begin(1, 1, SEGMENT_BYTES, 1, HEADER)
    state, wanted = steps(state, on.Appended(1, 64, 2, row(1, 1), 0, begin))
    assert [type(effect) for effect in wanted] == [do.Send, do.Send, do.BeginSegment, do.Write, do.Sync]
    state, wanted = steps(state, on.Received("b", Ack(1, 1, 192, 2)))
    assert wanted == [do.Commit(Position(1, 192, 2)), do.Serve(1)] and state.role is Role.LEADER
    return state


def test_a_promise_is_on_the_disk_before_it_is_told() -> None:
    _, wanted = steps(Replica(Rules("b/1")), on.Received("a", Hello(4, "g1", "a/1")))
    assert wanted == [do.KeepPromise(4, "a/1", Members()), do.Send("a", Promise(4, "b/1", ()))]


def test_an_epoch_is_promised_to_one_replica() -> None:
    """etcd names one leader for each epoch, unless it was restored from an old copy."""
    state, _ = steps(Replica(Rules("b/1")), on.Received("a", Hello(4, "g1", "a/1")))
    assert steps(state, on.Received("c", Hello(4, "g1", "c/1"))) == (state, [do.Send("c", Refuse(4))])
    assert steps(leader(), on.Received("c", Hello(1, "g1", "c/1")))[1] == [do.Send("c", Refuse(1))]
    # The same replica may connect again.
    assert steps(state, on.Received("a", Hello(4, "g1", "a/1")))[1] == [do.Send("a", Promise(4, "b/1", ()))]


def test_a_leader_that_went_on_without_its_lease_holds_the_group_again() -> None:
    record = Record(1, "a/1", SET)
    state = leader()
    assert steps(state, on.Seen(2, record, "a")) == (state, [])
    assert steps(state, on.Seen(2, record, None)) == (state, [do.Hold()])
    assert steps(state, on.Seen(1, record, None)) == (state, []), "read before it held the group"
    _, wanted = steps(state, on.HandOver("b"), on.Seen(2, record, None))
    assert do.Hold() not in wanted, "it gives the group up"


def test_a_lead_is_confirmed_by_answers_to_a_later_ping() -> None:
    state, _ = steps(leader(), on.Tick(1_000))
    assert confirmed_ms(state) == 0
    state, _ = steps(state, on.Received("b", Pong(1, 0, 900), 1_010), on.Received("b", Ack(1, 1, 192, 2)))
    assert confirmed_ms(state) == 900, "the time of the PING, and no later answer"
    state, _ = steps(state, on.Tick(2_000), on.Received("c", Pong(1, 0, 2_000), 2_010))
    assert confirmed_ms(state) == 900, "c has not promised"
    assert state.lead
    with_former = msgspec.structs.replace(state.lead, former=("a/1", "c/1", "d/1"))
    both = msgspec.structs.replace(state, lead=with_former)
    assert confirmed_ms(both) == 0, "a majority of each set"
    state, _ = steps(state, on.Disconnected("b", True))
    assert confirmed_ms(state) == 0


def test_an_acknowledgement_follows_the_sync() -> None:
    state = follower()
    _, wanted = steps(state, on.Received("a", Data(1, 1, 192, 3, 2, row(1, 2))), on.Flush())
    assert wanted == [do.Sync(), do.Send("a", Ack(1, 1, 320, 3)), do.Apply(2)]


def test_a_lower_epoch_is_refused_whatever_it_sends() -> None:
    state, _ = steps(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    for message in (Data(1, 1, 192, 3, 2, row(1, 2)), Hello(1, "g1", "a/1"), Cut(1, *BEGINNING)):
        assert step(state, on.Received("a", message)) == (state, [do.Send("a", Refuse(2))])


@pytest.mark.parametrize(
    "message",
    [
        Data(1, 1, 320, 4, 0, row(1, 3)),  # a hole
        Data(1, 1, 192, 3, 0, row(1, 2)[:-1] + b"x"),  # another byte
        Data(1, 1, 192, 3, 0, row(2, 2)),  # a frame from the future
        Begin(1, 3, SEGMENT_BYTES, 2, HEADER),
        Cut(1, 1, 960, 8),
    ],
)
def test_a_follower_writes_nothing_but_the_next_whole_frame(message: Data) -> None:
    with pytest.raises(PeerError):
        step(follower(), on.Received("a", message))


def test_frames_of_a_lost_epoch_are_cut() -> None:
    state, _ = steps(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    state, wanted = steps(state, on.Received("c", Cut(2, *BEGINNING)))
    assert wanted == [do.CutLog(BEGINNING), do.Send("c", Ack(2, *BEGINNING))] and state.log == Log()


def test_frames_tell_their_epochs_and_ends() -> None:
    frames = read_frames(row(1, 1) + row(3, 2), 1, 64, 1)
    assert frames == [(1, Position(1, 192, 2)), (3, Position(1, 320, 3))]


def test_one_that_knows_more_is_asked_before_the_epoch_is_opened() -> None:
    state = Replica(Rules("a/1"))
    state, _ = steps(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, wanted = steps(state, on.Received("b", Promise(2, "b/1", (EpochEnd(1, 1, 192, 2),))))
    assert [type(effect) for effect in wanted] == [do.Send] and state.role is Role.SEALING


def test_a_learner_s_promise_does_not_seal() -> None:
    state = Replica(Rules("a/1"))
    state, _ = steps(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, wanted = steps(state, on.Received("b", Promise(2, "b/2", ())))
    assert wanted == [] and state.role is Role.SEALING


def test_no_replica_leads_twice_in_an_epoch() -> None:
    state = Replica(Rules("a/1"), promised=2)
    state, wanted = steps(state, on.Seen(5, Record(2, "a/1", SET), "a"))
    assert wanted == [] and state.role is Role.FOLLOWER


def test_a_sealing_replica_gives_up_when_a_later_epoch_is_in_the_record() -> None:
    state = Replica(Rules("a/1"))
    state, _ = steps(
        state, on.Seen(1, Record(1, "c/1", SET), None), on.Proposed(2, Record(2, "a/1", SET), True)
    )
    state, wanted = steps(state, on.Seen(3, Record(3, "b/1", SET), "b"))
    assert wanted == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER


def test_a_candidate_that_gives_up_releases_the_group_before_it_syncs() -> None:
    state = Replica(Rules("a/1"))
    state, _ = steps(
        state,
        on.Seen(1, Record(1, "c/1", SET), None),
        on.Proposed(2, Record(2, "a/1", SET), True),
        on.Received("b", Promise(2, "b/1", (EpochEnd(1, 1, 320, 3),))),
        on.Received("b", Begin(2, 1, SEGMENT_BYTES, 1, HEADER)),
        on.Received("b", Bytes(2, 1, 64, 2, row(1, 1))),
    )
    assert state.unsynced_bytes
    _, wanted = steps(state, on.Disconnected("b", True))
    assert wanted == [do.HangUp(), do.Resign(), do.Sync()], "its disk may hang"


@pytest.mark.parametrize(
    "event",
    [
        on.Received("b", Refuse(2)),
        on.Received("c", Hello(2, "g1", "c/1")),
        on.Seen(3, Record(2, "b/1", SET), "b"),
        on.Tick(20_000),
        on.Appended(1, 192, 3, row(1, 2), 20_000),
    ],
)
def test_a_leader_that_is_overtaken_or_alone_stops(event: on.Event) -> None:
    state, wanted = steps(leader(), event)
    assert isinstance(wanted[0], do.StopServing) and state.role is Role.STOPPED
    assert step(state, on.Received("b", Ack(1, 1, 320, 3))) == (state, [])


def test_a_new_incarnation_joins_when_it_has_all_and_both_sets_have_counted_it() -> None:
    state, wanted = steps(leader(), on.Received("c", Promise(1, "c/2", ())))
    assert wanted == [do.Send("c", Cut(1, *BEGINNING))]
    state, wanted = steps(state, on.Received("c", Ack(1, *BEGINNING)))
    assert wanted == [do.Ship("c", 1, BEGINNING)]
    state, _ = steps(state, on.Shipped("c", Position(1, 192, 2)))
    state, wanted = steps(state, on.Received("c", Ack(1, 1, 192, 2)))
    assert wanted == [], "its data files are not there yet"
    state, wanted = steps(state, on.Received("c", Complete(1, 1)))
    assert wanted == []
    state, wanted = steps(state, on.Received("c", Complete(1, 2)))
    new = Record(1, "a/1", ("a/1", "b/1", "c/2"), 2, SET)
    assert wanted == [do.Propose(2, new, do.Holder.KEEP)]
    state, wanted = steps(state, on.Proposed(3, new, True))
    assert state.lead and state.lead.replicas == new.replicas and not state.lead.joining
    hello = Hello(1, "cluster/g1", "a/1", members=new.members, is_elected=True)
    assert wanted == [do.KeepPromise(1, "a/1", new.members), do.Send("b", hello), do.Send("c", hello)]
    # The change ends when a majority of the former set has stored the new one.
    ends = (EpochEnd(1, 1, 192, 2),)
    state, wanted = steps(state, on.Received("c", Promise(1, "c/2", ends, generation=2)))
    assert wanted == [do.Send("c", Cut(1, 1, 192, 2))]
    state, wanted = steps(state, on.Received("b", Promise(1, "b/1", ends, generation=2)))
    end_of_change = Record(1, "a/1", new.replicas, 2)
    assert wanted[1:] == [do.Propose(3, end_of_change, do.Holder.KEEP)]
    state, wanted = steps(state, on.Proposed(4, end_of_change, True))
    assert wanted == [] and state.lead and not state.lead.former


def test_a_commit_needs_the_former_set_until_the_change_has_ended() -> None:
    """The new set may commit alone only when a majority of the former one would refuse to elect a leader."""
    record = Record(1, "a/1", ("a/1", "d/1", "e/1"), 2, SET)
    state, _ = steps(
        leader(),
        on.Seen(3, record, "a"),
        on.Received("d", Promise(1, "d/1", (), generation=2)),
        on.Received("d", Ack(1, *BEGINNING)),
        on.Appended(1, 192, 3, row(1, 2), 0),
        on.Shipped("d", Position(1, 320, 3)),
    )
    state, wanted = steps(state, on.Received("d", Ack(1, 1, 320, 3)))
    assert wanted == []
    state, wanted = steps(state, on.Received("b", Ack(1, 1, 320, 3)))
    assert wanted == [do.Commit(Position(1, 320, 3))]


# ---- etcd restored from a copy that is older than the last change of the set -------------------------------------


def of_newer_set() -> Replica:
    """A follower in epoch 1 that knows the set after the one in a restored record."""
    return steps(Replica(Rules("b/1")), on.Received("a", Hello(1, "g1", "a/1", members=NEWER)))[0]


def test_a_replica_that_knows_a_newer_set_elects_nobody_by_an_older_one() -> None:
    state, candidate = of_newer_set(), Hello(2, "g1", "c/1", members=MEMBERS)
    assert state.members == NEWER
    assert steps(state, on.Received("c", candidate)) == (state, [do.Send("c", Refuse(2, 2))])
    assert steps(state, on.Seen(1, Record(1, "a/1", SET), None))[1] == [], "it becomes no candidate"
    assert steps(state, on.Seen(1, Record(2, "b/1", SET), None))[1] == [], "nor by a hand-over"
    # One that is elected by a majority of its set: then the change to the newer set had not ended.
    elected = msgspec.structs.replace(candidate, is_elected=True)
    state, wanted = steps(state, on.Received("c", elected))
    assert wanted[0] == do.KeepPromise(2, "c/1", MEMBERS) and state.members == MEMBERS


def test_a_candidate_of_an_older_set_deposes_no_leader() -> None:
    state, _ = steps(leader(), on.Seen(3, Record(1, "a/1", NEWER.replicas, 2), "a"))
    candidate = Hello(2, "g1", "c/1", members=MEMBERS)
    assert steps(state, on.Received("c", candidate)) == (state, [do.Send("c", Refuse(2, 2))])
    assert steps(state, on.Received("d", Refuse(1, 3))) == (state, []), "a majority has elected it"


def test_a_candidate_gives_up_when_a_majority_knows_a_newer_set() -> None:
    state = Replica(Rules("c/1"))
    state, _ = steps(
        state, on.Seen(1, Record(1, "a/1", SET), None), on.Proposed(2, Record(2, "c/1", SET), True),
        on.Received("a", Refuse(2, 2)),
    )  # fmt: skip
    assert state.role is Role.SEALING, "b may not know it"
    state, wanted = steps(state, on.Received("b", Refuse(2, 2)))
    assert wanted == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER
    assert steps(state, on.Seen(2, Record(2, "c/1", SET), None))[1] == [], "once is enough"
    renewed = Record(2, "", NEWER.replicas, 3)
    assert steps(state, on.Seen(3, renewed, None))[1] == [], "it is not in the last set"


def test_a_leader_says_hello_again_to_one_that_did_not_know_its_election() -> None:
    state = Replica(Rules("c/1"))
    _, wanted = steps(
        state, on.Seen(1, Record(1, "a/1", SET), None), on.Proposed(2, Record(2, "c/1", SET), True),
        on.Received("a", Refuse(2, 2)), on.Received("b", Promise(2, "b/1", (), generation=1)),
    )  # fmt: skip
    hello = Hello(2, "cluster/g1", "c/1", members=MEMBERS, is_elected=True)
    assert do.Send("a", hello) in wanted


# ---- waiting before an election ----------------------------------------------------------------------------------


def test_a_replica_waits_when_the_coordinator_is_slow_or_epochs_are_short() -> None:
    record = Record(1, "a/1", SET)
    state = steps(follower(), on.Tick(5_000), on.Seen(1, record, "a"))[0]
    slow, wanted = steps(state, on.Seen(1, record, None, 1_000))
    assert wanted == [], "it waits for 2 to 4 s"
    assert steps(slow, on.Tick(6_999), on.Seen(1, record, None, 1_000))[1] == []
    assert steps(slow, on.Tick(9_000), on.Seen(1, record, None, 1_000))[1] != []
    assert steps(slow, on.Seen(1, record, None, 10))[1] != [], "the coordinator is quick again"
    for epoch in (2, 3, 4):
        state = steps(state, on.Tick(5_000 + epoch), on.Seen(epoch, Record(epoch, "c/1", SET), "c"))[0]
    newest = Record(4, "c/1", SET)
    short, wanted = steps(state, on.Tick(5_600), on.Seen(4, newest, None))
    assert wanted == [], "the third short epoch in a row"
    assert steps(short, on.Tick(5_900), on.Seen(4, newest, None))[1] != []
    # After a long epoch, a candidate waits for nothing.
    steady = steps(state, on.Tick(60_000), on.Seen(5, Record(5, "a/1", SET), "a"), on.Tick(60_600))[0]
    assert steps(steady, on.Seen(5, Record(5, "a/1", SET), None))[1] != []


def test_a_leader_that_has_served_nothing_becomes_a_follower() -> None:
    state = Replica(Rules("a/1"), lease_until_ms=10_000)
    state, _ = steps(
        state, on.Seen(1, Record(0, "", SET), None), on.Proposed(2, Record(1, "a/1", SET), True),
        on.Received("b", Promise(1, "b/1", (), generation=1)),
        on.Appended(1, 64, 2, row(1, 1), 0, Begin(1, 1, SEGMENT_BYTES, 1, HEADER)),
    )  # fmt: skip
    assert state.role is Role.SYNCING
    later, wanted = steps(state, on.Received("c", Hello(2, "g1", "c/1", members=MEMBERS)))
    assert wanted[:2] == [do.HangUp(), do.Resign()] and later.role is Role.FOLLOWER
    assert isinstance(wanted[-1], do.Send) and isinstance(wanted[-1].message, Promise)
    state, wanted = steps(state, on.Tick(20_000))
    assert wanted == [do.HangUp(), do.Resign()] and state.role is Role.FOLLOWER


def test_a_hand_over_swaps_the_record_when_the_successor_has_all() -> None:
    state, wanted = steps(leader(), on.HandOver("b"))
    assert wanted == [do.Propose(2, Record(2, "b/1", SET), do.Holder.RELEASE)]
    state, wanted = steps(state, on.Proposed(3, Record(2, "b/1", SET), True))
    assert isinstance(wanted[0], do.StopServing)
    state, wanted = steps(follower(), on.Seen(3, Record(2, "b/1", SET), None))
    assert wanted[0] == do.KeepPromise(2, "b/1", MEMBERS) and state.role is Role.SEALING


def test_messages_about_files_of_a_lower_epoch_are_refused() -> None:
    file = File(1, 0, 10, "bucket=2026-11-24/0.parquet", 0, b"")
    state = follower()
    assert step(state, on.Received("a", file)) == (state, [do.PassOn("a", file)])
    later, _ = steps(state, on.Received("c", Hello(2, "g1", "c/1")))
    assert step(later, on.Received("a", file)) == (later, [do.Send("a", Refuse(2))])
    have = Have(1, 10, "bucket=2026-11-24/0.parquet")
    assert do.PassOn("b", have) in step(leader(), on.Received("b", have))[1]


def test_a_late_answer_about_a_file_stops_no_leader() -> None:
    """A follower that answers a WANT may lead the next epoch by then: it sends the answer as the leader."""
    late = File(1, 0, 10, "bucket=2026-11-24/0.parquet", 0, b"0123456789")
    state, _ = steps(follower(), on.Received("c", Hello(2, "g1", "c/1")))
    assert step(state, on.Received("c", late)) == (state, [])


def test_a_candidate_that_lacks_what_the_other_has_let_go_begins_anew() -> None:
    state, _ = steps(
        follower(),
        on.Received("a", Ping(1, 0, 0, 2)),
        on.Seen(1, Record(1, "c/1", SET), None),
        on.Proposed(2, Record(2, "b/1", SET), True),
    )
    ends = (EpochEnd(1, 9, 192, 90),)
    fetches, wanted = steps(state, on.Received("a", Promise(2, "a/1", ends, first_seq=2)))
    assert wanted[-1] == do.Send("a", Fetch(2, 1, 192, 2)) and fetches.role is Role.SEALING
    anew, wanted = steps(state, on.Received("a", Promise(2, "a/1", ends, first_seq=3)))
    assert do.Resign() in wanted and isinstance(wanted[-1], do.StopServing) and anew.role is Role.STOPPED


# ---- retention, and the length of a batch ----------------------------------------------------------------------


def test_a_follower_that_lacks_what_was_dropped_begins_anew() -> None:
    state = steps(leader(), on.Dropped(Position(4, 64, 9)))[0]
    _, effects = steps(state, on.Received("c", Promise(1, "c/1", (EpochEnd(1, 1, 192, 2),))))
    assert effects == [do.Send("c", Cut(1, *BEGINNING))]
    # One that ends just before what is kept goes on from there.
    state = steps(leader(), on.Dropped(Position(2, 64, 2)))[0]
    _, effects = steps(state, on.Received("c", Promise(1, "c/1", (EpochEnd(1, 1, 192, 2),))))
    assert effects == [do.Send("c", Cut(1, 1, 192, 2))]


def test_a_follower_from_which_segments_are_dropped_as_it_catches_up_begins_anew() -> None:
    state, effects = steps(
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
    state, effects = steps(state, on.Received("c", Ack(1, *BEGINNING)))
    assert effects == [do.Ship("c", 1, BEGINNING)]


def test_a_follower_that_has_applied_rows_ends_its_process_before_it_begins_anew() -> None:
    state, effects = steps(follower(), on.Received("a", Ping(1, 0, 0, 2)))
    assert do.Apply(2) in effects
    state, effects = steps(
        state, on.Received("a", Hello(1, "g1", "a/1")), on.Received("a", Cut(1, *BEGINNING))
    )
    assert state.role is Role.STOPPED and isinstance(effects[-1], do.StopServing)
    assert not any(isinstance(effect, do.CutLog) for effect in effects)


def test_a_message_that_would_make_a_batch_too_long_is_written_behind_a_sync() -> None:
    state = steps(follower())[0]
    state = msgspec.structs.replace(state, rules=Rules("b/1", batch_bytes=300))
    frames = [row(1, seq) for seq in range(2, 6)]
    state, effects = steps(state, on.Received("a", Data(1, 1, 192, 4, 2, frames[0] + frames[1])))
    assert [type(effect) for effect in effects] == [do.Write]
    _, effects = steps(state, on.Received("a", Data(1, 1, 448, 6, 2, frames[2] + frames[3])))
    assert [type(effect) for effect in effects] == [do.Sync, do.Send, do.Apply, do.Write]


# ---- hand-over --------------------------------------------------------------------------------------------------


def test_only_the_named_replica_becomes_a_candidate_at_once_after_a_hand_over() -> None:
    handed, older = Record(2, "c/1", SET), Record(1, "a/1", SET)
    state = steps(follower(), on.Seen(1, older, "a"), on.Tick(5_000), on.Seen(2, handed, None))[0]
    assert state.role is Role.FOLLOWER
    state, effects = steps(state, on.Tick(5_000 + Rules("b/1").hand_over_ms - 1), on.Seen(2, handed, None))
    assert effects == []
    # It has not come: another one may.
    state, effects = steps(state, on.Tick(5_000 + Rules("b/1").hand_over_ms), on.Seen(2, handed, None))
    assert [type(effect) for effect in effects] == [do.Propose]


def test_a_leader_that_is_heard_may_create_the_holder_s_key_again() -> None:
    rules, led = Rules("b/1"), Record(1, "a/1", SET)
    state = steps(follower(), on.Seen(1, led, "a"), on.Tick(5_000), on.Received("a", Ping(1, 0, 0, 2)))[0]
    state, effects = steps(state, on.Tick(5_000 + rules.heard_ms_max), on.Seen(1, led, None))
    assert effects == []
    _, effects = steps(state, on.Tick(5_001 + rules.heard_ms_max), on.Seen(1, led, None))
    assert [type(effect) for effect in effects] == [do.Propose], "it is not heard any more"
    # It sends PINGs, but does not create the key: it may not serve.
    late_ms = 5_000 + rules.heard_ms_max + rules.hold_ms
    state = steps(state, on.Tick(late_ms - 1), on.Received("a", Ping(1, 0, 0, 2)))[0]
    state, effects = steps(state, on.Seen(1, led, None))
    assert effects == []
    _, effects = steps(state, on.Tick(late_ms), on.Seen(1, led, None))
    assert [type(effect) for effect in effects] == [do.Propose]


def test_a_holder_that_is_gone_is_followed_at_once_when_the_record_is_old() -> None:
    state = steps(follower(), on.Seen(1, Record(1, "a/1", SET), "a"), on.Tick(5_000))[0]
    _, effects = steps(state, on.Seen(1, Record(1, "a/1", SET), None))
    assert [type(effect) for effect in effects] == [do.Propose]
