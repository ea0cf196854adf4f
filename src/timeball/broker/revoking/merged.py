"""Merge of the answers that the groups of a cluster give for the messages that a caller has named.

    found in one       its verdict; all of them, where several groups have messages of the name
    found in none      not_found, if all have answered
    one is silent      unavailable, before all else: the silent group may have messages of this name, too. The same for
                       a message that is being transferred between groups, as the sending group reports
    handed over        the verdict of the group that has it now. If none has it, `handed` remains: the others may have
                       answered before it arrived, so the caller should ask them once more

Verdicts of other groups follow after `unavailable`, because their effect is durable. If the request is repeated, these
groups report it again. A lookup only reads, so if any group finds something, that is the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from timeball.model.errors import Unavailable
from timeball.model.wire import HANDED, UNAVAILABLE, MessagePlace, Verdict

DONE = ("cancelled", "rescheduled")
NOT_FOUND = "not_found"


def merge_verdicts(subjects: Iterable[str], told: Sequence[Sequence[Verdict] | None]) -> list[Verdict]:
    """Merge the verdicts of all groups, in the order of `subjects`. None stands for a silent group."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    unknown: dict[str, list[Verdict]] = {}
    for verdicts in told:
        for verdict in verdicts or ():
            if verdict.verdict == NOT_FOUND:
                # Every group without the message gives this verdict, and one of them is enough.
                unknown[verdict.subject] = [verdict]
            else:
                found[verdict.subject].append(verdict)
    is_silent = any(verdicts is None for verdicts in told)
    merged = []
    for subject in dict.fromkeys(subjects):
        told_of = [verdict for verdict in found[subject] if verdict.verdict != UNAVAILABLE]
        # A group answers `unavailable` for a message that it is transferring to another group.
        is_moving = len(told_of) < len(found[subject])
        here = [verdict for verdict in told_of if verdict.verdict != HANDED]
        # Stable: each group has its newest verdict first, and numbers of two groups have no common order.
        known = sorted(here, key=lambda verdict: verdict.verdict not in DONE)
        silence = [Verdict(subject, UNAVAILABLE)] if is_silent or is_moving else []
        merged += silence + known or told_of[:1] or unknown[subject]
    return merged


def merge_places(told: Sequence[Sequence[MessagePlace] | None]) -> list[MessagePlace]:
    """Merge the positions from all groups. Raise Unavailable if there are none and a group is silent."""
    found = [places for places in told if places]
    if not found and any(places is None for places in told):
        raise Unavailable(
            "a group of the cluster did not answer, and the others have no such message; ask again"
        )
    # With one group, its own order stays.
    if len(found) == 1:
        return list(found[0])
    # Pending messages first, then visible ones, the latest first.
    return sorted(
        (place for places in found for place in places),
        key=lambda place: (place.state != "waiting", -(place.at_ms or place.due_ms or 0)),
    )
