"""The figures of a replica as nodes tell them to each other."""

from __future__ import annotations

import msgspec

from timeball.monitoring.replica_figures import PeerFigures, ReplicaFigures


def test_fields_of_a_newer_version_are_passed_over() -> None:
    figures = ReplicaFigures("g1", "a/1", "leader", "a", log_seq=7, peers={"b": PeerFigures("b/1", 5, -0.5)})
    told = msgspec.json.decode(msgspec.json.encode(figures))
    told["mood"] = told["peers"]["b"]["mood"] = "good"
    assert msgspec.json.decode(msgspec.json.encode(told), type=ReplicaFigures) == figures
