"""The current states of the messages of a send that is repeated with its idempotency key. Only reads.

The caller has sent these messages, so it needs no permission to look them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from timeball.broker.revoking.cancel import settle
from timeball.broker.revoking.find_message import WAITING
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import (
    CANCELLED,
    RELEASED,
    Candidate,
    Names,
    due_version_columns,
)
from timeball.model import limits
from timeball.model.answers import SentState
from timeball.model.wire import Verdict

# "not_found": a message that was sent with a past due time was never scheduled. It was visible at once.
_STATES = {RELEASED: "visible", "not_found": "visible", CANCELLED: "cancelled"}


async def sent_states(
    look_ups: LookUps, numbers: Sequence[int], map_verdicts: Callable[[list[Verdict]], list[Verdict]] = list
) -> list[SentState]:
    """Look up the current states of the scheduled messages with these numbers, in their order.

    `map_verdicts` replaces, in a cluster, the verdicts of messages that were moved to another group (grouped.py).
    """
    states: list[SentState] = []
    for start in range(0, len(numbers), limits.CANCELS_PER_REQUEST_MAX):
        states += await _states(
            look_ups, numbers[start : start + limits.CANCELS_PER_REQUEST_MAX], map_verdicts
        )
    return states


async def _states(
    look_ups: LookUps, numbers: Sequence[int], map_verdicts: Callable[[list[Verdict]], list[Verdict]]
) -> list[SentState]:
    outcomes, names = look_ups.outcomes, Names(seqs=numbers)
    # Before the verdicts, because the verdict of a settled message does not contain its due time.
    due_ms = {candidate.number: candidate.due_ms for candidate in (await look_ups.look_up(names)).candidates}

    async def pending_verdicts(candidates: list[Candidate]) -> dict[int, Verdict]:
        # The message may have been rescheduled since the first lookup.
        due_ms.update({candidate.number: candidate.due_ms for candidate in candidates})
        are_pending = outcomes.waits(*due_version_columns(candidates)).tolist()
        return {
            candidate.number: Verdict("", WAITING, candidate.number)
            for candidate, is_pending in zip(candidates, are_pending, strict=True)
            if is_pending
        }

    # There is one verdict for each number, in order.
    verdicts = map_verdicts(await settle(look_ups, names, pending_verdicts))
    return [
        SentState(_STATES.get(verdict.verdict, verdict.verdict), due_ms.get(number))
        for number, verdict in zip(numbers, verdicts, strict=True)
    ]
