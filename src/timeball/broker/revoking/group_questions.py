"""Requests between the groups of a cluster ("questions"), their answers, and the merge of the answers.

A node asks the leaders of other groups. A group answers a question from its own log and never forwards it, so no
question circulates. It checks the caller's permissions again, with the accounts of its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from timeball.model.access import Caller
from timeball.model.answers import HANDED, UNAVAILABLE, MessagePlace, Verdict
from timeball.model.errors import Unavailable

ASK_S = 3.0  # time limit for an answer, long enough for a change of leader


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all questions. A group with an older version refuses unknown fields. This counts as no answer."""


class CancelHere(Question, frozen=True, tag_field="ask", tag="cancel"):
    """Cancel the group's scheduled messages with these names."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None


class RescheduleHere(Question, frozen=True, tag_field="ask", tag="reschedule"):
    """Move the group's scheduled messages with these names to a due time, or to a delay from now."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None
    due_ms: int | None = None  # exactly one of due_ms and delay_ms is set
    delay_ms: int | None = None  # from the time when the group answers


class FindHere(Question, frozen=True, tag_field="ask", tag="find"):
    """Find the group's messages with an id."""

    id: str
    topic: str | None = None


class RecallHere(Question, frozen=True, tag_field="ask", tag="recall"):
    """Cancel the message of a recall handle that this group created."""

    topic: str
    handle: str  # as in the answer to the producer's send


class RouteHere(Question, frozen=True, tag_field="ask", tag="route"):
    """List the group's queues of a topic. `consumer_group`: the consumer group of the client that asks, if any."""

    topic: str
    consumer_group: str | None = None


class AdoptHere(Question, frozen=True, tag_field="ask", tag="adopt"):
    """Store the messages of a transfer from a drained group. `transfer` 0: only ask whether the group accepts them."""

    source: str  # the drained group
    since_ms: int  # the start of the drain, which identifies it
    transfer: int = 0  # number of the transfer within the drain, from 1
    rows: bytes = b""  # the messages, as encoded by drain_rows.py. Empty for `transfer` 0


AnyQuestion = CancelHere | RescheduleHere | FindHere | RecallHere | RouteHere | AdoptHere


class GroupRoute(msgspec.Struct, frozen=True):
    """The queues of a topic in one group."""

    broker_name: str  # as RocketMQ's clients know this group
    read_queues: int
    write_queues: int
    message_type: str  # the topic's attribute `message.type`: the messages that it accepts
    in_order: bool  # whether the consumer group of the question consumes in order


class Refusal(msgspec.Struct, frozen=True):
    """The error of a refused operation. `verdict` and `at_ms`: only for a refused recall."""

    code: str  # TimeballError.code
    text: str
    verdict: str = ""
    at_ms: int | None = None


class GroupAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a group: either `refusal`, or the one field for the type of its question, is set.

    `route` None as answer to RouteHere: the group does not have the topic.
    """

    verdicts: list[Verdict] = []  # the answer to CancelHere and RescheduleHere
    places: list[MessagePlace] = []  # the answer to FindHere
    message_id: str = ""  # the answer to RecallHere
    route: GroupRoute | None = None  # the answer to RouteHere
    refusal: Refusal | None = None


class OtherGroups(Protocol):
    """The other groups of the cluster, as the broker sees them."""

    def names(self) -> Sequence[str]:
        """List the names of the other groups. Raises Unavailable while they are not known."""

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        """Ask a group's leader. None if there is no valid answer within `within_s` seconds."""

    def grpc_address(self, group: str) -> tuple[str, int] | None:
        """Find the address of a group's leader for RocketMQ 5's clients. None while the group has no leader."""


# ---- merge of the answers ------------------------------------------------------------------------------------
# The other verdicts follow after `unavailable`, because these cancels and moves are durable. If the request is
# repeated, the groups report them again. A lookup changes nothing, so one group that finds messages is enough.

DONE = ("cancelled", "rescheduled")
NOT_FOUND = "not_found"


def merge_verdicts(
    subjects: Iterable[str], group_verdicts: Sequence[Sequence[Verdict] | None]
) -> list[Verdict]:
    """Merge the verdicts of all groups, in the order of `subjects`, the requested names.

        some groups have messages    their verdicts
        no group has a message       `not_found`, if all groups have answered
        a group does not answer      `unavailable`, before all other verdicts: this group may have messages, too. The
                                     same for a message that is on its way from one group to another
        a message was handed over    the verdict of the group that has it now. If no group has it, `handed` remains: the
                                     others may have answered before it arrived, so the caller should ask them again

    `group_verdicts` has an element for each group: None for a group that did not answer. If all have answered, each
    subject has a verdict of at least one group.
    """
    by_subject: dict[str, list[Verdict]] = defaultdict(list)
    not_found: dict[str, list[Verdict]] = {}
    for verdicts in group_verdicts:
        for verdict in verdicts or ():
            if verdict.verdict == NOT_FOUND:
                # Every group without the message gives this verdict. One of them is enough.
                not_found[verdict.subject] = [verdict]
            else:
                by_subject[verdict.subject].append(verdict)
    has_silent_group = any(verdicts is None for verdicts in group_verdicts)
    merged_verdicts = []
    for subject in dict.fromkeys(subjects):
        definite_verdicts = [verdict for verdict in by_subject[subject] if verdict.verdict != UNAVAILABLE]
        # A group answers `unavailable` for a message that it is transferring to another group.
        is_moving = len(definite_verdicts) < len(by_subject[subject])
        not_handed = [verdict for verdict in definite_verdicts if verdict.verdict != HANDED]
        # The sort is stable: each group has its newest message first, and numbers of two groups have no common order.
        settled_first = sorted(not_handed, key=lambda verdict: verdict.verdict not in DONE)
        unavailable = [Verdict(subject, UNAVAILABLE)] if has_silent_group or is_moving else []
        # If both lists are empty, all definite verdicts are `handed`.
        merged_verdicts += unavailable + settled_first or definite_verdicts[:1] or not_found[subject]
    return merged_verdicts


def merge_places(group_places: Sequence[Sequence[MessagePlace] | None]) -> list[MessagePlace]:
    """Merge the lookup results of all groups (None for a group that did not answer), pending messages first.

    Raises Unavailable if no group found a message and a group did not answer.
    """
    answers = [places for places in group_places if places]
    if not answers and any(places is None for places in group_places):
        raise Unavailable(
            "a group of the cluster did not answer, and the others have no such message; ask again"
        )
    # A single group has sorted its messages already.
    if len(answers) == 1:
        return list(answers[0])
    # Pending messages first, then visible ones, the latest first.
    return sorted(
        (place for places in answers for place in places),
        key=lambda place: (place.state != "waiting", -(place.at_ms or place.due_ms or 0)),
    )
