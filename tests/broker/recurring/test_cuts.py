"""After a power cut at any frame that ends an occurrence, each time of the schedule is still delivered once.

A frame without the successor would end the schedule for good.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.recurring.schedule_lives import EVERY_MS, LIFE, SETTINGS, Step, compact, faults_after, live
from tests.crash_files import Survival
from tests.rounds import rounds

from timeball.broker.accepting.delivery import Delivery
from timeball.broker.recurring.successors import Continuation

SEED = int(os.environ.get("CUT_SEED", "1"))

# A release from the log's tail, a cancel, a move, a pause and a resume, with nothing else in between.
SHORT: list[Step] = [
    lambda w: w.start(),
    lambda w: w.put(),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.cancel_next(),
    lambda w: w.move_next(EVERY_MS // 2),
    lambda w: w.pause(),
    lambda w: w.resume(),
    lambda w: w.advance(2 * EVERY_MS),
]


def images(call: int) -> list[tuple[int, Survival]]:
    """List the disks to check after a cut at this call, as (seed, survival)."""
    return [(0, "nothing"), (0, "everything"), (SEED * 1_000_003 + call, "random")]


def faults(settings: dict[str, Any], steps: list[Step], calls: Iterable[int]) -> list[str]:
    """Cut the power at each of these calls, and list the faults."""
    fault_texts = []
    for call in calls:
        cut = live(settings, call, steps)
        for seed, survival in images(call):
            new_faults = faults_after(cut, cut.files.crash(seed, survival))
            if new_faults:
                fault_texts.append(f"{cut.at}, seed={seed} survival={survival!r}: {new_faults[:5]}")
    return fault_texts


@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_life_without_a_cut_delivers_each_time_once(strategy: str) -> None:
    cut = live(SETTINGS[strategy])
    assert faults_after(cut, cut.files.crash(survival="nothing")) == []


def test_after_any_power_cut_around_each_end_of_an_occurrence_each_time_is_delivered_once() -> None:
    settings = SETTINGS["hour_log"]
    calls = live(settings, steps=SHORT).files.calls
    fault_texts = faults(settings, SHORT, range(1, calls + 1))
    assert not fault_texts, "\n".join(fault_texts)


@pytest.mark.parametrize("strategy", SETTINGS)
def test_after_some_power_cuts_of_a_whole_life_each_time_is_delivered_once(strategy: str) -> None:
    settings = SETTINGS[strategy]
    calls = live(settings).files.calls
    rng = np.random.default_rng(SEED)
    chosen = sorted(rng.choice(np.arange(1, calls + 1), 8, replace=False).tolist())
    fault_texts = faults(settings, LIFE, chosen)
    assert not fault_texts, "\n".join(fault_texts)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_after_any_power_cut_of_a_whole_life_each_time_is_delivered_once(strategy: str) -> None:
    settings, step = SETTINGS[strategy], 4 * rounds(4, 1)
    fault_texts = faults(settings, LIFE, range(1 + SEED % step, live(settings).files.calls + 1, step))
    assert not fault_texts, "\n".join(fault_texts)


# Releases only: from the log's tail, from the table, and after a start.
RELEASES: list[Step] = [
    lambda w: w.start(),
    lambda w: w.put(),
    lambda w: w.advance(EVERY_MS),
    lambda w: compact(w),
    lambda w: w.advance(EVERY_MS),
    lambda w: w.restart(),
    lambda w: w.advance(EVERY_MS),
]


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
def test_after_a_kill_or_power_cut_around_a_release_each_time_is_delivered_once() -> None:
    """After a kill, the disk has everything that was written. After a power cut, it has a random part."""
    calls = {name: live(settings, steps=RELEASES).files.calls for name, settings in SETTINGS.items()}
    cuts = [(name, call) for name in SETTINGS for call in range(1, calls[name] + 1)]
    lives, fault_texts = rounds(30, 500), list[str]()
    stride = max(1, len(cuts) // lives)  # a siege cuts at each call several times, other runs at some calls
    for index in range(lives):
        name, call = cuts[(SEED + index * stride) % len(cuts)]
        cut = live(SETTINGS[name], call, RELEASES)
        for survival in ("everything", "random"):
            new_faults = faults_after(cut, cut.files.crash(SEED + index, survival))
            if new_faults:
                fault_texts.append(f"{name}, {cut.at}, seed={SEED + index} {survival!r}: {new_faults[:5]}")
    assert not fault_texts, "\n".join(fault_texts)


def test_a_successor_in_a_frame_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if the successor is not in the frame of the release, a power cut ends the schedule."""
    build, release = Continuation.rows, Delivery._release_or_cancel
    separate_rows: list[pa.RecordBatch] = []

    def build_apart(continuation: Continuation, first_seq: int, positions: Any = None) -> pa.RecordBatch:
        separate_rows.append(build(continuation, first_seq, positions))
        return separate_rows[-1].slice(0, 0)

    def release_apart(self: Delivery, scheduled_rows: pa.RecordBatch, now_ms: int, *rest: Any) -> Any:
        """Append the releases, and the rows of the schedules only when these are durable."""
        schedule = self.__dict__.setdefault("_schedule", self._add_scheduled)

        def append_apart(_: pa.RecordBatch, first_seq: int) -> None:
            rows = separate_rows.pop()
            self._writer.append(rows, on_durable=lambda: schedule(rows, first_seq))

        self._add_scheduled = append_apart
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Continuation, "rows", build_apart)
            return release(self, scheduled_rows, now_ms, *rest)

    monkeypatch.setattr(Delivery, "_release_or_cancel", release_apart)
    settings, steps = SETTINGS["hour_log"], SHORT[:4]
    calls = live(settings, steps=steps).files.calls
    assert any("lost" in text for text in faults(settings, steps, range(1, calls + 1)))
