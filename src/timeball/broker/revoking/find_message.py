"""Say where the messages with one id are: a read, which settles nothing (wire.MessagePlace).

Copies on their way back to a consumer are left out unless the caller names their topic, as everywhere
(promise_lookup.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from timeball import limits
from timeball.broker.components import Components, in_thread
from timeball.broker.revoking import promise_lookup
from timeball.broker.revoking.cancel import settle
from timeball.broker.revoking.promise_lookup import Candidate, Names, is_on_its_way_back
from timeball.key_hash import hash_text
from timeball.message import Kind, decode_properties
from timeball.wire import Content, MessagePlace, Verdict

WAITING = "waiting"

MayRead = Callable[[str], bool]  # whether the caller may see bodies of a topic


_COLUMNS = [
    "seq", "kind", "topic", "queue_id", "queue_offset", "unique_key", "due_ms", "store_ms", "source_seq",
    "reconsume_times", "body", "tag", "keys", "properties",
]  # fmt: skip


async def find_message(parts: Components, names: Names, may_read: MayRead) -> list[MessagePlace]:
    """Return the places of messages with the id that `names` has, the newest first; none for one that is not known."""
    topics: dict[int, str] = {}
    contents: dict[int, Content] = {}

    async def look(candidates: list[Candidate]) -> dict[int, Verdict]:
        topics.update({c.number: c.topic for c in candidates})
        shown = [c for c in candidates if may_read(c.topic)]
        contents.update(await in_thread(parts.reader_thread, _contents, parts, shown))
        return {c.number: Verdict("", WAITING, c.number, due_ms=c.due_ms) for c in candidates}

    verdicts = await settle(parts, names, look)
    # Behind the verdicts: what was released since then is found here.
    places = await in_thread(parts.reader_thread, _visible, parts, names, may_read)
    for told in verdicts:
        number = told.seq
        if told.verdict in ("released", "not_found") or number is None:
            continue
        state = "cancelled" if told.verdict == "already_cancelled" else told.verdict
        if number not in places:
            content = contents.get(number) if state == WAITING else None
            places[number] = MessagePlace(
                state, number, topics.get(number), at_ms=told.at_ms, due_ms=told.due_ms, content=content
            )
    return [places[number] for number in sorted(places, reverse=True)]


def _contents(parts: Components, candidates: list[Candidate]) -> dict[int, Content]:
    """Return the content of these promises, as far as log or table still hold it (reader thread)."""
    if not candidates:
        return {}
    numbers = {c.seq: c.number for c in candidates}
    # The files are listed in this thread, which removes them.
    rows = promise_lookup.read(parts.reader, parts.hour_log.pending.all(), candidates).to_pylist()
    return {numbers[row["seq"]]: _content(row) for row in rows if row["seq"] in numbers}


def _visible(parts: Components, names: Names, may_read: MayRead) -> dict[int, MessagePlace]:
    """Return the messages in queues, by the number under which they were sent (reader thread)."""
    found: dict[int, MessagePlace] = {}
    hashes = hash_text(pa.array(names.ids, pa.string()))
    for row in parts.reader.read_rows(parts.key_index.find_rows(hashes)).select(_COLUMNS).to_pylist():
        topic = row["topic"]
        if row["unique_key"] not in names.ids or row["kind"] not in (Kind.MESSAGE, Kind.RELEASE):
            continue
        if names.may is not None and not names.may(topic):
            continue
        if topic != names.topic if names.topic is not None else is_on_its_way_back(topic):
            continue
        number = row["seq"] if row["kind"] == Kind.MESSAGE else row["source_seq"]
        content = _content(row) if may_read(topic) else None
        found[number] = MessagePlace(
            "visible",
            number,
            topic,
            row["queue_id"],
            row["queue_offset"],
            row["store_ms"],
            row["due_ms"],
            content,
        )
    return found


def _content(row: dict[str, Any]) -> Content:
    body = row["body"] or b""
    return Content(
        body[: limits.SHOWN_BODY_BYTES_MAX],
        len(body),
        row["tag"],
        (row["keys"] or "").split(),
        decode_properties(row["properties"] or ""),
    )
