"""The distance by which another replica's clock is ahead."""

from __future__ import annotations

from timeball.cluster.replica_thread import SAMPLES, ClockOffsets


def test_an_offset_assumes_that_the_clock_was_read_in_the_middle_of_the_round_trip() -> None:
    offsets = ClockOffsets()
    offsets.add("b", peer_wall_ms=1_500, round_trip_ms=20, wall_ms=1_010)
    assert offsets.ms == {"b": 500.0}


def test_the_answer_with_the_shortest_round_trip_of_the_last_samples_counts() -> None:
    offsets = ClockOffsets()
    offsets.add("b", 1_000, 2, 1_001)
    offsets.add("b", 2_000, 400, 2_390)
    assert offsets.ms == {"b": 0.0}
    for number in range(SAMPLES):
        offsets.add("b", 5_000 + number, 10, 4_005 + number)
    assert offsets.ms == {"b": 1_000.0}, "a clock that was set is noticed"
