"""Convert sends to rows of a batch, and keep the fields that their answers need.

`SendRows` converts a single send to a `Ticket`. The compiled codec splits received bytes into runs of sends, and each
run is a `RunTicket`. Both give the same rows. If a batch has pieces of both kinds, its runs are converted to rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from timeball.broker.accepting.ingress import Piece
from timeball.broker.accepting.small_batch import ROWS_MAX as FEW_ROWS_MAX
from timeball.broker.accepting.small_batch import ParsedSends, SmallBatch
from timeball.broker.registry.queue_offsets import QueueOffsets, tag_number
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
# A limit, because the header of the answer contains an id of about 66 characters per message, which clients must parse.
BATCH_ROWS_MAX = 8_192
_BODY_SAFE, _PROPERTIES_SAFE = rules.SAFE_LENGTHS["body"], rules.SAFE_LENGTHS["properties"]
_SHORT_CHARACTERS = 60  # a shorter text is within all limits, in any encoding
OVERHEAD_BYTES = 256  # approximate size of a row without its body and texts
_UNIQUE_KEY, _DUE_MS = (SEND_NAMES.index(name) for name in ("unique_key", "due_ms"))


class Ticket(Piece, gc=False):
    """One pending send: its rows, and the fields that its answer repeats."""

    origin: Connection
    opaque: int
    serialisation: int
    is_one_way: bool
    topic: str
    queue_id: int  # as requested, -1 for none. The answer to a scheduled message repeats it
    unique_key: str
    due_ms: int | None
    counted_bytes: int = 0  # of a large body, counted by the connection's Flow until the answer

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of the request. Empty for a one-way request."""
        return [] if self.is_one_way else [(self.opaque, self.serialisation)]


class RunTicket(Piece, gc=False):
    """A pending run of plain sends. `rows` is the run."""

    origin: Connection
    codec: Codec
    now_ms: int  # when the run was received: delays count from here. 0 if no send needs the time
    tickets: Callable[[RunTicket], list[Ticket]]  # creates one ticket per send

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of each request that is not one-way."""
        run: SendRun = self.rows
        return run.requests()

    def join(self, pieces: Sequence[Piece]) -> ParsedSends:
        """Join pieces of a batch: as runs if all of them are runs, else as rows. See Piece."""
        runs = [piece.rows for piece in pieces]
        if all(type(piece) is RunTicket for piece in pieces):
            return Runs(self.codec, runs)
        return [row for run in runs for row in run]

    def apart(self) -> Sequence[Piece]:
        """Split the run into one ticket per send. See Piece."""
        return (self,) if self.count == 1 else self.tickets(self)


class Runs:
    """The runs of one batch. Iterates over their rows. Implements SendRuns (broker/accepting/small_batch.py)."""

    def __init__(self, codec: Codec, runs: list[SendRun]) -> None:
        self._codec, self._runs = codec, runs
        self.topics = {name for run in runs for name, _ in run.destinations}

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[SendRow]:
        return chain.from_iterable(self._runs)

    def batch(self) -> SendBatch:
        """Convert the sends to rows, or to columns if there are many. See SendRuns."""
        return list(self) if len(self) <= FEW_ROWS_MAX else self._codec.join(self._runs)

    def log_rows(
        self, topics: Mapping[str, Topic], now_ms: int, last_ms: int, host: str
    ) -> SmallBatch | None:
        """Encode the sends as rows of the log. Returns None unless all of them are plain. See SendRuns."""
        encoded = self._codec.log_rows(self._runs, topics, tag_number, now_ms, last_ms, host)
        if encoded is None:
            return None
        message, queue_ids, offsets, queues, turns, pending, pending_bytes = encoded
        queue_offsets = QueueOffsets.chosen(queues, turns) if queues else None
        return SmallBatch(EncodedRows(message, queue_ids, offsets), queue_offsets, pending, pending_bytes)


class SendRows:
    """Creates the tickets of single sends. `keys` creates unique keys for messages that have none."""

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
        """Create the ticket of one send, which `edge` will answer. Raises InvalidMessage or InvalidDelay."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            rows, unique_key = self._batch(fields, body, born_host, queue_id, now_ms)
            due_ms = None
        else:
            properties = fields.properties or ""
            row = self._row(fields, fields.flag or 0, body, properties, born_host, queue_id, now_ms)
            rows, unique_key, due_ms = [row], row[_UNIQUE_KEY], row[_DUE_MS]
        # In characters instead of bytes, which is close enough here. The properties of a batch are in its body.
        size_bytes = len(body) + len(fields.properties or "") + OVERHEAD_BYTES * len(rows)
        return Ticket(
            edge, rows, len(rows), size_bytes, 0, None, origin, header.opaque, serialisation,
            header.flag & ONE_WAY != 0, fields.topic, queue_id, unique_key, due_ms,
        )  # fmt: skip

    def _row(
        self, fields: SendFields, flag: int, body: bytes, properties: str, born_host: str, queue_id: int, now_ms: int
    ) -> SendRow:  # fmt: skip
        """Convert one message to a row: check limits, plan the delay, and add missing properties."""
        # Rare. The two calls would take 0.2 us for each send.
        if len(body) > _BODY_SAFE or len(properties) > _PROPERTIES_SAFE:
            rules.check("body", body)
            rules.check("properties", properties)
        parsed = decode_properties(properties)
        if LITE_TOPIC in parsed:
            raise InvalidMessage(f"{parsed[LITE_TOPIC][:64]!r}: Timeball has no lite topics; send to a topic")
        level, due_ms = 0, None
        if not delays.NAMES.isdisjoint(parsed):
            level, due_ms = delays.plan(
                parsed, now_ms, self._delay_ms_max, self._timing_zone, self._user_names
            )
        tag, keys, unique_key = (
            parsed.get("TAGS"),
            parsed.get("KEYS"),
            parsed.get("UNIQ_KEY"),
        )
        if not unique_key:
            unique_key = self._keys.next(now_ms)
            properties = with_property(properties, "UNIQ_KEY", unique_key)
        if "REPLY_TO_CLIENT" in parsed and "CLUSTER" not in parsed:
            # This message expects a reply (replies.py). Consumers derive the reply topic from the cluster's name.
            properties = with_property(properties, "CLUSTER", self._cluster_name)
        if (
            keys is not None
            or len(unique_key) >= _SHORT_CHARACTERS
            or (tag is not None and len(tag) >= _SHORT_CHARACTERS)
        ):
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
        """Convert a MessageBatch to rows. Returns them and their unique keys, joined with commas."""
        rules.check("body", body)
        records = decode_batch(body, BATCH_ROWS_MAX)
        if not records:
            raise InvalidMessage("a batch without messages")
        # The answer has one offset for all messages, so none may be delayed. The MessageBatch has properties, too.
        for properties in (fields.properties or "", *(record.properties for record in records)):
            parsed = decode_properties(properties)
            if not delays.NAMES.isdisjoint(parsed) and delays.names_delay(parsed, self._user_names):
                raise InvalidDelay("a batch takes no delayed messages; send them one by one")
        rows = [
            self._row(fields, record.flag, record.body, record.properties, born_host, queue_id, now_ms)
            for record in records
        ]
        return rows, ",".join(row[_UNIQUE_KEY] for row in rows)


def with_property(properties: str, name: str, value: str) -> str:
    """Append a property to encoded properties."""
    end = "" if not properties or properties.endswith("\x02") else "\x02"
    return f"{properties}{end}{name}\x01{value}\x02"
