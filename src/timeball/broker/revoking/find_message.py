"""Say where the messages with one id are: a read, which settles nothing.

    waiting      until `due_ms`
    visible      in `queue_id` at `queue_offset` since `at_ms`; its instant was `due_ms`, if it had one
    cancelled    at `at_ms`, as far as that is known
    expired      it waits no more; what became of it is older than what the log keeps

Copies on their way back to a consumer are left out unless the caller names their topic, as everywhere
(promise_lookup.py).
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from timeball.broker.components import Components, in_thread
from timeball.broker.revoking.cancel import settle
from timeball.broker.revoking.promise_lookup import Candidate, Names, is_on_its_way_back
from timeball.key_hash import hash_text
from timeball.message import Kind
from timeball.wire import Verdict

WAITING = "waiting"


class MessagePlace(NamedTuple):
    """Where the message that was sent as `seq` is."""

    state: str
    seq: int
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None


_COLUMNS = [
    "seq", "kind", "topic", "queue_id", "queue_offset", "unique_key", "due_ms", "store_ms", "source_seq",
    "reconsume_times",
]  # fmt: skip


async def find_message(parts: Components, names: Names) -> list[MessagePlace]:
    """Return the places of messages with the id that `names` has, the newest first; none for one that is not known."""
    topics: dict[int, str] = {}

    async def look(candidates: list[Candidate]) -> dict[int, Verdict]:
        topics.update({c.number: c.topic for c in candidates})
        return {c.number: Verdict("", WAITING, c.number, due_ms=c.due_ms) for c in candidates}

    verdicts = await settle(parts, names, look)
    # Behind the verdicts: what was released since then is found here.
    places = await in_thread(parts.reader_thread, _visible, parts, names)
    for told in verdicts:
        number = told.seq
        if told.verdict in ("released", "not_found") or number is None:
            continue
        state = "cancelled" if told.verdict == "already_cancelled" else told.verdict
        if number not in places:
            places[number] = MessagePlace(
                state, number, topics.get(number), at_ms=told.at_ms, due_ms=told.due_ms
            )
    return [places[number] for number in sorted(places, reverse=True)]


def _visible(parts: Components, names: Names) -> dict[int, MessagePlace]:
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
        found[number] = MessagePlace(
            "visible", number, topic, row["queue_id"], row["queue_offset"], row["store_ms"], row["due_ms"]
        )
    return found
