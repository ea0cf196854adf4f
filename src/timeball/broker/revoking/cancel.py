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
moved meanwhile is tried at its new instant; each repetition means that another request got on. The answer is one
that was true at some instant between call and answer. All verdicts name a promise by its number, which never changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.broker.appender import Appender
from timeball.broker.components import Components
from timeball.broker.rates import Stat
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.promise_lookup import CANCELLED, Candidate, Found, Names, pairs
from timeball.message import CANCELLED_BY, Kind, LogRow, encode_properties
from timeball.wire import Verdict

# Settles those of these promises that still wait, durably; returns what it did, by number.
Act = Callable[[list[Candidate]], Awaitable[dict[int, Verdict]]]


async def settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    """Call `act` for what waits; return a definite verdict for each promise, and for each name without one."""
    names.check()
    async with look_ups.parts.revoking.passing():
        return await _settle(look_ups, names, act)


async def _settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    found = await look_ups.look_up(names)
    told = {
        number: Verdict("", ended.verdict, number, ended.at_ms) for number, ended in found.settled.items()
    }
    # By number: one promise may be found by its id and by its key, and is tried once.
    left = {c.number: c for c in found.candidates if c.number not in told}
    while left:
        # Settling is one step on the event loop, so each promise is in `acted` or was settled by another request.
        acted = await act(list(left.values()))
        told |= acted
        left = await look_again(look_ups, [c for c in left.values() if c.number not in acted], told)
    return verdicts(names.subjects, found, told)


async def cancel(
    parts: Components, appender: Appender, candidates: list[Candidate], *, by: str = ""
) -> dict[int, Verdict]:
    """Cancel them, durably (an Act). `by`: the account that asks for it, which the rows name."""
    now_ms = parts.clock.now_ms()
    chosen = [c for c, was in zip(candidates, stop_waiting(parts, candidates).tolist(), strict=True) if was]
    if chosen:
        # An operator may name the topic that messages are redelivered from.
        parts.lease_counts.end(np.array([c.number for c in chosen], dtype=np.int64))
        # No pause since the decision: the CANCEL rows stand in the log before any later release.
        await appender.append_few(cancel_rows(chosen, now_ms, by))
        parts.rates.add_each(Stat.CANCELLED_NUMS, (each.topic for each in chosen))
    return {c.number: Verdict("", "cancelled", c.number, now_ms) for c in chosen}


def stop_waiting(parts: Components, candidates: Sequence[Candidate]) -> npt.NDArray[np.bool_]:
    """Cancel those of these that waited until now; return which. What says so must be appended without a pause."""
    return parts.scheduler.cancel(*pairs(candidates))


def cancel_rows(chosen: Sequence[Candidate], now_ms: int, by: str = "") -> list[LogRow]:
    """Return the CANCEL rows of these promises, as values of LOG_SCHEMA."""
    properties = encode_properties({CANCELLED_BY: by}) if by else None
    return [
        (
            int(Kind.CANCEL), c.topic, -1, None, None, c.keys, c.unique_key, None, properties, None, None, now_ms,
            None, None, None, None, c.due_ms, c.accepted_ms, c.number, None if c.seq == c.number else c.seq, None,
        )
        for c in chosen
    ]  # fmt: skip


def verdicts(subjects: Iterable[str], found: Found, told: dict[int, Verdict]) -> list[Verdict]:
    """Return one verdict a promise, in the order of `subjects`; of each first what was done, then the newest."""
    by_subject: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in found.candidates:
        by_subject[candidate.subject].append(candidate)
    result, told = [], dict(told)
    for subject in subjects:
        told_of = []
        for c in by_subject.get(subject, []):
            verdict = told[c.number]
            if not _is_overtaken(c, verdict, by_subject[subject]):
                told_of.append(msgspec.structs.replace(verdict, subject=subject))
            if (
                verdict.verdict == "cancelled"
            ):  # the same promise named twice in one request is cancelled once
                told[c.number] = msgspec.structs.replace(verdict, verdict=CANCELLED)
        told_of.sort(
            key=lambda verdict: (verdict.verdict not in ("cancelled", "rescheduled"), -(verdict.seq or 0))
        )
        if not told_of:
            # Every name gets a verdict, also one that nothing carries.
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
    # An id that was used again: the caller means the later message, and the old one would only confuse the answer.
    return any(c.unique_key == candidate.unique_key and c.number > candidate.number for c in others)


def _unknown(subject: str, found: Found) -> Verdict:
    seq = found.gone.get(subject)
    return Verdict(subject, "not_found" if seq is None else "expired", seq)


async def look_again(
    look_ups: LookUps, lost: Sequence[Candidate], told: dict[int, Verdict]
) -> dict[int, Candidate]:
    """Add to `told` the verdicts of other requests; return, by number, those to try again elsewhere."""
    if not lost:
        return {}
    # It was settled since the lookup, or is handed out and on its way to the disk: after the flush its row is there.
    parts = look_ups.parts
    await parts.writer.flushed()
    found = await look_ups.look_up(Names(seqs=[c.number for c in lost]), thorough=True)
    become, left = {c.number: c for c in found.candidates}, {}
    for was in lost:
        now, ended = become.get(was.number), found.settled.get(was.number)
        if ended is not None:
            told[was.number] = Verdict("", ended.verdict, was.number, ended.at_ms)
        elif now is not None and (now.seq, now.at_seq) != (was.seq, was.at_seq):
            left[was.number] = now  # moved, or retention removed the row that its body was to be read from
        else:
            told[was.number] = _faded(parts, was)
    return left


def _faded(parts: Components, candidate: Candidate) -> Verdict:
    """It waits no more, and no row says why. Of a cancel ahead of its instant the schedule still knows."""
    was_cancelled = bool(parts.outcomes.was_cancelled(*pairs([candidate]))[0])
    return Verdict("", CANCELLED if was_cancelled else "expired", candidate.number)
