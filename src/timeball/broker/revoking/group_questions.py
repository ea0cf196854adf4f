"""The questions that a node of a cluster asks the leaders of other groups, and their answers.

The group that receives a question answers it from its own log, and never forwards it, so no question circulates. It
checks the caller's permissions again, with the accounts of its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from timeball.model.access import Caller
from timeball.model.wire import MessagePlace, Verdict

ASK_S = 3.0  # the time limit of an answer, including a change of the group's leader


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all questions. A group of an older version refuses unknown fields, which counts as no answer."""


class CancelHere(Question, frozen=True, tag_field="ask", tag="cancel"):
    """Cancel the promises with these names that this group has."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None


class RescheduleHere(Question, frozen=True, tag_field="ask", tag="reschedule"):
    """Move the promises with these names that this group has, to a due time or by a delay from now."""

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

    `since_ms`: the start of the drain. `rows`: encoded by broker/revoking/handed_rows.py.
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
