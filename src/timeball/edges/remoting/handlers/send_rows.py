"""Sends as rows: the content that a request adds to a batch, and the fields that its answer repeats.

The reference reads sends one by one (`Ticket`, `SendRows`). The compiled codec cuts out runs of them (`RunTicket`).
Both produce the same rows. If sends of both kinds share a batch, a run is turned into rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from timeball.broker.accepting.ingress import Piece
from timeball.broker.accepting.small_batch import ROWS_MAX as FEW_ROWS_MAX
from timeball.broker.accepting.small_batch import Sends, SmallBatch
from timeball.broker.registry.queue_offsets import FewPlaces, tag_number
from timeball.broker.registry.topic import Topic
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode
from timeball.edges.remoting.codec.implementation import Codec, SendRun
from timeball.edges.remoting.codec.records import UniqueKeys, decode_batch
from timeball.edges.remoting.codec.sends import SendFields, SendHeader
from timeball.edges.remoting.connection import Connection
from timeball.log.row_encoder import EncodedRows
from timeball.model import rules
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import LITE_TOPIC, SEND_NAMES, SendBatch, SendRow, decode_properties

BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
ONE_WAY = int(CommandFlag.ONE_WAY)
# The answer contains the ids of each message, about 66 characters, in a header that the client must parse.
BATCH_ROWS_MAX = 8_192
_BODY_SAFE, _PROPERTIES_SAFE = rules.SAFE_LENGTHS["body"], rules.SAFE_LENGTHS["properties"]
_SHORT = 60  # characters: within all limits, in any encoding
OVERHEAD_BYTES = 256  # of a row in addition to its body and texts, approximately
_UNIQUE_KEY, _DUE_MS = (SEND_NAMES.index(name) for name in ("unique_key", "due_ms"))


class Ticket(Piece, gc=False):
    """One pending send: its rows, and the fields that its answer repeats."""

    origin: Connection
    opaque: int
    serialisation: int
    is_one_way: bool
    topic: str
    queue_id: int  # as asked for. The answer to a scheduled message repeats it
    unique_key: str
    due_ms: int | None
    counted_bytes: int = 0  # of a large body, counted by its connection until the answer

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of the request, if it expects an answer."""
        return [] if self.is_one_way else [(self.opaque, self.serialisation)]


class RunTicket(Piece, gc=False):
    """A pending run of plain sends. `rows` is the run."""

    origin: Connection
    codec: Codec
    now_ms: int  # the time of the read, from which delays count; 0 if the run needs no time
    tickets: Callable[[RunTicket], list[Ticket]]  # creates one ticket per send

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of each request that expects an answer."""
        run: SendRun = self.rows
        return run.requests()

    def join(self, pieces: Sequence[Piece]) -> Sends:
        """Return the runs of these pieces, or rows if there are other pieces among them. See Piece."""
        runs = [piece.rows for piece in pieces]
        if all(type(piece) is RunTicket for piece in pieces):
            return Runs(self.codec, runs)
        return [row for run in runs for row in run]

    def apart(self) -> Sequence[Piece]:
        """Return the sends one by one. See Piece."""
        return (self,) if self.count == 1 else self.tickets(self)


class Runs:
    """Runs that share a batch. See SendRuns (broker/accepting/small_batch.py). Iterates over their rows."""

    def __init__(self, codec: Codec, runs: list[SendRun]) -> None:
        self._codec, self._runs = codec, runs
        self.topics = {name for run in runs for name, _ in run.destinations}

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[SendRow]:
        return chain.from_iterable(self._runs)

    def batch(self) -> SendBatch:
        """Return the sends as rows or columns. See SendRuns."""
        return list(self) if len(self) <= FEW_ROWS_MAX else self._codec.join(self._runs)

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Encode the sends as rows of the log, if all of them are plain. See SendRuns."""
        made = self._codec.log_rows(self._runs, topics, tag_number, now_ms, last_ms, host)
        if made is None:
            return None
        message, queue_ids, offsets, queues, turns, waiting, waiting_bytes = made
        places = FewPlaces.chosen(queues, turns) if queues else None
        return SmallBatch(EncodedRows(message, queue_ids, offsets), places, waiting, waiting_bytes)


