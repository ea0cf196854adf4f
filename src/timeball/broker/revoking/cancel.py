"""Settle the promises a caller names if they still wait, and answer definitely what became of each.

    cancelled           it was waiting, and will never be delivered; the CANCEL row is durable
    rescheduled         it was waiting, and waits for another instant now (reschedule.py)
    already_cancelled   another request was first
    released            too late: its release stands in the log, since the instant given
    expired             it waits no more; what ended it is older than what the log keeps
    not_found           no promise of that name is known here

The schedule decides the race with the due instant and with other requests, on the event loop, in the order in which
rows are appended to the log: a promise handed out cannot be cancelled, a cancelled one is not handed out. There is no
third case (G7).

If another request settled the promise first, repeat the lookup once that request's row is durable. A promise that was
moved meanwhile is tried under its new number; each repetition means that another request got on. The answer is one
that was true at some instant between call and answer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.parts import Parts, in_thread
from timeball.broker.revoking.log_scan import scan
from timeball.broker.revoking.promise_lookup import CANCELLED, Candidate, Found, Names, Search, pairs
from timeball.message import Kind, build_rows
from timeball.wire import Verdict

# Settles those of these promises that still wait, durably; returns what it did, by number.
Act = Callable[[list[Candidate]], Awaitable[dict[int, Verdict]]]


async def settle(parts: Parts, names: Names, act: Act) -> list[Verdict]:
    """Call `act` for what waits; return a definite verdict for each promise, and for each name without one."""
    names.check()
    found = await _look_up(parts, names)
    told = {seq: Verdict("", ended.verdict, seq, ended.at_ms) for seq, ended in found.settled.items()}
    left = {c.seq: c for c in found.candidates if c.seq not in told}
    while left:
        acted = await act(list({c.seq: c for c in left.values()}.values()))
        told |= {seq: acted[c.seq] for seq, c in left.items() if c.seq in acted}
        left = await _look_again(parts, {seq: c for seq, c in left.items() if c.seq not in acted}, told)
    return verdicts(names.subjects, found, told)


async def cancel(parts: Parts, candidates: list[Candidate]) -> dict[int, Verdict]:
    """Cancel them, durably (an Act)."""
    now_ms = parts.clock.now_ms()
    chosen = [c for c, was in zip(candidates, stop_waiting(parts, candidates).tolist(), strict=True) if was]
    if chosen:
        # No pause since the decision: the CANCEL rows stand in the log before any later release.
        _, durable = parts.writer.append(cancel_rows(chosen, now_ms))
        await durable
    return {c.seq: Verdict("", "cancelled", c.seq, now_ms) for c in chosen}


def stop_waiting(parts: Parts, candidates: Sequence[Candidate]) -> npt.NDArray[np.bool_]:
    """Cancel those of these that waited until now; return which. What says so must be appended without a pause."""
    return parts.scheduler.cancel(*pairs(candidates))


def cancel_rows(
    chosen: Sequence[Candidate], now_ms: int, properties: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return LOG_SCHEMA cancel rows for these promises."""
    return build_rows(
        len(chosen),
        kind=int(Kind.CANCEL),
        topic=[c.topic for c in chosen],
        queue_id=-1,
        unique_key=[c.unique_key for c in chosen],
        keys=[c.keys for c in chosen],
        properties=properties,
        store_ms=now_ms,
        due_ms=[c.due_ms for c in chosen],
        accepted_ms=[c.accepted_ms for c in chosen],
        source_seq=[c.seq for c in chosen],
    )


def verdicts(subjects: Iterable[str], found: Found, told: dict[int, Verdict]) -> list[Verdict]:
    """Return one verdict a promise, in the order of `subjects`; of each first what was done, then the newest."""
    by_subject: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in found.candidates:
        by_subject[candidate.subject].append(candidate)
    result, told = [], dict(told)
    for subject in subjects:
        told_of = []
        for c in by_subject.get(subject, []):
            verdict = told[c.seq]
            if not _is_overtaken(c, verdict, by_subject[subject]):
                told_of.append(msgspec.structs.replace(verdict, subject=subject))
            if (
                verdict.verdict == "cancelled"
            ):  # the same promise named twice in one request is cancelled once
                told[c.seq] = msgspec.structs.replace(verdict, verdict=CANCELLED)
        told_of.sort(
            key=lambda verdict: (verdict.verdict not in ("cancelled", "rescheduled"), -(verdict.seq or 0))
        )
        if not told_of:
            told_of = [_unknown(subject, found)]
        result += told_of
    return result


def _is_overtaken(candidate: Candidate, verdict: Verdict, others: list[Candidate]) -> bool:
    """Return whether its id names a later promise, while of this one only its end is known."""
    if (
        verdict.verdict not in (CANCELLED, "expired")
        or verdict.at_ms is not None
        or candidate.unique_key is None
    ):
        return False
    return any(c.unique_key == candidate.unique_key and c.seq > candidate.seq for c in others)


def _unknown(subject: str, found: Found) -> Verdict:
    seq = found.gone.get(subject)
    return Verdict(subject, "not_found" if seq is None else "expired", seq)


async def _look_up(parts: Parts, names: Names, *, thorough: bool = False) -> Found:
    pending, moved = parts.hour_log.pending, parts.outcomes.moved
    search = Search(parts.reader, parts.key_index, moved, names)

    def begin() -> Found | None:
        files = pending.all()
        search.search(files)
        return None if search.missing(thorough=thorough) else search.result(files)

    def end(rows: list[dict[str, Any]]) -> Found:
        search.add_rows(rows)
        return search.result(pending.all())

    found = await in_thread(parts.reader_thread, begin)
    if found is None:
        missing = search.missing(thorough=thorough)
        rows = await asyncio.to_thread(scan, parts.reader, moved, missing)
        found = await in_thread(parts.reader_thread, end, rows)
    return found


async def _look_again(
    parts: Parts, lost: dict[int, Candidate], told: dict[int, Verdict]
) -> dict[int, Candidate]:
    """Add to `told` the verdicts of other requests, by the number each was found under; return those to try again."""
    if not lost:
        return {}
    # It was settled since the lookup, or is handed out and on its way to the disk: after the flush its row is there.
    await parts.writer.flushed()
    found = await _look_up(parts, Names(seqs=[c.seq for c in lost.values()]), thorough=True)
    become, left = {c.subject: c for c in found.candidates}, {}
    for seq, was in lost.items():
        now = become.get(str(was.seq))
        if now is not None and now.seq in found.settled:
            ended = found.settled[now.seq]
            told[seq] = Verdict("", ended.verdict, now.seq, ended.at_ms)
        elif now is not None and now.seq != was.seq:
            left[seq] = now
        else:
            told[seq] = _faded(parts, was)
    return left


def _faded(parts: Parts, candidate: Candidate) -> Verdict:
    """It waits no more, and no row says why. Of a cancel ahead of its instant the schedule still knows."""
    was_cancelled = bool(parts.outcomes.was_cancelled(*pairs([candidate]))[0])
    return Verdict("", CANCELLED if was_cancelled else "expired", candidate.seq)
