"""Values and outcomes of SQL filters: properties as columns of text and numbers, and the tables of the logic.

A message's properties are one text (message.py). Arrow splits it once for all names, for many messages at a time. If a
name occurs twice, the last value counts, as in RocketMQ. TAGS, KEYS and UNIQ_KEY have their own columns, which a
producer may fill without the text.

Properties are text. A text counts as a number if Java's Long.valueOf or Double.valueOf accepts it, except for special
cases (NaN, Infinity, hexadecimal). Where a number is needed, any other text is an error, and never zero.

A condition has four outcomes, one byte per message. SQL has three: TRUE, FALSE, and NULL for a comparison with a
property that the message does not have. The fourth is ERROR, for a property that is no number where one is needed. As
in RocketMQ, an error ends the evaluation and the message is not delivered, unless the left side has already decided
(FALSE AND …, TRUE OR …).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.tags import JAVA_BLANKS
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, byte_lengths

TruthArray = npt.NDArray[np.uint8]

FALSE, TRUE, NULL, ERROR = range(4)

#                         right: FALSE  TRUE   NULL   ERROR
AND = np.array([
    [FALSE, FALSE, FALSE, FALSE],  # left FALSE
    [FALSE, TRUE, NULL, ERROR],  # left TRUE
    [FALSE, NULL, NULL, ERROR],  # left NULL
    [ERROR, ERROR, ERROR, ERROR],  # left ERROR
], dtype=np.uint8)  # fmt: skip
OR = np.array([
    [FALSE, TRUE, NULL, ERROR],
    [TRUE, TRUE, TRUE, TRUE],
    [NULL, TRUE, NULL, ERROR],
    [ERROR, ERROR, ERROR, ERROR],
], dtype=np.uint8)  # fmt: skip
EQUAL = np.array([
    [TRUE, FALSE, NULL, ERROR],
    [FALSE, TRUE, NULL, ERROR],
    [NULL, NULL, NULL, ERROR],
    [ERROR, ERROR, ERROR, ERROR],
], dtype=np.uint8)  # fmt: skip
# Tables indexed by columns of outcomes, so that a condition costs one lookup per message, without branches.
NOT = np.array([TRUE, FALSE, NULL, ERROR], dtype=np.uint8)
IS_NULL = np.array([FALSE, FALSE, TRUE, ERROR], dtype=np.uint8)


def of_bools(values: npt.NDArray[np.bool_]) -> TruthArray:
    """Convert a mask to TRUE and FALSE."""
    return values.astype(np.uint8)


def constant(outcome: int, count: int) -> TruthArray:
    """Build a column of `count` equal outcomes."""
    return np.full(count, outcome, dtype=np.uint8)


LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1
LONG_DIGITS = 19  # the number of digits of LONG_MAX
DOUBLE_CHARACTERS = frozenset("0123456789+-.eE")
OWN_COLUMNS = {"TAGS": "tag", "KEYS": "keys", "UNIQ_KEY": "unique_key"}  # columns of LOG_SCHEMA
# The bytes that are split at a time. A text of separators becomes as many entries as it has bytes.
SPLIT_BYTES = 4 * 1024 * 1024

Float64Array = npt.NDArray[np.float64]


def as_long(text: str) -> int | None:
    """Parse a 64-bit integer. None if the text is not one."""
    # Like Java's Long.parseLong: an optional sign and ASCII digits. Python's int would accept underscores and blanks.
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Python refuses to convert very long texts, so the digits are counted first.
    significant = digits.lstrip("0")
    if not (digits.isascii() and digits.isdigit()) or len(significant) > LONG_DIGITS:
        return None
    value = int(significant or "0") * (-1 if text[0] == "-" else 1)
    return value if LONG_MIN <= value <= LONG_MAX else None


def as_double(text: str) -> float | None:
    """Parse a decimal number, which may have blanks around it. None if the text is not one."""
    text = text.strip(JAVA_BLANKS)
    if text[-1:] in ("f", "F", "d", "D"):  # Java accepts 1.5f
        text = text[:-1]
    if not DOUBLE_CHARACTERS.issuperset(text):
        return None  # Python's float accepts words and underscores
    try:
        return float(text)
    except ValueError:
        return None


class Values:
    """The property columns of a batch. Numbers are converted at their first use."""

    def __init__(self, rows: pa.RecordBatch, names: frozenset[str]) -> None:
        """Extract the properties `names` from rows (LOG_SCHEMA or READ_SCHEMA)."""
        self.count = rows.num_rows
        self._texts = _texts(rows, sorted(names))
        self._longs: dict[str, tuple[Int64Array, TruthArray]] = {}
        self._doubles: dict[str, tuple[Float64Array, TruthArray]] = {}

    def text(self, name: str) -> pa.Array:
        """The property as strings, null for messages without it."""
        return self._texts[name]

    def longs(self, name: str) -> tuple[Int64Array, TruthArray]:
        """The property as integers, and a state for each message: TRUE, NULL (no property) or ERROR (no integer)."""
        if name not in self._longs:
            self._longs[name] = _to_numbers(self._texts[name], as_long, np.dtype(np.int64))
        return self._longs[name]

    def doubles(self, name: str) -> tuple[Float64Array, TruthArray]:
        """The property as doubles, and a state for each message: TRUE, NULL (no property) or ERROR (no number)."""
        if name not in self._doubles:
            self._doubles[name] = _to_numbers(self._texts[name], as_double, np.dtype(np.float64))
        return self._doubles[name]


def _to_numbers(
    column: pa.Array, convert: Callable[[str], float | None], kind: np.dtype[Any]
) -> tuple[npt.NDArray[Any], TruthArray]:
    """Convert a column of texts to numbers and states. Each distinct text is converted once."""
    encoded = column.dictionary_encode()
    converted = [convert(text) for text in encoded.dictionary.to_pylist()]
    # The last element is for messages without the property: below, nulls get its index.
    values = np.array([0 if value is None else value for value in converted] + [0], dtype=kind)
    state = np.array([ERROR if value is None else TRUE for value in converted] + [NULL], dtype=np.uint8)
    codes = encoded.indices.fill_null(len(converted)).to_numpy()
    return values[codes], state[codes]


def _texts(rows: pa.RecordBatch, names: list[str]) -> dict[str, pa.Array]:
    columns = {}
    own_columns = {name: rows.column(OWN_COLUMNS[name]) for name in names if name in OWN_COLUMNS}
    # The text of all properties is needed only where the own column has nulls.
    from_text = [name for name in names if name not in own_columns or own_columns[name].null_count]
    for name, column in zip(from_text, _properties(rows.column("properties"), from_text), strict=True):
        columns[name] = pc.coalesce(own_columns[name], column) if name in own_columns else column
    return {**own_columns, **columns}


def _properties(texts: pa.Array, names: list[str]) -> list[pa.Array]:
    """Extract a column of strings for each name."""
    if not names or texts.null_count == len(texts):
        return [pa.nulls(len(texts), pa.string()) for _ in names]
    # The longest text sets the number of rows per slice, so that each slice stays within SPLIT_BYTES.
    longest = int(byte_lengths(texts).max())
    step = max(1, SPLIT_BYTES // max(1, longest))
    slices = [_split(texts.slice(begin, step), names) for begin in range(0, len(texts), step)]
    return [pa.concat_arrays(list(columns)) for columns in zip(*slices, strict=True)]


def _split(texts: pa.Array, names: list[str]) -> list[pa.Array]:
    entries = pc.split_pattern(texts, PROPERTY_END)
    flat, row_of = entries.flatten(), pc.list_parent_indices(entries).to_numpy()
    columns = []
    for name in names:
        # The separator after the name excludes longer names with the same beginning.
        head = name + PROPERTY_NAME_END
        hits = np.flatnonzero(np.asarray(pc.starts_with(flat, head)))
        entry_of = np.full(len(texts), -1, dtype=np.int64)
        entry_of[row_of[hits]] = hits  # if a name occurs twice, the last entry stays
        # A null index gives a null, for messages without the property.
        values = flat.take(pa.array(entry_of, mask=entry_of < 0))
        columns.append(pc.utf8_slice_codeunits(values, len(head)))
    return columns
