from __future__ import annotations

import msgspec

from timeball.cluster.protocol.replica import Record, majority, node_of


def test_a_record_is_json_and_comes_back() -> None:
    record = Record(3, "a/1", ("a/1", "b/1", "c/2"), 4)
    raw = msgspec.json.encode(record)
    assert raw == b'{"epoch":3,"leader":"a/1","replicas":["a/1","b/1","c/2"],"generation":4}'
    assert msgspec.json.decode(raw, type=Record) == record


def test_a_replica_is_a_node_and_an_incarnation() -> None:
    assert node_of("a/7") == "a"
    assert [majority(("a/1", "b/1", "c/1", "d/1")[:n]) for n in (1, 2, 3, 4)] == [1, 2, 2, 3]
