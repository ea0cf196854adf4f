"""Make one answer of what each group of a cluster says about the messages that a caller has named.

    found in one       its verdict; all of them, where several groups have messages of the name
    found in none      not_found, if all have answered
    one is silent      unavailable, before all else: the silent group may have messages of this name, too. So is one
                       that is on its way from a group to another, as the group says that hands it over
    handed over        what the group that has it now says. `handed` is left where none has it: the others were perhaps
                       asked before it came, so they are to be asked once more

What the others have settled stands behind `unavailable`, since it is done; asked again, they say so once more. A
look-up only reads, so one that finds something is answered with that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from timeball.errors import Unavailable
from timeball.wire import HANDED, UNAVAILABLE, MessagePlace, Verdict

DONE = ("cancelled", "rescheduled")
NOT_FOUND = "not_found"


def merge_verdicts(subjects: Iterable[str], told: Sequence[Sequence[Verdict] | None]) -> list[Verdict]:
    """Return the verdicts of all groups, in the order of `subjects`; None: a group that is silent."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    unknown: dict[str, list[Verdict]] = {}
    for verdicts in told:
        for verdict in verdicts or ():
            if verdict.verdict == NOT_FOUND:
                unknown[verdict.subject] = [verdict]
            else:
                found[verdict.subject].append(verdict)
    is_silent = any(verdicts is None for verdicts in told)
    merged = []
    for subject in dict.fromkeys(subjects):
        told_of = [verdict for verdict in found[subject] if verdict.verdict != UNAVAILABLE]
        is_moving = len(told_of) < len(found[subject])
        here = [verdict for verdict in told_of if verdict.verdict != HANDED]
        # Stable: each group has its own newest first, and numbers of two groups say nothing about their order.
        known = sorted(here, key=lambda verdict: verdict.verdict not in DONE)
        silence = [Verdict(subject, UNAVAILABLE)] if is_silent or is_moving else []
        merged += silence + known or told_of[:1] or unknown[subject]
    return merged


def merge_places(told: Sequence[Sequence[MessagePlace] | None]) -> list[MessagePlace]:
    """Return the places that all groups know; raise Unavailable if there are none and a group is silent."""
    found = [places for places in told if places]
    if not found and any(places is None for places in told):
        raise Unavailable(
            "a group of the cluster did not answer, and the others have no such message; ask again"
        )
    if len(found) == 1:
        return list(found[0])
    # What waits first, then what became visible last.
    return sorted(
        (place for places in found for place in places),
        key=lambda place: (place.state != "waiting", -(place.at_ms or place.due_ms or 0)),
    )
