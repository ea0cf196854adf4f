"""Cancel of pending scheduled messages by name, with a definite verdict for each.

    cancelled           it was pending, and will never be delivered; the CANCEL row is durable
    rescheduled         it was pending, and now has another due time (reschedule.py)
    already_cancelled   another request was first
    released            too late: its release is in the log, stored at `at_ms`
    expired             it is no longer pending; the row that ended it is older than the log
    not_found           no scheduled message of that name is known here

In this package, "settle" means: end a scheduled message, or give it another due time.

The schedule decides the race with the due time and with other requests. It does so on the event loop, in the order in
which rows are appended to the log. A message whose release has begun cannot be cancelled, and a cancelled message is
not released. There is no third case (G7).

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
from timeball.broker.revoking.scheduled_lookup import (
    CANCELLED,
    Candidate,
    LookupResult,
    Names,
    due_version_columns,
)
from timeball.io.clock import SchedulerClock
from timeball.model.message import CANCELLED_BY, LogRow, encode_properties
from timeball.model.rows import cancel_row
from timeball.model.wire import Verdict
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

# Settles the candidates that are still pending, durably. Returns the verdicts of these candidates, by number.
Act = Callable[[list[Candidate]], Awaitable[dict[int, Verdict]]]


async def settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    """Look up the names, and call `act` for the messages that are not settled yet.

    The result has a verdict for each message found, and for each name without a message.

    Raise OutOfRange or InvalidMessage for invalid names.
    """
    names.check()
    async with look_ups.gate.passing():
        return await _settle(look_ups, names, act)


async def _settle(look_ups: LookUps, names: Names, act: Act) -> list[Verdict]:
    lookup = await look_ups.look_up(names)
    verdicts = {number: Verdict("", end.verdict, number, end.at_ms) for number, end in lookup.settled.items()}
    # By number: a message may be found by its id and by its key, but is settled once.
    remaining = {
        candidate.number: candidate for candidate in lookup.candidates if candidate.number not in verdicts
    }
    while remaining:
        # `act` decides in one step on the event loop. So a message without a verdict was settled or moved by another
        # request.
        settled_now = await act(list(remaining.values()))
        verdicts |= settled_now
        remaining = await recheck_unsettled(
            look_ups,
            [candidate for candidate in remaining.values() if candidate.number not in settled_now],
            verdicts,
        )
    return list_verdicts(names.subjects, lookup, verdicts)


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
    """Cancel those candidates that are pending, durably (an `Act`). Other candidates have no verdict in the result.

    `by`: the account that requests the cancel. The CANCEL rows name it.
    """
    now_ms = clock.now_ms()
    pending = [
        c
        for c, is_pending in zip(
            candidates, cancel_pending(candidates, scheduler=scheduler).tolist(), strict=True
        )
        if is_pending
    ]
    if pending:
        # An operator may name a retry topic. Its scheduled messages are leases, which are counted.
        lease_counts.end(np.array([c.number for c in pending], dtype=np.int64))
        # No await since the decision: the CANCEL rows stand in the log before any later release.
        await appender.append_few(cancel_rows(pending, now_ms, by))
        rates.add_each(Stat.CANCELLED_NUMS, (candidate.topic for candidate in pending))
    return {c.number: Verdict("", "cancelled", c.number, now_ms) for c in pending}


def cancel_pending(candidates: Sequence[Candidate], *, scheduler: Scheduler) -> npt.NDArray[np.bool_]:
    """Cancel the pending ones of these messages in the schedule. The result has True for each cancelled candidate.

    The caller must append their CANCEL or MOVED rows before its next await.
    """
    return scheduler.cancel(*due_version_columns(candidates))


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


def list_verdicts(
    subjects: Iterable[str], lookup: LookupResult, verdict_by_number: dict[int, Verdict]
) -> list[Verdict]:
    """List the verdicts of all messages found, in the order of `subjects`, the requested names.

    For each name, messages settled by this request come first, then the newest.
    """
    by_subject: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in lookup.candidates:
        by_subject[candidate.subject].append(candidate)
    result, verdict_by_number = [], dict(verdict_by_number)
    for subject in subjects:
        subject_verdicts = []
        for candidate in by_subject.get(subject, []):
            verdict = verdict_by_number[candidate.number]
            if not _is_superseded(candidate, verdict, by_subject[subject]):
                subject_verdicts.append(msgspec.structs.replace(verdict, subject=subject))
            if (
                verdict.verdict == "cancelled"
            ):  # for a message named twice, the second verdict is `already_cancelled`
                verdict_by_number[candidate.number] = msgspec.structs.replace(verdict, verdict=CANCELLED)
        subject_verdicts.sort(
            key=lambda verdict: (verdict.verdict not in ("cancelled", "rescheduled"), -(verdict.seq or 0))
        )
        if not subject_verdicts:
            # Every name gets a verdict, even if it has no scheduled message.
            subject_verdicts = [_missing_verdict(subject, lookup)]
        result += subject_verdicts
    return result


def _is_superseded(candidate: Candidate, verdict: Verdict, others: list[Candidate]) -> bool:
    """Check whether a later message has the same id, while the end of this one is known only vaguely (no time)."""
    if (
        verdict.verdict not in (CANCELLED, "expired")
        or verdict.at_ms is not None
        or candidate.unique_key is None
    ):
        return False
    # The producer used the id again. The caller means the later message.
    return any(
        other.unique_key == candidate.unique_key and other.number > candidate.number for other in others
    )


def _missing_verdict(subject: str, lookup: LookupResult) -> Verdict:
    seq = lookup.expired_numbers.get(subject)
    return Verdict(subject, "not_found" if seq is None else "expired", seq)


async def recheck_unsettled(
    look_ups: LookUps, unsettled: Sequence[Candidate], verdicts: dict[int, Verdict]
) -> dict[int, Candidate]:
    """Look up again the messages that `act` did not settle, and add the verdicts of other requests to `verdicts`.

    The result contains, by number, the messages that moved meanwhile: the caller tries them again.
    """
    if not unsettled:
        return {}
    # Each was settled since the lookup, and its row may not be durable yet. After the flush a lookup finds the row.
    await look_ups.writer.flushed()
    lookup = await look_ups.look_up(Names(seqs=[candidate.number for candidate in unsettled]), thorough=True)
    current_by_number, remaining = {candidate.number: candidate for candidate in lookup.candidates}, {}
    for before in unsettled:
        now, end = current_by_number.get(before.number), lookup.settled.get(before.number)
        if end is not None:
            verdicts[before.number] = Verdict("", end.verdict, before.number, end.at_ms)
        elif now is not None and (now.seq, now.at_seq) != (before.seq, before.at_seq):
            remaining[before.number] = now  # it was moved, or retention removed the row with its body
        else:
            verdicts[before.number] = _remembered_verdict(look_ups.outcomes, before)
    return remaining


def _remembered_verdict(outcomes: Outcomes, candidate: Candidate) -> Verdict:
    """Find the verdict of a message that is not pending, and for which the log has no RELEASE or CANCEL row.

    The schedule remembers a cancel until the message's due time.
    """
    was_cancelled = bool(outcomes.was_cancelled(*due_version_columns([candidate]))[0])
    return Verdict("", CANCELLED if was_cancelled else "expired", candidate.number)
