"""The conditions of SQL filters: the nodes of the syntax tree, and their evaluation for many messages at once.

Properties and constants are operands. All other nodes are conditions, which have an outcome for each message. A
condition is built only for operands that can be compared, so that its evaluation cannot fail:

    property  with an integer            as 64-bit integers; the outcome for other text is ERROR
              with a decimal number      as doubles; the outcome for other text is ERROR
              with a string              = and <> only, as text
              with TRUE, FALSE or a condition: = and <> only. The text "true" in any case is TRUE, all else FALSE
              with a property            = and <> as text; > >= < <= as doubles

A condition has four outcomes, one byte per message. SQL has three: TRUE, FALSE, and NULL for a comparison with a
property that the message does not have. The fourth is ERROR, for a property that is no number where one is needed. As
in RocketMQ, an error ends the evaluation and the message is not delivered, unless the left side has already decided
(FALSE AND …, TRUE OR …).

This is the reference. If the build had a C compiler, sql_program.pyx evaluates the conditions, with the same outcomes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.tags import JAVA_BLANKS, BoolArray
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, byte_lengths

ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
SEARCHES: dict[str, Callable[[pa.Array, str], pa.Array]] = {
    "CONTAINS": pc.match_substring, "STARTSWITH": pc.starts_with, "ENDSWITH": pc.ends_with,
}  # fmt: skip


class Mismatch(Exception):
    """Two operands cannot be compared. The parser adds the position."""


class Condition(Protocol):
    """A node of the expression that has an outcome for each message."""

    def truth(self, values: Values) -> TruthArray:
        """Evaluate the condition for the messages of `values`. Returns one outcome for each. Raises nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Property:
    """The name of a property, which is case-sensitive."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, string, TRUE, FALSE or NULL (None)."""

    value: int | float | str | bool | None


Operand = Property | Constant


@dataclass(frozen=True, slots=True)
class Always:
    """TRUE, FALSE or NULL as a condition, or a comparison of two constants."""

    outcome: int  # TRUE, FALSE or NULL

    def truth(self, values: Values) -> TruthArray:
        return constant(self.outcome, values.count)


@dataclass(frozen=True, slots=True)
class Every:
    """AND, from left to right."""

    parts: tuple[Condition, ...]

    def truth(self, values: Values) -> TruthArray:
        # From left to right, because an ERROR counts only if the parts to its left have not decided.
        return reduce(lambda left, right: AND[left, right], (p.truth(values) for p in self.parts))


@dataclass(frozen=True, slots=True)
class Some:
    """OR, from left to right."""

    parts: tuple[Condition, ...]

    def truth(self, values: Values) -> TruthArray:
        # From left to right, because an ERROR counts only if the parts to its left have not decided.
        return reduce(lambda left, right: OR[left, right], (p.truth(values) for p in self.parts))


@dataclass(frozen=True, slots=True)
class Not:
    """NOT, and the negation in <>, NOT IN and similar operators."""

    part: Condition

    def truth(self, values: Values) -> TruthArray:
        return NOT[self.part.truth(values)]


@dataclass(frozen=True, slots=True)
class Same:
    """Condition = condition: whether both are TRUE or both FALSE. NULL or ERROR if one side is (`EQUAL`)."""

    left: Condition
    right: Condition

    def truth(self, values: Values) -> TruthArray:
        return EQUAL[self.left.truth(values), self.right.truth(values)]


@dataclass(frozen=True, slots=True)
class IsTrueText:
    """A property as a condition: TRUE if its text is "true" in any case."""

    name: str

    def truth(self, values: Values) -> TruthArray:
        return _of_arrow(pc.equal(pc.ascii_lower(values.text(self.name)), "true"))


@dataclass(frozen=True, slots=True)
class IsNull:
    """Property IS NULL: TRUE for messages without the property."""

    name: str

    def truth(self, values: Values) -> TruthArray:
        # IS NULL itself is never NULL, so the result has only two outcomes.
        return of_bools(np.asarray(values.text(self.name).is_null()))


@dataclass(frozen=True, slots=True)
class HasNoOutcome:
    """Condition IS NULL: TRUE for messages for which the outcome of the condition is NULL. ERROR stays ERROR."""

    part: Condition

    def truth(self, values: Values) -> TruthArray:
        return IS_NULL[self.part.truth(values)]


@dataclass(frozen=True, slots=True)
class SameText:
    """Property = string, or property = property."""

    name: str
    other: Property | str

    def truth(self, values: Values) -> TruthArray:
        other = values.text(self.other.name) if isinstance(self.other, Property) else self.other
        return _of_arrow(pc.equal(values.text(self.name), other))


@dataclass(frozen=True, slots=True)
class OneOf:
    """Property IN (strings)."""

    name: str
    items: frozenset[str]

    def truth(self, values: Values) -> TruthArray:
        """Evaluate the condition (see Condition)."""
        text = values.text(self.name)
        outcome = of_bools(np.asarray(pc.is_in(text, value_set=pa.array(sorted(self.items), pa.string()))))
        # `is_in` returns false for a null, but in SQL the outcome is NULL for a message without the property.
        outcome[np.asarray(text.is_null())] = NULL
        return outcome


