"""The current states of the messages of a send that is repeated with its idempotency key. Only reads.

The caller has sent these messages, so it needs no permission to look them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from timeball.broker.revoking.cancel import settle
from timeball.broker.revoking.find_message import WAITING
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import CANCELLED, RELEASED, Candidate, Names, pairs
from timeball.model import limits
from timeball.model.answers import SentState
from timeball.model.wire import Verdict

# A message that was sent for a due time in the past has no scheduled message: it was visible at once.
_STATES = {RELEASED: "visible", "not_found": "visible", CANCELLED: "cancelled"}


async def sent_states(
    look_ups: LookUps, numbers: Sequence[int], map_verdicts: Callable[[list[Verdict]], list[Verdict]] = list
) -> list[SentState]:
    """Return the current states of scheduled messages, in the order of `numbers`.

    `map_verdicts` replaces, in a cluster, the verdicts of messages that were moved to another group (grouped.py).
    """
    found: list[SentState] = []
    for start in range(0, len(numbers), limits.CANCELS_PER_REQUEST_MAX):
        found += await _states(
            look_ups, numbers[start : start + limits.CANCELS_PER_REQUEST_MAX], map_verdicts
        )
    return found


async def _states(
    look_ups: LookUps, numbers: Sequence[int], map_verdicts: Callable[[list[Verdict]], list[Verdict]]
) -> list[SentState]:
    outcomes, names = look_ups.outcomes, Names(seqs=numbers)
    # Before the verdicts, because the verdict of a settled message does not contain its due time.
    due_ms = {c.number: c.due_ms for c in (await look_ups.look_up(names)).candidates}

    async def look(named: list[Candidate]) -> dict[int, Verdict]:
        # It may have been rescheduled since the first lookup.
        due_ms.update({c.number: c.due_ms for c in named})
        waits = outcomes.waits(*pairs(named)).tolist()
        return {
            c.number: Verdict("", WAITING, c.number) for c, does in zip(named, waits, strict=True) if does
        }

    # One verdict for each number, in their order.
    verdicts = map_verdicts(await settle(look_ups, names, look))
    return [
        SentState(_STATES.get(each.verdict, each.verdict), due_ms.get(number))
        for number, each in zip(numbers, verdicts, strict=True)
    ]
