"""The read-outs of a cluster, as JSON has them."""

from __future__ import annotations

import msgspec

from timeball.monitoring.replica_figures import ReplicaGroup, ReplicaState


def test_a_group_is_json_and_back() -> None:
    gone = ReplicaState("b", "b/1", "gone", is_in_record=True)
    group = ReplicaGroup("g1", "a", 7, 2, [gone], "a hand-over to b", ["replica b is missing"])
    as_json = msgspec.json.decode(msgspec.json.encode(group))
    assert as_json["replicas"][0]["lag_rows"] is None, "not known, and not nought"
    assert msgspec.convert(as_json, ReplicaGroup) == group