@dataclass(frozen=True, slots=True)
class HasText:
    """Property CONTAINS, STARTSWITH or ENDSWITH a string that is not empty."""

    name: str
    how: str  # a key of SEARCHES
    search: str  # not empty: see HasNoText

    def truth(self, values: Values) -> TruthArray:
        return _of_arrow(SEARCHES[self.how](values.text(self.name), self.search))


@dataclass(frozen=True, slots=True)
class HasNoText:
    """Property CONTAINS, STARTSWITH or ENDSWITH '', or a negation of it: never TRUE, as in RocketMQ."""

    name: str

    def truth(self, values: Values) -> TruthArray:
        return np.where(np.asarray(values.text(self.name).is_null()), np.uint8(NULL), np.uint8(FALSE))


@dataclass(frozen=True, slots=True)
class Ordered:
    """A comparison of two numbers, of which at least one is a property."""

    sign: str  # a key of ORDERS
    left: Property | int | float
    right: Property | int | float
    decimal: bool  # properties are read as doubles, otherwise as 64-bit integers

    def truth(self, values: Values) -> TruthArray:
        """Evaluate the condition (see Condition). ERROR if a side is no number, NULL if a side is missing."""
        left, left_state = self._side(values, self.left)
        right, right_state = self._side(values, self.right)
        is_null = (left_state == NULL) | (right_state == NULL)
        is_error = (left_state == ERROR) | (right_state == ERROR)
        outcome = of_bools(ORDERS[self.sign](left, right))
        # NULL is set last: a comparison with a missing property is NULL, even if the other side is not a number.
        outcome[is_error] = ERROR
        outcome[is_null] = NULL
        return outcome

    def _side(self, values: Values, side: Property | int | float) -> tuple[Any, Any]:
        """Return the numbers of one side and their states (`Values.longs`). For a constant, they are single values."""
        if not isinstance(side, Property):
            # numpy uses the value and the state for all messages.
            return side, TRUE
        return values.doubles(side.name) if self.decimal else values.longs(side.name)


# ---- building conditions, with a check of their operands -----------------------------------------------------


def ordered(sign: str, left: Operand, right: Operand) -> Condition:
    """Build the comparison left `sign` right of numbers. Raises Mismatch for a constant that is no number."""
    for operand in (left, right):
        if isinstance(operand, Constant) and not _is_number(operand.value):
            raise Mismatch(f"{sign} compares numbers; {_shown(operand.value)} is none")
    return _compare_numbers(sign, left, right)


def equal(left: Operand | Condition, right: Operand | Condition) -> Condition:
    """Build left = right. Raises Mismatch for NULL, and for constants and conditions of different kinds."""
    sides = (left, right)
    # In SQL a comparison with NULL is never true, which no user means.
    if any(isinstance(side, Constant) and side.value is None for side in sides):
        raise Mismatch("nothing is equal to NULL; write IS NULL or IS NOT NULL")
    if any(not isinstance(side, (Property, Constant)) or _is_bool(side) for side in sides):
        return Same(_as_condition(left), _as_condition(right))
    assert isinstance(left, (Property, Constant)) and isinstance(right, (Property, Constant))
    # A single property is put on the left, so that the code below handles each pair of kinds once.
    if isinstance(left, Constant) and isinstance(right, Property):
        left, right = right, left
    if isinstance(left, Property):
        if isinstance(right, Property):
            return SameText(left.name, right)
        return (
            SameText(left.name, right.value)
            if isinstance(right.value, str)
            else _compare_numbers("=", left, right)
        )
    assert isinstance(right, Constant)
    if isinstance(left.value, str) and isinstance(right.value, str):
        return Always(TRUE if left.value == right.value else FALSE)
    if isinstance(left.value, str) or isinstance(right.value, str):
        raise Mismatch(f"{_shown(left.value)} and {_shown(right.value)} are of different kinds")
    return _compare_numbers("=", left, right)


def is_null(left: Operand | Condition) -> Condition:
    """Build left IS NULL."""
    if isinstance(left, Property):
        return IsNull(left.name)
    if isinstance(left, Constant):
        # A constant is the same for all messages, so the result is known now.
        return Always(TRUE if left.value is None else FALSE)
    return HasNoOutcome(left)


def between(value: Operand, low: Operand, high: Operand) -> Condition:
    """Build value BETWEEN low AND high. Raises Mismatch, also if low is larger than high."""
    # Built first: it refuses operands that are not numbers, which the next line could not compare.
    within = Every((ordered(">=", value, low), ordered("<=", value, high)))
    if isinstance(low, Constant) and isinstance(high, Constant) and low.value > high.value:  # type: ignore[operator]
        raise Mismatch(f"BETWEEN {low.value} AND {high.value}: the first must not be the larger")
    return within


