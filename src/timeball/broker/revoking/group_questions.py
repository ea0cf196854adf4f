"""The questions that a node of a cluster asks of the leaders of other groups, and their answers.

A question is answered by the group that it comes to, from its own log, and never passed on: so no question goes round
in circles. The caller is asked again there, with the accounts of that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from timeball.access import Caller
from timeball.wire import MessagePlace, Verdict

ASK_S = 3.0  # a group has for its answer, a change of its leader included


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all. A field that a group of an older version does not know makes it refuse, which is a silence."""


class CancelHere(Question, frozen=True, tag_field="ask", tag="cancel"):
    """Cancel what this group has of these."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None


class RescheduleHere(Question, frozen=True, tag_field="ask", tag="reschedule"):
    """Move what this group has of these to an instant, or so far from now."""

    ids: list[str] = []
    keys: list[str] = []
    topic: str | None = None
    due_ms: int | None = None
    delay_ms: int | None = None


class FindHere(Question, frozen=True, tag_field="ask", tag="find"):
    """Say where this group has messages with an id."""

    id: str
    topic: str | None = None


class RecallHere(Question, frozen=True, tag_field="ask", tag="recall"):
    """Take back the message that a recall handle of this group names."""

    topic: str
    handle: str


class RouteHere(Question, frozen=True, tag_field="ask", tag="route"):
    """Say which queues this group has of a topic; `consumer_group`: for a consumer of this group."""

    topic: str
    consumer_group: str | None = None


class AdoptHere(Question, frozen=True, tag_field="ask", tag="adopt"):
    """Take over a transfer of a group that is drained since then; `transfer` 0: say whether this group would.

    `rows`: as broker/handed_rows.py encodes them.
    """

    source: str
    since_ms: int
    transfer: int = 0
    rows: bytes = b""


AnyQuestion = CancelHere | RescheduleHere | FindHere | RecallHere | RouteHere | AdoptHere


class GroupRoute(msgspec.Struct, frozen=True):
    """The queues of a topic in one group. `message_type`: the attribute that says which messages it takes."""

    broker_name: str
    read_queues: int
    write_queues: int
    message_type: str
    in_order: bool


class Refusal(msgspec.Struct, frozen=True):
    """The error of a verb. `verdict`: of a recall that was refused, the last known since `at_ms`."""

    code: str
    text: str
    verdict: str = ""
    at_ms: int | None = None


class GroupAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a group: the field of its question, or a refusal. No `route`: it does not have the topic."""

    verdicts: list[Verdict] = []
    places: list[MessagePlace] = []
    message_id: str = ""
    route: GroupRoute | None = None
    refusal: Refusal | None = None


class OtherGroups(Protocol):
    """The groups of the cluster besides this node's own, as the broker asks them."""

    def names(self) -> Sequence[str]:
        """Return their names; raise Unavailable while it is not known which there are."""

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        """Ask a group's leader; None when it does not answer in time, or not with an answer."""

    def grpc_address(self, group: str) -> tuple[str, int] | None:
        """Return where RocketMQ 5's clients reach a group's leader; None while it has none."""
