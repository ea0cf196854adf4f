"""Find the messages with an id, and the states of the messages of a send that is repeated.

`find_message` returns states, queue positions and, if permitted, the content. A `MessagePlace` (model/answers.py)
describes one message. Copies that return to a consumer after a failed delivery are left out unless the caller names
their topic (scheduled_lookup.py). Of many messages with an id, only the newest are found, and only the newest of these
have a content. `sent_states` returns only states.

Both only read. They end no scheduled message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
import pyarrow as pa

from timeball.broker.consuming.group_places import Copy, GroupPlaces, copies_by_message, copy_of
from timeball.broker.registry.selections import reason_of
from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.cancel import settle, settle_found
from timeball.broker.revoking.scheduled_lookup import (
    CANCELLED,
    RELEASED,
    Candidate,
    LookupResult,
    LookUps,
    Names,
    due_version_columns,
    is_on_its_way_back,
)
from timeball.io.threads import Threads, in_slices, in_thread
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.answers import Content, MessagePlace, SentState, Verdict
from timeball.model.bodies import readable_body
from timeball.model.key_hash import hash_text
from timeball.model.message import BASE, CANCEL_REASON, CANCELLED_BY, READ_SCHEMA, Kind, decode_properties
from timeball.model.send_options import EXPIRED_PREFIX
from timeball.schedule.hour_log import HourLog
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduling
from timeball.table.key_index import TableKeys

WAITING = "waiting"

MayRead = Callable[[str], bool]  # whether the caller may see bodies of a topic


READ_ROWS = 16  # pending messages that are read at once: each may have a body of 4 MiB
# Rows of the log that are read at once: rows of a frame are decoded together, so fewer cost more.
LOG_ROWS = 128

_COLUMNS = [
    "seq", "kind", "topic", "queue_id", "queue_offset", "unique_key", "due_ms", "store_ms", "source_seq",
    "reconsume_times", "tag", "keys", "properties", "sys_flag",
]  # fmt: skip


@dataclass(slots=True)
class _RowsByKind:
    """The rows of the log that carry an id, grouped by kind."""

    # The newest ones (FOUND_MESSAGES_MAX and one more), by the seq of the visible row.
    visible: dict[int, MessagePlace] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    # The properties of each CANCEL row, by the number of the cancelled message.
    cancels: dict[int, dict[str, str]] = field(default_factory=dict)
    # The visible rows that have a content, in the order of the log, and the bytes of their bodies.
    _with_content: deque[int] = field(default_factory=deque)
    _body_bytes: int = 0

    def add_visible(self, seq: int, place: MessagePlace) -> None:
        """Add a visible row. If the bodies become too large, older rows lose their content."""
        self.visible[seq] = place
        if place.content is None:
            return
        self._with_content.append(seq)
        self._body_bytes += len(place.content.body)
        while self._body_bytes > limits.FOUND_BODY_BYTES_MAX:
            oldest_seq = self._with_content.popleft()
            content = self.visible[oldest_seq].content
            assert content is not None
            self._body_bytes -= len(content.body)
            self.visible[oldest_seq] = _without_content(self.visible[oldest_seq])

    def drop_oldest(self) -> None:
        """Keep only the newest visible messages: FOUND_MESSAGES_MAX, and one more that shows that there are others."""
        if len(self.visible) > limits.FOUND_MESSAGES_MAX + 1:
            by_number = sorted(self.visible.items(), key=lambda item: item[1].seq, reverse=True)
            self.visible = dict(sorted(by_number[: limits.FOUND_MESSAGES_MAX + 1]))


async def find_message(
    look_ups: LookUps,
    names: Names,
    may_read: MayRead,
    groups: GroupPlaces,
    *,
    log: CommitLog,
    scheduling: Scheduling,
    file_keys: TableKeys,
    threads: Threads,
) -> list[MessagePlace]:
    """Find the messages with the id in `names`, the newest first. The list is empty for an unknown id.

    It has at most FOUND_MESSAGES_MAX messages, and one more if there are older ones. A message has no content if
    `may_read` refuses its topic, or if newer messages have too many bytes (`limit_contents`). Raises the errors of
    `cancel.settle`.
    """
    pending: dict[int, Candidate] = {}
    names.check()
    async with look_ups.gate.passing():
        lookup = await look_ups.look_up_present(names)
        log_rows = lookup.rows

        async def add_pending(candidates: Sequence[Candidate], verdicts: dict[int, Verdict]) -> None:
            """Collect the pending candidates, and give them the verdict `waiting` (an `Act`)."""
            nonlocal log_rows
            # A file may still contain a message whose RELEASE or CANCEL row has left the log. So the schedule decides
            # which messages are pending.
            pending_candidates = await pending_ones(scheduling.outcomes, candidates)
            if len(pending_candidates) < len(candidates):
                log_rows = None  # the rows of some messages came after the look-up, or are not durable yet
            async for part in in_slices(pending_candidates):
                pending.update({candidate.number: candidate for candidate in part})
                verdicts.update({candidate.number: _waiting_verdict(candidate) for candidate in part})

        newest = await _newest(await settle_found(look_ups, names, lookup, add_pending))
    if log_rows is not None:
        named_rows = [dict(zip(READ_SCHEMA.names, row, strict=True)) for row in log_rows]
        rows_by_kind = _RowsByKind()
        _add_rows(rows_by_kind, named_rows, lambda index: named_rows[index]["body"], names, may_read)
    else:
        # Read after the verdicts: a message that was released meanwhile is then found as a visible row.
        rows_by_kind = await in_thread(
            threads.reader, _read_log, names, may_read, reader=log.reader, key_index=log.key_index
        )
    waiting = [pending[number] for number, verdict in newest.items() if verdict.verdict == WAITING]
    # The content needs a permission that the state does not need. It is read last, because a look-up that waits for a
    # thread should hold no bodies.
    contents, unread = await _contents_of(
        [candidate for candidate in waiting if may_read(candidate.shown_topic)],
        reader=log.reader, scheduling=scheduling, file_keys=file_keys, file_thread=threads.files,
    )  # fmt: skip
    places = await _visible_places(rows_by_kind, groups)
    pause_properties = _pause_properties(waiting)
    for number, verdict in newest.items():
        state = "cancelled" if verdict.verdict == "already_cancelled" else verdict.verdict
        if number not in places:
            candidate = pending.get(number)
            topic = None if candidate is None else candidate.shown_topic
            properties = pause_properties.get(number) or _cancel_properties(number, rows_by_kind, lookup)
            places[number] = MessagePlace(
                state, number, topic, at_ms=verdict.at_ms, due_ms=verdict.due_ms,
                content=contents.get(number) if state == WAITING else None,
                by=properties.get(CANCELLED_BY), reason=properties.get(CANCEL_REASON),
                content_cut=number in unread,
            )  # fmt: skip
    return limit_contents([places[number] for number in sorted(places, reverse=True)])


async def _visible_places(rows: _RowsByKind, groups: GroupPlaces) -> dict[int, MessagePlace]:
    """Add to the visible messages their states in the consumer groups. Returns the messages by number."""
    copies_by_row = copies_by_message(rows.copies, rows.visible)
    places: dict[int, MessagePlace] = {}
    async for part in in_slices(list(rows.visible.values())):
        for place in part:
            in_groups = await groups.of(place, copies_by_row[place.seq])
            places[place.seq] = msgspec.structs.replace(place, groups=in_groups)
    return places


async def _newest(verdicts: Sequence[Verdict]) -> dict[int, Verdict]:
    """Select the verdicts of the newest messages (FOUND_MESSAGES_MAX and one more), by number, the newest first.

    A released message is left out. It has a visible row, unless the log no longer has that row.
    """
    newest: list[tuple[int, Verdict]] = []
    async for part in in_slices(verdicts):
        newest += [
            (verdict.seq, verdict)
            for verdict in part
            if verdict.verdict not in ("released", "not_found") and verdict.seq is not None
        ]
        newest.sort(key=itemgetter(0), reverse=True)
        del newest[limits.FOUND_MESSAGES_MAX + 1 :]
    return dict(newest)


def limit_contents(places: Sequence[MessagePlace]) -> list[MessagePlace]:
    """Return the first places (FOUND_MESSAGES_MAX and one more), whose bodies together have FOUND_BODY_BYTES_MAX.

    From the first body that exceeds this limit on, the places lose their contents (`content_cut` is True then).
    """
    limited: list[MessagePlace] = []
    free_bytes = limits.FOUND_BODY_BYTES_MAX
    for place in places[: limits.FOUND_MESSAGES_MAX + 1]:
        free_bytes -= 0 if place.content is None else len(place.content.body)
        limited.append(_without_content(place) if free_bytes < 0 and place.content is not None else place)
    return limited


def _without_content(place: MessagePlace) -> MessagePlace:
    """Copy a place without its content, and mark that the content was left out."""
    return msgspec.structs.replace(place, content=None, content_cut=True)


def _waiting_verdict(candidate: Candidate) -> Verdict:
    return Verdict("", WAITING, candidate.number, due_ms=candidate.shown_due_ms)


def _pause_properties(candidates: Sequence[Candidate]) -> dict[int, dict[str, str]]:
    """Name the selection that pauses a message, in the form of a CANCEL row's properties, by number.

    Messages that no selection pauses are left out.
    """
    return {
        candidate.number: {CANCEL_REASON: f"paused by {reason_of(candidate.change.holder.name)}"}
        for candidate in candidates
        if candidate.change is not None and candidate.change.holder is not None
    }


def _cancel_properties(number: int, rows: _RowsByKind, lookup: LookupResult) -> dict[str, str]:
    """Find the properties of the CANCEL row of a message. Empty without one.

    If a selection has cancelled the message, the row follows later, and its properties are built here.
    """
    owner = lookup.selected.get(number)
    if owner is None:
        return rows.cancels.get(number, {})
    return decode_properties(owner.facts.reason_properties(owner.name))


async def pending_ones(outcomes: Outcomes, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Select the messages that are pending, in their order. Other tasks run between two slices."""
    pending = list[Candidate]()
    async for part in in_slices(candidates):
        are_pending = outcomes.are_pending(*due_version_columns(part)).tolist()
        pending += [candidate for candidate, is_pending in zip(part, are_pending, strict=True) if is_pending]
    return pending


