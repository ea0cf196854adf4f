"""Cancels, recalls and reschedules near the due time, over real connections to a real node.

A thousand scheduled messages become due, a few of them each few milliseconds. Several clients of each protocol cancel
and reschedule them around their due times. Whatever the outcomes, the responses, the log and the delivered messages
must agree. The controls below show that the recorder reports each contradiction, also those of a scheduler that both
cancels and hands out a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node
from tests.races import COLUMNS, KINDS, Recorder

from timeball import Timeball
from timeball.broker.revoking.cancel import encode_handle
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.model.answers import Verdict
from timeball.model.message import Int64Array, Kind
from timeball.schedule.scheduler import Scheduler

TOPIC = "races"
AHEAD_MS, SPREAD_MS, MOVED_MS = 300, 600, 350
CLIENTS = 3  # of each protocol
ROUND, ROUNDS_MIN, ROUNDS_MAX = 250, 4, 16

Act = Callable[[str, int], None]


class Race:
    """One node, its clients, and the recorder of their responses."""

    def __init__(self, node: RunningNode, seed: int) -> None:
        self.node, self.recorder, self.rng = node, Recorder(), np.random.default_rng(seed)
        self._nap = threading.Event()
        # Calls begin earlier than planned by the median lateness of the calls of earlier rounds.
        self._lead_ms = 0
        self._late_ms: list[int] = []  # of the calls of this round

    def now_ms(self) -> int:
        return self.node.broker.clock.now_ms()

    def cancel(self, ball: Timeball, key: str, due_ms: int) -> None:
        """Cancel a message over HTTP, and record the answer."""
        with self.recorder.call(key) as call:
            verdict = ball.cancel(key)
            call.told(verdict.verdict, verdict.seq, verdict.at_ms)

    def move(self, ball: Timeball, key: str, due_ms: int) -> None:
        """Reschedule a message over HTTP, and record the answer."""
        with self.recorder.call(key) as call:
            verdict: Verdict = ball.reschedule(key, at=due_ms + MOVED_MS)
            call.told(verdict.verdict, verdict.seq, verdict.at_ms, verdict.due_ms)

    def recall(self, wire: Wire, key: str, due_ms: int) -> None:
        """Recall a message over remoting, and record the answer."""
        handle = encode_handle(TOPIC, "timeball", due_ms, key)
        with self.recorder.call(key) as call:
            response = wire.ask(
                RequestCode.RECALL_MESSAGE, producerGroup="p", topic=TOPIC, recallHandle=handle
            )
            late, _, at_ms = str(response.remark).rpartition("delivered at ")
            call.told("recalled" if response.code == 0 else "released" if late else str(response.remark),
                      at_ms=int(at_ms) if late else None)  # fmt: skip

    def round(self, number: int) -> None:
        """Send scheduled messages and cancel, recall or reschedule each two or three times near its due time.

        Each is also cancelled or recalled near the due time to which it would have been rescheduled.
        """
        keys = [f"{number}-{i}" for i in range(ROUND)]
        due_ms = self.now_ms() + AHEAD_MS + np.sort(self.rng.integers(0, SPREAD_MS, ROUND))
        with self.node.client() as ball:
            rows = pa.table({"unique_key": keys, "due_ms": due_ms, "body": [b"x"] * ROUND})
            first_seq, _ = ball.send_many(rows, topic=TOPIC, batch_rows=ROUND).ranges[0]
        self.recorder.first_seq |= {key: first_seq + i for i, key in enumerate(keys)}
        plans: list[list[tuple[int, int, str, int]]] = [[] for _ in range(2 * CLIENTS)]
        for key, due in zip(keys, due_ms.tolist(), strict=True):
            for client in self.rng.choice(2 * CLIENTS, self.rng.integers(2, 4), replace=False).tolist():
                action = "recall" if client >= CLIENTS else ("cancel", "move")[int(self.rng.integers(2))]
                plans[client].append((due + int(self.rng.integers(-6, 7)), client, action, keys.index(key)))
            last_client = int(self.rng.integers(2 * CLIENTS))
            action = "recall" if last_client >= CLIENTS else "cancel"
            plans[last_client].append(
                (due + MOVED_MS + int(self.rng.integers(-6, 7)), last_client, action, keys.index(key))
            )
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            for client_run in [
                pool.submit(self._run_plan, sorted(plan), keys, due_ms.tolist()) for plan in plans
            ]:
                client_run.result()
        self._lead_ms += int(np.median(self._late_ms))
        self._late_ms.clear()

    def _run_plan(self, plan: list[tuple[int, int, str, int]], keys: list[str], due_ms: list[int]) -> None:
        """Make the calls of one client at their times. `due_ms`: the due time of each key."""
        with self.node.client() as ball, Wire.to(self.node) as wire:
            for at_ms, _, action, i in plan:
                self._nap.wait(max(0, at_ms - self._lead_ms - self.now_ms()) / 1000)
                client = wire if action == "recall" else ball
                getattr(self, action)(client, keys[i], due_ms[i])
                self._late_ms.append(self.now_ms() - at_ms)

    def finish(self) -> list[str]:
        """Wait until all messages are settled, receive them, and list the contradictions."""
        end_ms = self.now_ms() + MOVED_MS
        eventually(
            lambda: self.node.broker.scheduling.scheduler.settled_before_ms > end_ms,
            "all messages are settled",
        )
        with self.node.client() as ball:
            # By offset, because a lease would be a further scheduled message.
            while messages := ball.browse(TOPIC, wait="0.2s"):
                self.recorder.delivered.update(str(message.id) for message in messages)
            next_seq = ball.status()["log"]["durable_seq"]
            log = ball.read_log(1, next_seq, kinds=KINDS, columns=COLUMNS).read_all().to_pylist()
        return self.recorder.faults(log)


@pytest.mark.slow
def test_responses_agree_with_log_and_deliveries_near_the_due_time(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        race = Race(node, seed=6)
        for number in range(ROUNDS_MAX):
            race.round(number)
            verdicts = race.recorder.verdicts()
            if (
                number + 1 >= ROUNDS_MIN
                and min(verdicts[v] for v in ("cancelled", "recalled", "released", "rescheduled")) > 20
            ):
                break
        assert race.finish() == []
    assert len(race.recorder.first_seq) >= 1_000
    assert verdicts.keys() == {"cancelled", "already_cancelled", "recalled", "released", "rescheduled"}, (
        "each verdict occurred"
    )


@pytest.mark.parametrize(
    "schedule",
    ["hour_log", *(pytest.param(name, marks=pytest.mark.slow) for name in ("timer_wheel", "level_cascade"))],
)
def test_responses_agree_with_log_and_deliveries_in_each_strategy(tmp_path: Path, schedule: str) -> None:
    with running_node(tmp_path / "data", strategy=schedule) as node:
        race = Race(node, seed=8)
        race.round(0)
        assert race.finish() == []


# ---- controls --------------------------------------------------------------------------------------------------


def test_a_schedule_that_cancels_what_it_hands_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the decision of `Scheduler.cancel`, the recorder reports a fault."""

    def always_cancel(self: Scheduler, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        return np.ones(len(seq), dtype=np.bool_)

    with running_node(tmp_path / "data") as node:
        race = Race(node, seed=7)
        monkeypatch.setattr(Scheduler, "cancel", always_cancel)
        for number in range(ROUNDS_MAX):  # a slow machine hits the due times better in each round
            race.round(number)
            if any("ends" in fault for fault in race.finish()):
                return
        raise AssertionError("the recorder reported no fault")


SCHEDULED_ROW = {"kind": Kind.SCHEDULED, "due_ms": 50, "store_ms": 1}
END_ROW = {"due_ms": 50, "store_ms": 60, "version_seq": None}


def recording_without_fault() -> tuple[Recorder, list[dict[str, object]]]:
    """Message a was cancelled, b was released, c was rescheduled and then released."""
    recorder = Recorder()
    recorder.first_seq = {"a": 1, "b": 2, "c": 3}
    for key, told in (
        ("a", ("cancelled", 1, 60)), ("a", ("already_cancelled", 1, 60)), ("a", ("recalled",)),
        ("b", ("released", 2, 60)), ("c", ("rescheduled", 3, 60, 70)), ("c", ("released", 3, 80)),
    ):  # fmt: skip
        with recorder.call(key) as call:
            call.told(*told)  # type: ignore[arg-type]
    recorder.delivered.update(["b", "c"])
    log: list[dict[str, object]] = [
        *({**SCHEDULED_ROW, "seq": seq, "unique_key": key} for key, seq in recorder.first_seq.items()),
        {**END_ROW, "kind": Kind.CANCEL, "seq": 4, "unique_key": "a", "source_seq": 1},
        {**END_ROW, "kind": Kind.RELEASE, "seq": 5, "unique_key": "b", "source_seq": 2},
        {**END_ROW, "kind": Kind.MOVED, "seq": 6, "unique_key": "c", "source_seq": 3, "from_due_ms": 50, "due_ms": 70},
        {**END_ROW, "kind": Kind.RELEASE, "seq": 7, "unique_key": "c", "source_seq": 3, "version_seq": 6,
         "due_ms": 70, "store_ms": 80},
    ]  # fmt: skip
    return recorder, log


def test_a_recording_without_contradiction_has_no_fault() -> None:
    recorder, log = recording_without_fault()
    assert recorder.faults(log) == []


@pytest.mark.parametrize(
    ("call", "lie"),
    [
        (0, ("released",)), (0, ("not_found",)), (0, ("cancelled", 1, 61)), (1, ("cancelled", 1, 60)),
        (2, ("released",)), (3, ("cancelled",)), (3, ("recalled",)), (3, ("expired",)), (3, ("released", 2, 61)),
        (3, ("rescheduled", 2, 60, 50)), (4, ("rescheduled", 3, 60, 71)), (4, ("cancelled",)), (4, ("released",)),
        (5, ("already_cancelled",)), (5, ("rescheduled", 3, 60, 70)),
    ],
)  # fmt: skip
def test_a_wrong_verdict_is_noticed(call: int, lie: tuple[str, int]) -> None:
    recorder, log = recording_without_fault()
    recorder.calls[call].told(*lie)
    assert recorder.faults(log)


def test_a_wrong_log_is_noticed() -> None:
    recorder, log = recording_without_fault()
    for without in (3, 4, 5, 6):
        assert recorder.faults(log[:without] + log[without + 1 :]), without
    assert recorder.faults([*log, {**log[4], "seq": 9}]), "released twice"
    assert recorder.faults([*log, {**log[4], "seq": 9, "source_seq": 1}]), "cancelled and released"
    early = deepcopy(log)
    early[-1]["store_ms"] = 69
    assert recorder.faults(early)


def test_a_doubled_lost_or_cancelled_message_is_noticed() -> None:
    for key in "abc":
        recorder, log = recording_without_fault()
        recorder.delivered[key] += 1
        assert recorder.faults(log)
    recorder, log = recording_without_fault()
    recorder.delivered["b"] = 0
    assert recorder.faults(log)


def test_answers_in_another_order_than_the_log_are_noticed() -> None:
    recorder, log = recording_without_fault()
    moved, released = recorder.calls[4:]
    moved.began, moved.ended, released.began, released.ended = (
        released.began,
        released.ended,
        moved.began,
        moved.ended,
    )
    assert recorder.faults(log) == ["c: rescheduled came after released, and stands before it in the log"]
