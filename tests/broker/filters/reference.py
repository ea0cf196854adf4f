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
    """The outcome ERROR: it ends the evaluation, and the message is not delivered."""


# ---- evaluating -------------------------------------------------------------------------------------------


def outcome(tree: Tree, message: Message) -> Outcome:
    """Evaluate a condition for a message. Returns True, False or None (NULL). Raises Failed."""
    kind, *arguments = tree
    return EVALUATORS[kind](message, *arguments)


def is_delivered(tree: Tree, message: Message) -> bool:
    """Check whether a condition selects a message: ERROR counts as not selected."""
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
    """Compare two sides: as truth values if one is TRUE or FALSE, as texts, or as numbers. Raises Failed."""
    first, second = (message.get(side[1]) if side[0] == "property" else side[1] for side in (left, right))
    if first is None or second is None:
        return None
    ordering = sign not in ("=", "<>")
    if isinstance(first, bool) or isinstance(second, bool):
        first, second = (
            side.lower() == "true" if isinstance(side, str) else side for side in (first, second)
        )
    elif not (isinstance(first, str) and isinstance(second, str) and not ordering):
        decimal = (
            isinstance(first, float)
            or isinstance(second, float)
            or (isinstance(first, str) and isinstance(second, str))
        )
        first, second = (number(side, decimal) for side in (first, second))
    return {
        "=": first == second, "<>": first != second,
        ">": ordering and first > second, ">=": ordering and first >= second,
        "<": ordering and first < second, "<=": ordering and first <= second,
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
    is_match = {
        "CONTAINS": search in text, "STARTSWITH": text.startswith(search), "ENDSWITH": text.endswith(search)
    }[how]  # fmt: skip
    return is_match != negated


def evaluate_property_is_null(message: Message, negated: bool, name: str) -> Outcome:
    return (name not in message) != negated


def evaluate_condition_is_null(message: Message, negated: bool, part: Tree) -> Outcome:
    return (outcome(part, message) is None) != negated


def evaluate_same(message: Message, left: Tree, right: Tree) -> Outcome:
    first, second = outcome(left, message), outcome(right, message)
    return None if first is None or second is None else first == second


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
    kind, *arguments = tree
    if kind in ("or", "and"):
        return f" {kind.upper()} ".join(f"({show(part)})" for part in arguments[0])
    if kind == "not":
        return f"NOT ({show(arguments[0])})"
    if kind == "compare":
        return f"{show(arguments[1])} {arguments[0]} {show(arguments[2])}"
    if kind == "between":
        negated, value, low, high = arguments
        return f"{show(value)} {'NOT ' * negated}BETWEEN {show(low)} AND {show(high)}"
    if kind == "in":
        negated, name, items = arguments
        return f"{name} {'NOT ' * negated}IN ({', '.join(map(quote, items))})"
    if kind == "search":
        how, negated, name, search = arguments
        return f"{name} {'NOT ' * negated}{how} {quote(search)}"
    if kind == "null":
        return f"{arguments[1]} IS {'NOT ' * arguments[0]}NULL"
    if kind == "unknown":
        return f"({show(arguments[1])}) IS {'NOT ' * arguments[0]}NULL"
    if kind == "same":
        return f"({show(arguments[0])}) = ({show(arguments[1])})"
    if kind == "property":
        return str(arguments[0])
    value = arguments[0]
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "true", False: "False"}[value]
    return quote(value) if isinstance(value, str) else repr(value)


def quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# ---- drawing ----------------------------------------------------------------------------------------------

PROPERTIES = st.tuples(st.just("property"), st.sampled_from(NAMES))
NUMERIC = st.tuples(st.just("value"), st.sampled_from(NUMBERS))
TEXTUAL = st.tuples(st.just("value"), st.sampled_from(TEXTS))
FLAG = st.tuples(st.just("value"), st.booleans())


def in_either_order(left: Any, right: Any) -> Any:
    """Draw the two sides of a comparison, in either order."""
    return st.one_of(st.tuples(left, right), st.tuples(right, left))


def compare(signs: list[str], pairs: Any) -> Any:
    """Draw a comparison of a pair of sides."""
    return st.tuples(st.just("compare"), st.sampled_from(signs), pairs).map(lambda t: (t[0], t[1], *t[2]))


def in_order(tree: Tree) -> Tree:
    """Exchange the limits of BETWEEN if the first limit is larger: the parser refuses this, as RocketMQ does."""
    kind, negated, value, low, high = tree
    if low[0] == high[0] == "value" and low[1] > high[1]:
        low, high = high, low
    return kind, negated, value, low, high


def without_null(tree: Tree) -> Tree:
    """Replace NULL by TRUE: a comparison with NULL is refused."""
    return tuple(("const", True) if part == ("const", None) else part for part in tree)


BOUNDS = st.one_of(PROPERTIES, NUMERIC)
SIMPLE = st.one_of(
    compare(SIGNS, in_either_order(PROPERTIES, NUMERIC)),
    compare(SIGNS, st.tuples(PROPERTIES, PROPERTIES)),
    compare(SIGNS, st.tuples(NUMERIC, NUMERIC)),
    compare(["=", "<>"], in_either_order(PROPERTIES, st.one_of(TEXTUAL, FLAG))),
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