async def _contents_of(
    candidates: Sequence[Candidate],
    *,
    reader: LogReader,
    scheduling: Scheduling,
    file_keys: TableKeys,
    file_thread: Executor,
) -> tuple[dict[int, Content], set[int]]:
    """Find the content of these scheduled messages, by number, in the rows of the look-up or in log and table.

    Also returns the numbers of the messages that are not read, because the bodies of earlier ones have
    FOUND_BODY_BYTES_MAX.
    """
    contents = {
        candidate.number: _content(dict(zip(READ_SCHEMA.names, candidate.row, strict=True)))
        for candidate in candidates
        if candidate.row is not None
    }
    without_row = [candidate for candidate in candidates if candidate.row is None]
    if not without_row:
        return contents, set()
    contents_read, unread = await in_thread(
        file_thread,
        _read_contents,
        without_row,
        reader=reader,
        hour_log=scheduling.hour_log,
        file_keys=file_keys,
    )
    return contents | contents_read, unread


def _read_contents(
    candidates: list[Candidate], *, reader: LogReader, hour_log: HourLog, file_keys: TableKeys
) -> tuple[dict[int, Content], set[int]]:
    """Read the contents of these messages, by number, until the bodies have FOUND_BODY_BYTES_MAX (file thread).

    Messages that are in neither log nor table any more are left out. Also returns the numbers of the messages that are
    not read.
    """
    number_by_seq = {candidate.seq: candidate.number for candidate in candidates}
    # The list of files is taken in this thread, because it is the one that deletes files: so no listed file disappears
    # before it is read. (Without a deletion in this thread, files stay for a day after they left the table.)
    live_files = hour_log.pending.live
    contents: dict[int, Content] = {}
    body_bytes = begin = 0
    while begin < len(candidates) and body_bytes < limits.FOUND_BODY_BYTES_MAX:
        part = candidates[begin : begin + READ_ROWS]
        begin += READ_ROWS
        for row in scheduled_lookup.read_scheduled_rows(reader, file_keys, live_files, part).to_pylist():
            if row["seq"] in number_by_seq:
                contents[number_by_seq[row["seq"]]] = content = _content(row)
                body_bytes += len(content.body)
    return contents, {candidate.number for candidate in candidates[begin:]}


