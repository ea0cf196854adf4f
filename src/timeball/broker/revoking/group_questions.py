"""The questions that a node of a cluster asks the leaders of other groups, and their answers.

The group that receives a question answers it from its own log, and never forwards it, so no question circulates. It
checks the caller's permissions again, with the accounts of its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from timeball.model.access import Caller
from timeball.model.errors import Unavailable
from timeball.model.wire import HANDED, UNAVAILABLE, MessagePlace, Verdict

ASK_S = 3.0  # the time limit of an answer, including a change of the group's leader


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all questions. A group of an older version refuses unknown fields, which counts as no answer."""


class CancelHere(Question, frozen=True, tag_field="ask", tag="cancel"):
    """Cancel the scheduled messages with these names that this group has."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None


class RescheduleHere(Question, frozen=True, tag_field="ask", tag="reschedule"):
    """Move the scheduled messages with these names that this group has, to a due time or by a delay from now."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None
    due_ms: int | None = None  # exactly one of due_ms and delay_ms is set
    delay_ms: int | None = None  # from the time when the group answers


class FindHere(Question, frozen=True, tag_field="ask", tag="find"):
    """Find the messages with an id in this group."""

    id: str
    topic: str | None = None


class RecallHere(Question, frozen=True, tag_field="ask", tag="recall"):
    """Take back the message that a recall handle of this group names."""

    topic: str
    handle: str  # as the producer got it


class RouteHere(Question, frozen=True, tag_field="ask", tag="route"):
    """List the queues that this group has of a topic. `consumer_group`: for a consumer of this consumer group."""

    topic: str
    consumer_group: str | None = None


class AdoptHere(Question, frozen=True, tag_field="ask", tag="adopt"):
    """Take over a transfer of a drained group. `transfer` 0: only answer whether this group would.

    `since_ms`: the start of the drain. `rows`: encoded by broker/revoking/drain_rows.py.
    """

    source: str
    since_ms: int  # the start of the drain, which identifies it
    transfer: int = 0  # number of the transfer within the drain
    rows: bytes = b""  # empty for `transfer` 0


AnyQuestion = CancelHere | RescheduleHere | FindHere | RecallHere | RouteHere | AdoptHere


class GroupRoute(msgspec.Struct, frozen=True):
    """The queues of a topic in one group. `message_type`: the attribute with the type of messages that it accepts."""

    broker_name: str  # as RocketMQ's clients know this group
    read_queues: int
    write_queues: int
    message_type: str  # RocketMQ's topic attribute
    in_order: bool  # whether the consumer group of the question consumes in order


class Refusal(msgspec.Struct, frozen=True):
    """The error of an operation. `verdict`: of a refused recall, known since `at_ms`."""

    code: str  # TimeballError.code
    text: str
    verdict: str = ""
    at_ms: int | None = None


class GroupAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a group: the field of its question, or a refusal. Without `route` it does not have the topic."""

    verdicts: list[Verdict] = []  # the answer to CancelHere and RescheduleHere
    places: list[MessagePlace] = []  # the answer to FindHere
    message_id: str = ""  # the answer to RecallHere
    route: GroupRoute | None = None  # the answer to RouteHere
    refusal: Refusal | None = None


class OtherGroups(Protocol):
    """The other groups of the cluster, as the broker sees them."""

    def names(self) -> Sequence[str]:
        """Return their names. Raise Unavailable while they are not known."""

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        """Ask a group's leader. Return None if there is no valid answer in time."""

    def grpc_address(self, group: str) -> tuple[str, int] | None:
        """Return the address of a group's leader for RocketMQ 5's clients, or None while it has none."""


# Merge of the answers that the groups of a cluster give for the messages that a caller has named.
#
#     found in one       its verdict; all of them, where several groups have messages of the name
#     found in none      not_found, if all have answered
#     one is silent      unavailable, before all else: the silent group may have messages of this name, too. The same
# for                        a message that is being transferred between groups, as the sending group reports     handed
# over        the verdict of the group that has it now. If none has it, `handed` remains: the others may have
# answered before it arrived, so the caller should ask them once more
#
# Verdicts of other groups follow after `unavailable`, because their effect is durable. If the request is repeated,
# these groups report it again. A lookup only reads, so if any group finds something, that is the answer.

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
