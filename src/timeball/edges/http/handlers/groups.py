"""Consumer groups over HTTP: their lag, and listing, resending and deleting their dead letters."""

from __future__ import annotations

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.revoking.group_questions import AnyQuestion
from timeball.broker.service import Broker
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, read_request
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage, NotFound, NotLeader, OutOfRange

DEAD_LETTERS_PER_PAGE = 50


class Groups:
    """Serves the paths of consumer groups. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        dead_letters_path = "/v1/groups/{group}/dead-letters"
        self.paths: Paths = {
            "/v1/groups": {"GET": self._list},
            "/v1/groups/{group}": {"GET": self._get_group},
            dead_letters_path: {"GET": self._list_dead_letters},
            f"{dead_letters_path}/resend": {"POST": self._resend_dead_letters},
            f"{dead_letters_path}/delete": {"POST": self._delete_dead_letters},
        }

    async def _list(self, call: Call) -> Answer:
        rows = _parse_row_count(call, limits.LISTED_ROWS_MAX, limits.LISTED_ROWS_MAX)
        page = await self._broker.groups.page(rows, call.query.get("page"), call.caller)
        return Answer(200, answers_codec.Groups(page.groups, page.next_page))

    async def _get_group(self, call: Call) -> Answer:
        return Answer(200, await self._broker.groups.one(call.path["group"], call.caller))

    async def _list_dead_letters(self, call: Call) -> Answer:
        rows = _parse_row_count(call, DEAD_LETTERS_PER_PAGE, limits.DEAD_LETTERS_PER_REQUEST_MAX)
        page = await self._broker.dead_letters.page(
            call.path["group"], rows, call.query.get("page"), call.caller
        )
        size_bytes = sum(len(dead_letter.body) for dead_letter in page.dead_letters)
        return Answer(200, answers_codec.show_dead_letters(page), size_bytes=size_bytes)

    async def _resend_dead_letters(self, call: Call) -> Answer:
        handles = _named_dead_letters(
            await read_request(call, codec.Resolving, self._broker.policy, Verb.ADMIN)
        )
        result = await self._broker.dead_letters.resend(call.path["group"], handles, call.caller)
        return Answer(200, answers_codec.show_outcomes(handles or [], result.found, result.rows, "resent"))

    async def _delete_dead_letters(self, call: Call) -> Answer:
        handles = _named_dead_letters(
            await read_request(call, codec.Resolving, self._broker.policy, Verb.ADMIN)
        )
        result = await self._broker.dead_letters.delete(call.path["group"], handles, call.caller)
        return Answer(200, answers_codec.show_outcomes(handles or [], result.found, result.rows, "deleted"))


def _parse_row_count(call: Call, default: int, rows_max: int) -> int:
    """Parse the query parameter `max`, the number of rows of a page. Raises OutOfRange."""
    text = call.query.get("max", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= rows_max):
        raise OutOfRange(f"max={text[:20]}: 1 to {rows_max}")
    return int(text)


def _named_dead_letters(request: codec.Resolving) -> list[str] | None:
    """Extract the handles of dead letters from a request, None for all. Raises InvalidMessage and OutOfRange."""
    if (request.dead_letters is None) != request.all:
        raise InvalidMessage('name "dead_letters", or "all": true')
    handles_max = limits.DEAD_LETTERS_PER_REQUEST_MAX
    if request.dead_letters is not None and len(request.dead_letters) > handles_max:
        raise OutOfRange(f"{len(request.dead_letters)} dead letters: at most {handles_max} in one request")
    return request.dead_letters


# Requests from nodes of other cluster groups. They are answered from this group's log, and never forwarded.


class GroupQuestions:
    """Serves the requests that other nodes make on behalf of their callers. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/cluster/{group}": {"POST": self._answer}}

    async def _answer(self, call: Call) -> Answer:
        """Answer a request of another node, if this node leads the requested group."""
        broker, group = self._broker, call.path["group"]
        if not isinstance(broker, GroupedBroker):
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        if group != broker.group:
            # The asking node has an outdated directory of the groups. An answer from this group would lack the messages
            # that it asked for.
            raise NotLeader(f"this node leads group {broker.group}, and not {group}")
        question: AnyQuestion = await read_request(
            call,
            AnyQuestion,  # type: ignore[arg-type]
            broker.policy,
            Verb.LOOK,
        )
        return Answer(200, await broker.answer(question, call.caller))
