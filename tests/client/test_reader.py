"""The two ways to read: browsing takes nothing from a group, and a commit moves the group's position."""

from timeball import Timeball


def test_browsing_takes_nothing_and_a_commit_moves_the_group(flight_ball: Timeball) -> None:
    flight_ball.create_topic("both-ways", 1)
    flight_ball.send_many([{"body": b"%d" % i} for i in range(4)], topic="both-ways")
    assert [m.body for m in flight_ball.browse("both-ways", max_messages=2)] == [b"0", b"1"]
    (first,) = flight_ball.pull("both-ways", "g", max_messages=1)
    assert first.body == b"0" and flight_ball.offsets("g", "both-ways") == {0: 0}, "leased, and not done"
    assert first.ack() and flight_ball.offsets("g", "both-ways") == {0: 1}
    assert [m.body for m in flight_ball.browse("both-ways", "g")] == [b"1", b"2", b"3"]
    flight_ball.commit("both-ways", "g", {0: 3})
    (last,) = flight_ball.pull("both-ways", "g")
    assert last.body == b"3"
    flight_ball.commit("both-ways", "g", {0: 0})
    assert [m.body for m in flight_ball.pull("both-ways", "g")] == [b"0", b"1", b"2", b"3"]
    assert not last.ack(), "a move of the group ends its leases"