def _read_log(names: Names, may_read: MayRead, *, reader: LogReader, key_index: KeyIndex) -> _RowsByKind:
    """Read the rows of the log with these ids, and group them by kind (reader thread)."""
    result, seqs = _RowsByKind(), key_index.find_rows(hash_text(pa.array(names.ids, pa.string())))
    for begin in range(0, len(seqs), LOG_ROWS):
        rows = reader.read_rows(seqs[begin : begin + LOG_ROWS])
        bodies = partial(_body_at, rows.column("body"))
        _add_rows(result, rows.select(_COLUMNS).to_pylist(), bodies, names, may_read)
    result.drop_oldest()
    return result


def _body_at(bodies: pa.Array, index: int) -> bytes | None:
    body: bytes | None = bodies[index].as_py()
    return body


def _add_rows(
    result: _RowsByKind,
    rows: Iterable[Mapping[str, Any]],
    body_of: Callable[[int], bytes | None],
    names: Names,
    may_read: MayRead,
) -> None:
    """Add rows of the log to `result`. Rows without an id of `names`, or whose topics it excludes, are left out.

    `rows`: mappings of at least _COLUMNS. `body_of` returns the body of the row with an index.
    """
    for index, row in enumerate(rows):
        # The index contains hashes, and another id may have the same hash.
        if row["unique_key"] not in names.ids:
            continue
        if (copy := copy_of(row)) is not None and copy.topic != names.topic:
            result.copies.append(copy)
        elif row["kind"] == Kind.CANCEL and row["source_seq"] is not None:
            result.cancels[row["source_seq"]] = decode_properties(row["properties"] or "")
        elif row["kind"] in (Kind.MESSAGE, Kind.RELEASE) and _matches_names(row["topic"], names):
            # Bodies are read only for these rows, because a redelivered message may have many others.
            content = _content({**row, "body": body_of(index)}) if may_read(row["topic"]) else None
            number = row["seq"] if row["kind"] == Kind.MESSAGE else row["source_seq"]
            place = MessagePlace(
                "visible", number, row["topic"], row["queue_id"], row["queue_offset"], row["store_ms"],
                row["due_ms"], content,
            )  # fmt: skip
            result.add_visible(row["seq"], place)


