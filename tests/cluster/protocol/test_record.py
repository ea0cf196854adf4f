"""The record of a group: its form in the coordinator, its replicas and their majority."""

from __future__ import annotations

import msgspec

from timeball.cluster.protocol.replica import Record, majority, node_of


def test_a_record_is_encoded_as_json_and_decoded_unchanged() -> None:
    record = Record(3, "a/1", ("a/1", "b/1", "c/2"), 4)
    raw = msgspec.json.encode(record)
    assert raw == b'{"epoch":3,"leader":"a/1","replicas":["a/1","b/1","c/2"],"generation":4}'
    assert msgspec.json.decode(raw, type=Record) == record


def test_the_node_of_a_replica_is_the_part_before_its_incarnation() -> None:
    assert node_of("a/7") == "a"


def test_a_majority_is_more_than_half_of_the_replicas() -> None:
    replicas = ("a/1", "b/1", "c/1", "d/1")
    assert [majority(replicas[:count]) for count in (1, 2, 3, 4)] == [1, 2, 2, 3]
