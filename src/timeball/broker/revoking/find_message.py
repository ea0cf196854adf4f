"""Lookup of the messages with one id and their positions: a read that settles nothing (wire.MessagePlace).

Copies on their way back to a consumer are left out unless the caller names their topic, as everywhere
(scheduled_lookup.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from timeball.broker.consuming.group_places import Copy, GroupPlaces, by_message, copy_of
from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.cancel import settle
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import Candidate, Names, is_on_its_way_back
from timeball.io.threads import Threads, in_thread
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.key_hash import hash_text
from timeball.model.message import CANCEL_REASON, CANCELLED_BY, Kind, decode_properties
from timeball.model.wire import Content, MessagePlace, Verdict
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.scheduler import Scheduling
from timeball.table.key_index import TableKeys

WAITING = "waiting"

MayRead = Callable[[str], bool]  # whether the caller may see bodies of a topic


_COLUMNS = [
    "seq", "kind", "topic", "queue_id", "queue_offset", "unique_key", "due_ms", "store_ms", "source_seq",
    "reconsume_times", "tag", "keys", "properties",
]  # fmt: skip


@dataclass(slots=True)
class _Logged:
    """The rows with an id, sorted by kind."""

    visible: dict[int, MessagePlace] = field(default_factory=dict)  # by the row that is in the queue
    copies: list[Copy] = field(default_factory=list)
    cancels: dict[int, dict[str, str]] = field(
        default_factory=dict
    )  # properties of a CANCEL row, by its scheduled message


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
    """Find the messages with the id in `names`, the newest first. The list is empty for an unknown id."""
    topics: dict[int, str] = {}
    contents: dict[int, Content] = {}

    async def look(named: list[Candidate]) -> dict[int, Verdict]:
        # Files may contain scheduled messages whose end is no longer in the log, so the schedule decides which are
        # pending.
        waits = scheduling.outcomes.waits(*scheduled_lookup.pairs(named)).tolist()
        candidates = [c for c, does in zip(named, waits, strict=True) if does]
        topics.update({c.number: c.topic for c in candidates})
        # The state may be seen with fewer permissions than the content.
        shown = [c for c in candidates if may_read(c.topic)]
        contents.update(
            await in_thread(
                threads.files,
                _contents,
                shown,
                reader=log.reader,
                hour_log=scheduling.hour_log,
                file_keys=file_keys,
            )
        )
        return {c.number: Verdict("", WAITING, c.number, due_ms=c.due_ms) for c in candidates}

    verdicts = await settle(look_ups, names, look)
    # After the verdicts, so that messages released since then are found here.
    logged = await in_thread(
        threads.reader, _logged, names, may_read, reader=log.reader, key_index=log.key_index
    )
    copies = by_message(logged.copies, logged.visible)
    places = {
        one.seq: msgspec.structs.replace(one, groups=await groups.of(one, copies[one.seq]))
        for one in logged.visible.values()
    }
    for told in verdicts:
        number = told.seq
        # Released messages are visible: `logged` contains them, as far as the log still has their rows.
        if told.verdict in ("released", "not_found") or number is None:
            continue
        state = "cancelled" if told.verdict == "already_cancelled" else told.verdict
        if number not in places:
            content = contents.get(number) if state == WAITING else None
            said = logged.cancels.get(number, {})
            places[number] = MessagePlace(
                state, number, topics.get(number), at_ms=told.at_ms, due_ms=told.due_ms, content=content,
                by=said.get(CANCELLED_BY), reason=said.get(CANCEL_REASON),
            )  # fmt: skip
    return [places[number] for number in sorted(places, reverse=True)]


def _contents(
    candidates: list[Candidate], *, reader: LogReader, hour_log: HourLog, file_keys: TableKeys
) -> dict[int, Content]:
    """Return the content of these scheduled messages, as far as log or table still contain it (file thread)."""
    if not candidates:
        return {}
    numbers = {c.seq: c.number for c in candidates}
    # Listed here, so that no listed file is removed before it is read: this thread removes the files, or they are
    # kept for a day after they have left the table.
    live = hour_log.pending.live
    rows = scheduled_lookup.read(reader, file_keys, live, candidates).to_pylist()
    return {numbers[row["seq"]]: _content(row, row["body"]) for row in rows if row["seq"] in numbers}


def _logged(names: Names, may_read: MayRead, *, reader: LogReader, key_index: KeyIndex) -> _Logged:
    """Read the rows of the log with these ids, and sort them by kind (reader thread)."""
    found, hashes = _Logged(), hash_text(pa.array(names.ids, pa.string()))
    rows = reader.read_rows(key_index.find_rows(hashes))
    bodies = rows.column("body")
    for at, row in enumerate(rows.select(_COLUMNS).to_pylist()):
        # The index contains hashes, and another id may have the same hash.
        if row["unique_key"] not in names.ids:
            continue
        if (copy := copy_of(row)) is not None and copy.topic != names.topic:
            found.copies.append(copy)
        elif row["kind"] == Kind.CANCEL and row["source_seq"] is not None:
            found.cancels[row["source_seq"]] = decode_properties(row["properties"] or "")
        elif row["kind"] in (Kind.MESSAGE, Kind.RELEASE) and _is_wanted(row["topic"], names):
            # The body is taken from the column only for this row, as a redelivered message may have many rows.
            content = _content(row, bodies[at].as_py()) if may_read(row["topic"]) else None
            number = row["seq"] if row["kind"] == Kind.MESSAGE else row["source_seq"]
            found.visible[row["seq"]] = MessagePlace(
                "visible", number, row["topic"], row["queue_id"], row["queue_offset"], row["store_ms"],
                row["due_ms"], content,
            )  # fmt: skip
    return found


def _is_wanted(topic: str, names: Names) -> bool:
    if names.may is not None and not names.may(topic):
        return False
    return topic == names.topic if names.topic is not None else not is_on_its_way_back(topic)


def _content(row: dict[str, Any], body: bytes | None) -> Content:
    body = body or b""
    return Content(
        # Only the beginning is shown, but the size is that of the whole body.
        body[: limits.SHOWN_BODY_BYTES_MAX],
        len(body),
        row["tag"],
        (row["keys"] or "").split(),
        decode_properties(row["properties"] or ""),
    )
