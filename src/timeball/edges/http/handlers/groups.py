"""Consumer groups over HTTP: their lag, and their dead letters to list, resend and delete."""

from __future__ import annotations

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.revoking.group_questions import AnyQuestion
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, read
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage, NotFound, NotLeader, OutOfRange

PAGE_ROWS = 50


class Groups:
    """Serves the paths of groups. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        letters = "/v1/groups/{group}/dead-letters"
        self.paths: Paths = {
            "/v1/groups": {"GET": self._list},
            "/v1/groups/{group}": {"GET": self._look},
            letters: {"GET": self._browse},
            f"{letters}/resend": {"POST": self._resend},
            f"{letters}/delete": {"POST": self._delete},
        }

    async def _list(self, call: Call) -> Answer:
        rows = _rows(call, limits.LISTED_ROWS_MAX, limits.LISTED_ROWS_MAX)
        found = await self._broker.groups.page(rows, call.query.get("page"), call.caller)
        return Answer(200, answers_codec.Groups(found.groups, found.next_page))

    async def _look(self, call: Call) -> Answer:
        return Answer(200, await self._broker.groups.one(call.path["group"], call.caller))

    async def _browse(self, call: Call) -> Answer:
        rows = _rows(call, PAGE_ROWS, limits.DEAD_LETTERS_PER_REQUEST_MAX)
        page = await self._broker.dead_letters.page(
            call.path["group"], rows, call.query.get("page"), call.caller
        )
        size_bytes = sum(len(letter.body) for letter in page.dead_letters)
        return Answer(200, answers_codec.dead_letters(page), size_bytes=size_bytes)

    async def _resend(self, call: Call) -> Answer:
        named = _named(await read(call, codec.Resolving, self._broker.policy, Verb.ADMIN))
        found = await self._broker.dead_letters.resend(call.path["group"], named, call.caller)
        return Answer(200, answers_codec.dealt(named or [], found.found, found.rows, "resent"))

    async def _delete(self, call: Call) -> Answer:
        named = _named(await read(call, codec.Resolving, self._broker.policy, Verb.ADMIN))
        found = await self._broker.dead_letters.delete(call.path["group"], named, call.caller)
        return Answer(200, answers_codec.dealt(named or [], found.found, found.rows, "deleted"))


def _rows(call: Call, otherwise: int, most: int) -> int:
    """Parse the number of rows of a page from `max`. Raises OutOfRange."""
    rows = call.query.get("max", str(otherwise))
    if not (rows.isascii() and rows.isdecimal() and len(rows) < 9 and 1 <= int(rows) <= most):
        raise OutOfRange(f"max={rows[:20]}: 1 to {most}")
    return int(rows)


def _named(request: codec.Resolving) -> list[str] | None:
    """Extract the dead letters of a request, None for all. Raises InvalidMessage and OutOfRange."""
    if (request.dead_letters is None) != request.all:
        raise InvalidMessage('name "dead_letters", or "all": true')
    most = limits.DEAD_LETTERS_PER_REQUEST_MAX
    if request.dead_letters is not None and len(request.dead_letters) > most:
        raise OutOfRange(f"{len(request.dead_letters)} dead letters: at most {most} in one request")
    return request.dead_letters


# Requests of other groups of the cluster. They are answered from this group's log and never forwarded.


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
