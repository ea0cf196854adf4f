"""Requests of other groups of the cluster. They are answered from this group's log and never forwarded."""

from __future__ import annotations

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.revoking.group_questions import AnyQuestion
from timeball.broker.service import Broker
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, read
from timeball.model.access import Verb
from timeball.model.errors import NotFound, NotLeader


class GroupQuestions:
    """Serves the requests of other nodes, which ask on behalf of their callers. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/cluster/{group}": {"POST": self._answer}}

    async def _answer(self, call: Call) -> Answer:
        broker, group = self._broker, call.path["group"]
        if not isinstance(broker, GroupedBroker):
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        if group != broker.group:
            # The directory of the asking node is outdated. The verb would answer without the messages that the node
            # asked for.
            raise NotLeader(f"this node leads group {broker.group}, and not {group}")
        question: AnyQuestion = await read(call, AnyQuestion, broker.policy, Verb.LOOK)  # type: ignore[arg-type]
        return Answer(200, await broker.answer(question, call.caller))