class SendRows:
    """Creates tickets of sends. `keys` creates ids for messages that have none."""

    def __init__(
        self,
        keys: UniqueKeys,
        delay_ms_max: int,
        timing_zone: str,
        user_names: frozenset[str],
        cluster_name: str,
    ) -> None:
        self._keys, self._delay_ms_max, self._timing_zone = keys, delay_ms_max, timing_zone
        self._user_names, self._cluster_name = user_names, cluster_name

    def ticket(
        self,
        edge: Any,
        origin: Any,
        header: SendHeader,
        body: bytes,
        serialisation: int,
        born_host: str,
        queue_id: int,
        now_ms: int,
    ) -> Ticket:
        """Return the ticket of one send, put by `edge`. Raises InvalidMessage or InvalidDelay."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            rows, unique_key = self._batch(fields, body, born_host, queue_id, now_ms)
            due_ms = None
        else:
            properties = fields.properties or ""
            row = self._row(fields, fields.flag or 0, body, properties, born_host, queue_id, now_ms)
            rows, unique_key, due_ms = [row], row[_UNIQUE_KEY], row[_DUE_MS]
        # Counted in characters, which is close enough to bytes here. The properties of a batch are in the body.
        size_bytes = len(body) + len(fields.properties or "") + OVERHEAD_BYTES * len(rows)
        return Ticket(
            edge, rows, len(rows), size_bytes, 0, None, origin, header.opaque, serialisation,
            header.flag & ONE_WAY != 0, fields.topic, queue_id, unique_key, due_ms,
        )  # fmt: skip

    def _row(
        self, fields: SendFields, flag: int, body: bytes, properties: str, born_host: str, queue_id: int, now_ms: int
    ) -> SendRow:  # fmt: skip
        if (
            len(body) > _BODY_SAFE or len(properties) > _PROPERTIES_SAFE
        ):  # rare, and the two calls take 0.2 us
            rules.check("body", body)
            rules.check("properties", properties)
        found = decode_properties(properties)
        if LITE_TOPIC in found:
            raise InvalidMessage(f"{found[LITE_TOPIC][:64]!r}: Timeball has no lite topics; send to a topic")
        level, due_ms = 0, None
        if not delays.NAMES.isdisjoint(found):
            level, due_ms = delays.plan(
                found, now_ms, self._delay_ms_max, self._timing_zone, self._user_names
            )
        tag, keys, unique_key = found.get("TAGS"), found.get("KEYS"), found.get("UNIQ_KEY")
        if not unique_key:
            unique_key = self._keys.next(now_ms)
            properties = with_property(properties, "UNIQ_KEY", unique_key)
        if "REPLY_TO_CLIENT" in found and "CLUSTER" not in found:
            # A request that expects a reply: the consumer derives the reply topic from the cluster's name (replies.py).
            properties = with_property(properties, "CLUSTER", self._cluster_name)
        if keys is not None or len(unique_key) >= _SHORT or (tag is not None and len(tag) >= _SHORT):
            for name, text in (("tag", tag), ("keys", keys), ("unique_key", unique_key)):
                if text is not None:
                    rules.check(name, text)
        return (
            fields.topic, body, tag, keys, unique_key, properties, queue_id, fields.born_ms or now_ms, born_host, flag,
            fields.sys_flag or 0, fields.reconsume_times or 0, due_ms, level or None,
        )  # fmt: skip

    def _batch(
        self, fields: SendFields, body: bytes, born_host: str, queue_id: int, now_ms: int
    ) -> tuple[list[SendRow], str]:
        rules.check("body", body)
        records = decode_batch(body, BATCH_ROWS_MAX)
        if not records:
            raise InvalidMessage("a batch without messages")
        # All messages share one offset in the answer, so none may be delayed. MessageBatch itself has properties too.
        for properties in (fields.properties or "", *(record.properties for record in records)):
            found = decode_properties(properties)
            if not delays.NAMES.isdisjoint(found) and delays.names_delay(found, self._user_names):
                raise InvalidDelay("a batch takes no delayed messages; send them one by one")
        rows = [self._row(fields, r.flag, r.body, r.properties, born_host, queue_id, now_ms) for r in records]
        return rows, ",".join(row[_UNIQUE_KEY] for row in rows)


def with_property(properties: str, name: str, value: str) -> str:
    """Append a property to the text of properties."""
    end = "" if not properties or properties.endswith("\x02") else "\x02"
    return f"{properties}{end}{name}\x01{value}\x02"