def not_between(value: Operand, low: Operand, high: Operand) -> Condition:
    """Build value NOT BETWEEN low AND high. Raises Mismatch."""
    return Some((ordered("<", value, low), ordered(">", value, high)))


def has_text(operation: str, left: Property, search: str, *, negated: bool) -> Condition:
    """Build left [NOT] CONTAINS search, or the same with STARTSWITH or ENDSWITH."""
    if not search:
        # With an empty string, neither the search nor its negation is ever true.
        return HasNoText(left.name)
    condition = HasText(left.name, operation, search)
    return Not(condition) if negated else condition


def _compare_numbers(sign: str, left: Operand, right: Operand) -> Condition:
    """Build a comparison of properties and numbers. Two constants are compared here."""
    sides = [side if isinstance(side, Property) else side.value for side in (left, right)]
    decimal = any(isinstance(side, float) for side in sides)
    if isinstance(left, Constant) and isinstance(right, Constant):
        if decimal:
            # Compared as doubles, as a property would be.
            sides = [float(side) for side in sides]  # type: ignore[arg-type]
        return Always(TRUE if ORDERS[sign](*sides) else FALSE)
    # Two properties may be of any type, so they are compared as doubles, which can represent integers, too.
    decimal = decimal or (isinstance(left, Property) and isinstance(right, Property))
    return Ordered(sign, sides[0], sides[1], decimal)  # type: ignore[arg-type]


def _as_condition(side: Operand | Condition) -> Condition:
    """Convert a side of a comparison with a condition. Raises Mismatch for a constant that is not TRUE or FALSE."""
    if isinstance(side, Property):
        return IsTrueText(side.name)
    if isinstance(side, Constant):
        if not isinstance(side.value, bool):
            raise Mismatch(f"{_shown(side.value)} is never TRUE or FALSE")
        return Always(TRUE if side.value else FALSE)
    return side


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_bool(side: object) -> bool:
    return isinstance(side, Constant) and isinstance(side.value, bool)


def _shown(value: object) -> str:
    """Format a constant for an error text, as SQL writes it."""
    if value is None or isinstance(value, bool):
        return str(value).upper().replace("NONE", "NULL")
    return repr(value)[:80]


def _of_arrow(mask: pa.Array) -> TruthArray:
    """Convert the result of an Arrow comparison (bools and nulls) to outcomes. Its nulls become NULL."""
    # Nulls become False first, because numpy has no nulls of bools.
    outcome = of_bools(mask.fill_null(False).to_numpy(zero_copy_only=False))
    if mask.null_count:
        outcome[np.asarray(mask.is_null())] = NULL
    return outcome


# ---- outcomes, and the tables of the logic -------------------------------------------------------------------

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


# ---- properties as columns of text and numbers ---------------------------------------------------------------
# A message's properties are one text (message.py). Arrow splits it once for all names, for many messages at a time. If
# a name occurs twice, the last value counts, as in RocketMQ. TAGS, KEYS and UNIQ_KEY have their own columns, which a
# producer may fill without the text. A text counts as a number if Java's Long.valueOf or Double.valueOf accepts it,
# except for special cases (NaN, Infinity, hexadecimal). Where a number is needed, any other text is an error, never
# zero.

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


def matches(condition: Condition, names: frozenset[str], rows: pa.RecordBatch) -> BoolArray:
    """Mark the rows (LOG_SCHEMA or READ_SCHEMA) for which a condition on the properties `names` is TRUE."""
    mask: BoolArray = condition.truth(Values(rows, names)) == TRUE
    return mask


def _texts(rows: pa.RecordBatch, names: list[str]) -> dict[str, pa.Array]:
    """Extract a column of strings for each property, null for messages without it."""
    columns = {}
    own_columns = {name: rows.column(OWN_COLUMNS[name]) for name in names if name in OWN_COLUMNS}
    # The text of all properties is needed only where the own column has nulls.
    from_text = [name for name in names if name not in own_columns or own_columns[name].null_count]
    for name, column in zip(from_text, _properties(rows.column("properties"), from_text), strict=True):
        columns[name] = pc.coalesce(own_columns[name], column) if name in own_columns else column
    return {**own_columns, **columns}


def _properties(texts: pa.Array, names: list[str]) -> list[pa.Array]:
    """Extract a column of strings for each name from texts of all properties (message.py)."""
    if not names or texts.null_count == len(texts):
        return [pa.nulls(len(texts), pa.string()) for _ in names]
    # The longest text sets the number of rows per slice, so that each slice stays within SPLIT_BYTES.
    longest = int(byte_lengths(texts).max())
    step = max(1, SPLIT_BYTES // max(1, longest))
    slices = [_split(texts.slice(begin, step), names) for begin in range(0, len(texts), step)]
    return [pa.concat_arrays(list(columns)) for columns in zip(*slices, strict=True)]


def _split(texts: pa.Array, names: list[str]) -> list[pa.Array]:
    """Extract the columns of `_properties` from a slice of few bytes."""
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
