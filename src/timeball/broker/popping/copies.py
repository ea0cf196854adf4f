"""What is written when a message comes back unread: a copy for the group's retry topic, or for its dead letters.

The retry topic of POP has the name of the group and of the topic in it (RocketMQ's first form, which its brokers
use unless told otherwise): `%RETRY%<group>_<topic>`. Two pairs of names may make the same topic ("a_b" with "c",
"a" with "b_c"; RocketMQ #9633), so every copy says whose it is, and no group is handed another one's.
"""

from __future__ import annotations

import pyarrow as pa

from timeball.broker import retry
from timeball.broker.admission import SEND_COLUMNS
from timeball.message import PROPERTY_END, PROPERTY_NAME_END, decode_properties, encode_properties

FIRST_POP_TIME = "1ST_POP_TIME"
ORIGIN_GROUP = "ORIGIN_GROUP"
POP_CK = "POP_CK"

_KEPT = ["body", "tag", "keys", "unique_key", "born_ms", "born_host", "flag", "sys_flag"]


def retry_topic(group: str, topic: str) -> str:
    """The topic from which a group gets again what it did not acknowledge; of a retry topic, itself."""
    return topic if topic.startswith(retry.RETRY_PREFIX) else f"{retry.RETRY_PREFIX}{group}_{topic}"


def build(
    rows: pa.RecordBatch,
    *,
    group: str,
    topic: str,
    pop_ms: list[int],
    times_max: int,
    due_ms: list[int] | None = None,
    dead: bool = False,
) -> pa.RecordBatch:
    """SEND_COLUMNS for READ_SCHEMA rows of `topic` that come back from `group`; `pop_ms`: when each was in hand.

    `due_ms`: the copies stay away until then. `dead`: all of them are dead letters, whatever their number of tries.
    """
    topics, texts, again = [], [], []
    for text, times, popped_ms in zip(
        rows.column("properties").to_pylist(), rows.column("reconsume_times").to_pylist(), pop_ms, strict=True
    ):
        properties = decode_properties(text or "")
        properties.setdefault(retry.RETRY_TOPIC, topic)
        properties.setdefault(FIRST_POP_TIME, str(popped_ms))
        properties[ORIGIN_GROUP] = group
        properties.pop(POP_CK, None)
        # The wait is over, or is in `due_ms`: no level comes on top of it.
        copy = retry.resend(
            group,
            properties=properties,
            delay_level=0,
            reconsume_times=(times or 0) + 1,
            times_max=-1 if dead else times_max,
            in_order=False,
        )
        topics.append(copy.topic if copy.is_dead_letter else retry_topic(group, topic))
        texts.append(encode_properties(copy.properties))
        again.append(copy.reconsume_times)
    columns = {
        "topic": topics,
        "properties": texts,
        "reconsume_times": again,
        "queue_id": [0] * len(topics),
        **{name: rows.column(name) for name in _KEPT},
    }
    if due_ms is not None:
        columns["due_ms"] = due_ms
    return pa.RecordBatch.from_pydict({name: pa.array(v, SEND_COLUMNS[name]) for name, v in columns.items()})


def is_of(group: str, properties: str | None) -> bool:
    """Whether a row of a retry topic is for this group; one that does not say is for whoever reads it."""
    text = PROPERTY_END + (properties or "")
    mark = f"{PROPERTY_END}{ORIGIN_GROUP}{PROPERTY_NAME_END}"
    return mark not in text or f"{mark}{group}{PROPERTY_END}" in text + PROPERTY_END