def _matches_names(topic: str, names: Names) -> bool:
    """Check whether visible messages of this topic belong to the answer.

    They do if the caller may see the topic and has named it. A caller that names no topic gets all but the copies that
    return to a consumer.
    """
    if names.may is not None and not names.may(topic):
        return False
    if names.topic is None:
        return not is_on_its_way_back(topic)
    # Expired messages of a topic may have been moved to the topic with this prefix.
    return names.topic in (topic, topic.removeprefix(EXPIRED_PREFIX))


def _content(row: Mapping[str, Any]) -> Content:
    """Build the content of a message from its row (READ_SCHEMA, by name)."""
    body = readable_body(row["body"] or b"", row["sys_flag"])
    return Content(
        # Only the beginning is shown, but the size is that of the whole body.
        body[: limits.SHOWN_BODY_BYTES_MAX],
        len(body),
        row["tag"],
        (row["keys"] or "").split(),
        {name: value for name, value in decode_properties(row["properties"] or "").items() if name != BASE},
    )


# ---- states of the messages of a send that is repeated with its idempotency key -------------------------------
# The caller has sent these messages, so it needs no permission to look them up.

# "not_found": a message that was sent with a past due time was never scheduled. It was visible at once.
_STATES = {RELEASED: "visible", "not_found": "visible", CANCELLED: "cancelled"}


async def sent_states(
    look_ups: LookUps, numbers: Sequence[int], map_verdicts: Callable[[list[Verdict]], list[Verdict]] = list
) -> list[SentState]:
    """Look up the current states of the scheduled messages with these numbers, in their order.

    `map_verdicts` replaces, in a cluster, the verdicts of messages that were moved to another group (grouped.py).
    Raises the errors of `LookUps.look_up`.
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
    """Look up the states for at most CANCELS_PER_REQUEST_MAX numbers."""
    outcomes, names = look_ups.outcomes, Names(seqs=numbers)
    # Read the due times first, because the verdict of a settled message does not contain its due time.
    due_ms = {candidate.number: candidate.due_ms for candidate in (await look_ups.look_up(names)).candidates}

    async def add_pending(candidates: Sequence[Candidate], verdicts: dict[int, Verdict]) -> None:
        """Update the due times, and give pending candidates the verdict `waiting` (an `Act`)."""
        # The message may have been rescheduled since the first lookup, or a selection may have shifted it.
        due_ms.update({candidate.number: candidate.shown_due_ms for candidate in candidates})
        for candidate in await pending_ones(outcomes, candidates):
            verdicts[candidate.number] = Verdict("", WAITING, candidate.number)

    # There is one verdict for each number, in order.
    verdicts = map_verdicts(await settle(look_ups, names, add_pending))
    return [
        SentState(_STATES.get(verdict.verdict, verdict.verdict), due_ms.get(number))
        for number, verdict in zip(numbers, verdicts, strict=True)
    ]
