"""The figures of a subscription: each request counts once, by its outcome."""

from __future__ import annotations

import msgspec

from timeball.io.clock import ManualClock
from timeball.monitoring.figures import PeerFigures, PushFigures, ReplicaFigures, ReplicaGroup, ReplicaState


def test_each_request_is_counted_once_by_its_outcome() -> None:
    figures = PushFigures(ManualClock())
    for outcome in ("delivered", "timeout", "delivered"):
        figures.add(outcome, 3_000_000)  # type: ignore[arg-type]
    assert figures.outcomes == {"delivered": 2, "timeout": 1}
    assert (figures.delivered, figures.failed) == (2, 1)
    assert sum(figures.durations.counts) == 3 and figures.durations.sum_ns == 9_000_000


def test_a_decoder_ignores_fields_of_a_newer_version() -> None:
    figures = ReplicaFigures("g1", "a/1", "leader", "a", log_seq=7, peers={"b": PeerFigures("b/1", 5, -0.5)})
    fields = msgspec.json.decode(msgspec.json.encode(figures))
    fields["mood"] = fields["peers"]["b"]["mood"] = "good"
    assert msgspec.json.decode(msgspec.json.encode(fields), type=ReplicaFigures) == figures


def test_a_group_survives_json_and_unknown_figures_are_null() -> None:
    gone = ReplicaState("b", "b/1", "gone", is_in_record=True)
    group = ReplicaGroup("g1", "a", 7, 2, [gone], "a hand-over to b", ["replica b is missing"])
    as_json = msgspec.json.decode(msgspec.json.encode(group))
    assert as_json["replicas"][0]["lag_rows"] is None, "unknown, and not 0"
    assert msgspec.convert(as_json, ReplicaGroup) == group
