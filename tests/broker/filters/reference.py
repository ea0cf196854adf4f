"""A second evaluator of SQL filters: draws a tree, writes it as SQL, and evaluates it for one message at a time.

It is slow and simple on purpose, and shares no code with the filters under test. A tree is a tuple of a kind (a key of
`EVALUATORS`, "property" or "value") and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from tests.broker.filters.messages import Message

Tree = tuple[Any, ...]
Outcome = bool | None

NAMES = ["a", "b", "$price", "TAGS"]
TEXTS = [
    "1", "2", "-3", "+4", "007", "5.5", " 7 ", "1e3", "2.", ".5", "1.5f", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "", "abc", "it's", "true", "True", "false", "nan", "1_0", "٣",
    "0x10", "e5", "+", "-", "1e999",
]  # fmt: skip
NUMBERS = [0, 1, 2, -3, 4, 7, 5.5, 1.5, 1000.0, 2**63 - 1, -(2**63), 0.0, 1e300, 2.0]
SIGNS = ["=", "<>", ">", ">=", "<", "<="]
SEARCHES = ["CONTAINS", "STARTSWITH", "ENDSWITH"]


class Failed(Exception):
    """The outcome ERROR: the message is not delivered, whatever stands to the right."""


# ---- evaluating -------------------------------------------------------------------------------------------


def outcome(tree: Tree, message: Message) -> Outcome:
    """Evaluate a condition for a message. Returns True, False or None (NULL). Raises Failed."""
    kind, *arguments = tree
    return EVALUATORS[kind](message, *arguments)


def is_delivered(tree: Tree, message: Message) -> bool:
    try:
        return outcome(tree, message) is True
    except Failed:
        return False


def evaluate_or(message: Message, parts: list[Tree]) -> Outcome:
    result: Outcome = False
    for part in parts:
        part_outcome = outcome(part, message)
        if part_outcome is True:
            return True
        result = None if part_outcome is None else result
    return result


def evaluate_and(message: Message, parts: list[Tree]) -> Outcome:
    result: Outcome = True
    for part in parts:
        part_outcome = outcome(part, message)
        if part_outcome is False:
            return False
        result = None if part_outcome is None else result
    return result


def evaluate_not(message: Message, part: Tree) -> Outcome:
    part_outcome = outcome(part, message)
    return None if part_outcome is None else not part_outcome


def compare_sides(message: Message, sign: str, left: Tree, right: Tree) -> Outcome:
    a, b = (message.get(side[1]) if side[0] == "property" else side[1] for side in (left, right))
    if a is None or b is None:
        return None
    ordering = sign not in ("=", "<>")
    if isinstance(a, bool) or isinstance(b, bool):
        a, b = (side.lower() == "true" if isinstance(side, str) else side for side in (a, b))
    elif not (isinstance(a, str) and isinstance(b, str) and not ordering):
        decimal = isinstance(a, float) or isinstance(b, float) or (isinstance(a, str) and isinstance(b, str))
        a, b = (number(side, decimal) for side in (a, b))
    return {
        "=": a == b, "<>": a != b, ">": ordering and a > b, ">=": ordering and a >= b,
        "<": ordering and a < b, "<=": ordering and a <= b,
    }[sign]  # fmt: skip


def number(side: Any, decimal: bool) -> int | float:
    """Read a side as a double (`decimal`) or a 64-bit integer. Raises Failed for a text that is none."""
    if not isinstance(side, str):
        return float(side) if decimal else side
    if decimal:
        match = re.fullmatch(
            r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?", side.strip(" ")
        )
        if not match:
            raise Failed
        return float(side.strip(" ").rstrip("fFdD"))
    if not re.fullmatch(r"[+-]?[0-9]+", side) or not -(2**63) <= int(side) < 2**63:
        raise Failed
    return int(side)


def evaluate_between(message: Message, negated: bool, value: Tree, low: Tree, high: Tree) -> Outcome:
    if negated:
        return evaluate_or(message, [("compare", "<", value, low), ("compare", ">", value, high)])
    return evaluate_and(message, [("compare", ">=", value, low), ("compare", "<=", value, high)])


def evaluate_in(message: Message, negated: bool, name: str, items: list[str]) -> Outcome:
    text = message.get(name)
    return None if text is None else (text in items) != negated


def evaluate_search(message: Message, how: str, negated: bool, name: str, search: str) -> Outcome:
    text = message.get(name)
    if text is None:
        return None
    if not search:
        return False
    found = {
        "CONTAINS": search in text, "STARTSWITH": text.startswith(search), "ENDSWITH": text.endswith(search)
    }[how]  # fmt: skip
    return found != negated


def evaluate_property_is_null(message: Message, negated: bool, name: str) -> Outcome:
    return (name not in message) != negated


def evaluate_condition_is_null(message: Message, negated: bool, part: Tree) -> Outcome:
    return (outcome(part, message) is None) != negated


def evaluate_same(message: Message, left: Tree, right: Tree) -> Outcome:
    a, b = outcome(left, message), outcome(right, message)
    return None if a is None or b is None else a == b


def evaluate_constant(message: Message, value: Outcome) -> Outcome:
    return value


EVALUATORS: dict[str, Callable[..., Outcome]] = {
    "or": evaluate_or, "and": evaluate_and, "not": evaluate_not, "compare": compare_sides, "between": evaluate_between,
    "in": evaluate_in, "search": evaluate_search, "null": evaluate_property_is_null,
    "unknown": evaluate_condition_is_null, "same": evaluate_same, "const": evaluate_constant,
}  # fmt: skip


# ---- writing as SQL ---------------------------------------------------------------------------------------


def show(tree: Tree) -> str:
    """Write a tree as SQL, with every part in parentheses."""
    kind, *rest = tree
    if kind in ("or", "and"):
        return f" {kind.upper()} ".join(f"({show(part)})" for part in rest[0])
    if kind == "not":
        return f"NOT ({show(rest[0])})"
    if kind == "compare":
        return f"{show(rest[1])} {rest[0]} {show(rest[2])}"
    if kind == "between":
        negated, value, low, high = rest
        return f"{show(value)} {'NOT ' * negated}BETWEEN {show(low)} AND {show(high)}"
    if kind == "in":
        negated, name, items = rest
        return f"{name} {'NOT ' * negated}IN ({', '.join(map(quoted, items))})"
    if kind == "search":
        how, negated, name, search = rest
        return f"{name} {'NOT ' * negated}{how} {quoted(search)}"
    if kind == "null":
        return f"{rest[1]} IS {'NOT ' * rest[0]}NULL"
    if kind == "unknown":
        return f"({show(rest[1])}) IS {'NOT ' * rest[0]}NULL"
    if kind == "same":
        return f"({show(rest[0])}) = ({show(rest[1])})"
    if kind == "property":
        return str(rest[0])
    value = rest[0]
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "true", False: "False"}[value]
    return quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- drawing ----------------------------------------------------------------------------------------------

PROPERTIES = st.tuples(st.just("property"), st.sampled_from(NAMES))
NUMERIC = st.tuples(st.just("value"), st.sampled_from(NUMBERS))
TEXTUAL = st.tuples(st.just("value"), st.sampled_from(TEXTS))
FLAG = st.tuples(st.just("value"), st.booleans())


def swapped(left: Any, right: Any) -> Any:
    return st.one_of(st.tuples(left, right), st.tuples(right, left))


def compare(signs: list[str], pairs: Any) -> Any:
    return st.tuples(st.just("compare"), st.sampled_from(signs), pairs).map(lambda t: (t[0], t[1], *t[2]))


def in_order(tree: Tree) -> Tree:
    """Exchange the limits of BETWEEN if the first is the larger one: such a text is refused, as in RocketMQ."""
    kind, negated, value, low, high = tree
    if low[0] == high[0] == "value" and low[1] > high[1]:
        low, high = high, low
    return kind, negated, value, low, high


def without_null(tree: Tree) -> Tree:
    """Replace NULL by TRUE: a comparison with NULL is refused."""
    return tuple(("const", True) if part == ("const", None) else part for part in tree)


BOUNDS = st.one_of(PROPERTIES, NUMERIC)
SIMPLE = st.one_of(
    compare(SIGNS, swapped(PROPERTIES, NUMERIC)),
    compare(SIGNS, st.tuples(PROPERTIES, PROPERTIES)),
    compare(SIGNS, st.tuples(NUMERIC, NUMERIC)),
    compare(["=", "<>"], swapped(PROPERTIES, st.one_of(TEXTUAL, FLAG))),
    st.tuples(st.just("between"), st.booleans(), PROPERTIES, BOUNDS, BOUNDS).map(in_order),
    st.tuples(
        st.just("in"), st.booleans(), st.sampled_from(NAMES), st.lists(st.sampled_from(TEXTS), min_size=1)
    ),
    st.tuples(
        st.just("search"), st.sampled_from(SEARCHES), st.booleans(), st.sampled_from(NAMES),
        st.sampled_from(["", "t", "5", "abc", "1"]),
    ),
    st.tuples(st.just("null"), st.booleans(), st.sampled_from(NAMES)),
    st.tuples(st.just("const"), st.sampled_from([True, False, None])),
)  # fmt: skip
TREES = st.recursive(
    SIMPLE,
    lambda part: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), st.lists(part, min_size=2, max_size=3)),
        st.tuples(st.just("not"), part),
        st.tuples(st.just("unknown"), st.booleans(), part),
        st.tuples(st.just("same"), part, part).map(without_null),
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from([*NAMES, "other"]), st.sampled_from(TEXTS), max_size=4),
    min_size=1, max_size=6,
)  # fmt: skip
