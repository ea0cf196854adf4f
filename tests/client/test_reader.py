"""Browsing beside consuming: browsing leases nothing, and a commit moves the group's offsets."""

import pytest

from timeball import NotFound, OutOfRange, RequestError, Timeball


def test_browsing_leases_nothing_and_a_commit_moves_the_offsets_of_the_group(columns: Timeball) -> None:
    columns.create_topic("both-ways", 1)
    columns.send_many([{"body": b"%d" % i} for i in range(4)], topic="both-ways")
    assert [message.body for message in columns.browse("both-ways", max_messages=2)] == [b"0", b"1"]
    (first,) = columns.pull("both-ways", "g", max_messages=1)
    assert first.body == b"0" and columns.offsets("g", "both-ways") == {0: 0}, "leased, and not acknowledged"
    assert first.ack() and columns.offsets("g", "both-ways") == {0: 1}
    assert [message.body for message in columns.browse("both-ways", "g")] == [b"1", b"2", b"3"]
    columns.commit("both-ways", "g", {0: 3})
    (last,) = columns.pull("both-ways", "g")
    assert last.body == b"3"
    columns.commit("both-ways", "g", {0: 0})
    assert [message.body for message in columns.pull("both-ways", "g")] == [b"0", b"1", b"2", b"3"]
    assert not last.ack(), "a commit of other offsets ends the leases of the group"


def test_committed_offsets_are_read_and_wrong_ones_refused(ball: Timeball) -> None:
    ball.create_topic("positions", 1)
    ball.send_many([{"body": "a"}, {"body": "b"}], topic="positions")
    assert (ball.queues("positions")[0].min, ball.queues("positions")[0].max) == (0, 2)
    assert ball.offsets("positioned", "positions") == {}
    ball.commit("positions", "positioned", {0: 1})
    assert ball.offsets("positioned", "positions") == {0: 1}
    with pytest.raises(OutOfRange):
        ball.commit("positions", "positioned", {0: 9})
    with pytest.raises(NotFound):
        ball.queues("no-positions")


def test_methods_for_columns_are_refused_without_an_address_of_flight(ball: Timeball) -> None:
    for call in (
        lambda: ball.browse("t"),
        lambda: ball.browse_batch("t"),
        lambda: ball.commit("t", "g"),
        lambda: ball.read_log(0, 1),
        lambda: ball.read_queue("t", 0, 0, 1),
        lambda: ball.reserve(1),
        lambda: ball.compact(),
    ):
        with pytest.raises(RequestError, match="only over Flight"):
            call()
