"""Cancel of pending scheduled messages by name, with a definite verdict for each.

    cancelled           it was pending, and will never be delivered; the CANCEL row is durable
    rescheduled         it was pending, and now has another due time (reschedule.py)
    already_cancelled   another request was first
    released            too late: its release is in the log, stored at `at_ms`
    expired             it is no longer pending; the row that ended it is older than the log
    not_found           no scheduled message of that name is known here

Here "settle" means to end a scheduled message, or to give it another due time.

The schedule decides the race with the due time and with other requests. It does so on the event loop, in the order in
which rows are appended to the log. A scheduled message that was handed out for release cannot be cancelled, and a
cancelled one is not handed out. There is no third case (G7).

If another request settled the scheduled message first, the lookup is repeated once that request's row is durable. A
scheduled message that was moved meanwhile is tried at its new due time. Each repetition means that another request made
progress. The answer was true at some time between call and answer. All verdicts name a scheduled message by its number,
which never changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.broker.accepting.appender import Appender
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import CANCELLED, Candidate, Found, Names, pairs
from timeball.io.clock import SchedulerClock
from timeball.model.message import CANCELLED_BY, LogRow, encode_properties
from timeball.model.rows import cancel_row
from timeball.model.wire import Verdict
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

# Settles those of these scheduled messages that are pending, durably, and returns a verdict for each, by number.
Act = Callable[[list[Candidate]], Awaitable[dict[int, Verdict]]]


async def settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    """Call `act` for pending messages. Return a verdict for each scheduled message, and for each name without one.

    Raise OutOfRange or InvalidMessage for invalid names.
    """
    names.check()
    async with look_ups.gate.passing():
        return await _settle(look_ups, names, act)


async def _settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    found = await look_ups.look_up(names)
    told = {
        number: Verdict("", ended.verdict, number, ended.at_ms) for number, ended in found.settled.items()
    }
    # By number: one scheduled message may be found by its id and by its key, and is tried once.
    left = {c.number: c for c in found.candidates if c.number not in told}
    while left:
        # Settling is one step on the event loop, so a scheduled message that is not in `acted` was settled by another
        # request.
        acted = await act(list(left.values()))
        told |= acted
        left = await look_again(look_ups, [c for c in left.values() if c.number not in acted], told)
    return verdicts(names.subjects, found, told)


async def cancel(
    appender: Appender,
    candidates: list[Candidate],
    *,
    by: str = "",
    clock: SchedulerClock,
    lease_counts: LeaseCounts,
    scheduler: Scheduler,
    rates: Rates,
) -> dict[int, Verdict]:
    """Cancel these scheduled messages, durably (an Act). `by`: the account that requests it, which the rows name."""
    now_ms = clock.now_ms()
    chosen = [
        c
        for c, was in zip(candidates, stop_waiting(candidates, scheduler=scheduler).tolist(), strict=True)
        if was
    ]
    if chosen:
        # An operator may name a retry topic, so some of the scheduled messages may stand for leases.
        lease_counts.end(np.array([c.number for c in chosen], dtype=np.int64))
        # No await since the decision: the CANCEL rows stand in the log before any later release.
        await appender.append_few(cancel_rows(chosen, now_ms, by))
        rates.add_each(Stat.CANCELLED_NUMS, (each.topic for each in chosen))
    return {c.number: Verdict("", "cancelled", c.number, now_ms) for c in chosen}


def stop_waiting(candidates: Sequence[Candidate], *, scheduler: Scheduler) -> npt.NDArray[np.bool_]:
    """Cancel those of these that are pending, and return which they were.

    The caller must append their rows without an await before.
    """
    return scheduler.cancel(*pairs(candidates))


def cancel_rows(chosen: Sequence[Candidate], now_ms: int, by: str = "") -> list[LogRow]:
    """Build the CANCEL rows of these scheduled messages, as values of LOG_SCHEMA."""
    properties = encode_properties({CANCELLED_BY: by}) if by else None
    return [
        cancel_row(
            topic=c.topic, source_seq=c.number, due_seq=c.seq, due_ms=c.due_ms, store_ms=now_ms, keys=c.keys,
            unique_key=c.unique_key, properties=properties, accepted_ms=c.accepted_ms,
        )
        for c in chosen
    ]  # fmt: skip


def verdicts(subjects: Iterable[str], found: Found, told: dict[int, Verdict]) -> list[Verdict]:
    """Return one verdict for each scheduled message, in the order of `subjects`.

    For each name, scheduled messages settled by this request come first, then the newest.
    """
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
            ):  # a scheduled message that is named twice in one request is cancelled once
                told[c.number] = msgspec.structs.replace(verdict, verdict=CANCELLED)
        told_of.sort(
            key=lambda verdict: (verdict.verdict not in ("cancelled", "rescheduled"), -(verdict.seq or 0))
        )
        if not told_of:
            # Every name gets a verdict, also one without a scheduled message.
            told_of = [_unknown(subject, found)]
        result += told_of
    return result


def _is_overtaken(candidate: Candidate, verdict: Verdict, others: list[Candidate]) -> bool:
    """Return whether its id belongs to a later scheduled message too, and the time of its own end is unknown."""
    if (
        verdict.verdict not in (CANCELLED, "expired")
        or verdict.at_ms is not None
        or candidate.unique_key is None
    ):
        return False
    # The id was used again. The caller means the later message, and the old one would only confuse the answer.
    return any(c.unique_key == candidate.unique_key and c.number > candidate.number for c in others)


def _unknown(subject: str, found: Found) -> Verdict:
    seq = found.gone.get(subject)
    return Verdict(subject, "not_found" if seq is None else "expired", seq)


async def look_again(
    look_ups: LookUps, lost: Sequence[Candidate], told: dict[int, Verdict]
) -> dict[int, Candidate]:
    """Add to `told` the verdicts that follow from other requests. Return, by number, the messages to try again."""
    if not lost:
        return {}
    # It was settled since the lookup, or its release is on its way to the disk. After the flush, the row is there.
    await look_ups.writer.flushed()
    found = await look_ups.look_up(Names(seqs=[c.number for c in lost]), thorough=True)
    become, left = {c.number: c for c in found.candidates}, {}
    for was in lost:
        now, ended = become.get(was.number), found.settled.get(was.number)
        if ended is not None:
            told[was.number] = Verdict("", ended.verdict, was.number, ended.at_ms)
        elif now is not None and (now.seq, now.at_seq) != (was.seq, was.at_seq):
            left[was.number] = now  # moved, or retention removed the row from which its body was to be read
        else:
            told[was.number] = _faded(look_ups.outcomes, was)
    return left


def _faded(outcomes: Outcomes, candidate: Candidate) -> Verdict:
    """Return the verdict of a scheduled message that is not pending, and whose end is in no row of the log.

    The schedule remembers a cancel until the due time.
    """
    was_cancelled = bool(outcomes.was_cancelled(*pairs([candidate]))[0])
    return Verdict("", CANCELLED if was_cancelled else "expired", candidate.number)
