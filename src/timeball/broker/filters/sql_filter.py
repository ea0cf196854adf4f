"""SQL filters: the parser of a condition, and its evaluation for the rows of a topic.

The grammar is RocketMQ's, with its precedence: NOT binds more tightly than =. The parser refuses some texts that
RocketMQ accepts, and its error shows the correct form: texts whose precedence would surprise (NOT a = 5), conditions
that are never true in RocketMQ (a property alone), and text after the end of the expression, which RocketMQ ignores.

The parser is LALR(1) (Lark): one pass without recursion, whose time and memory grow with the number of tokens.
FILTER_TOKENS_MAX limits this number. FILTER_DEPTH_MAX limits the nesting, because conditions are evaluated recursively.

The evaluation is compiled if the build had a C compiler (sql_program.pyx). Otherwise sql_conditions.py evaluates the
condition with Arrow and numpy. For the same rows, both give the same result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from timeball.broker.filters import sql_conditions
from timeball.broker.filters.sql_conditions import (
    FALSE,
    LONG_DIGITS,
    LONG_MAX,
    LONG_MIN,
    NULL,
    TRUE,
    Condition,
    Constant,
    Mismatch,
    Operand,
    Property,
)
from timeball.broker.filters.tags import BoolArray
from timeball.log.format import EntryArray
from timeball.model import limits
from timeball.model.errors import InvalidFilter

# The `*+` of STRING is possessive, so that a string without an end is not read as a shorter string.
GRAMMAR = r"""
    start: or_
    ?or_: and_ | and_ (_OR and_)+ -> some
    ?and_: equality | equality (_AND equality)+ -> every
    ?equality: comparison
        | comparison EQUALITY comparison -> equal
        | comparison _IS NOT? NULL       -> is_null
    ?comparison: unary
        | unary ORDER unary                                       -> ordered
        | unary NOT? BETWEEN unary _AND unary                     -> between
        | unary NOT? IN LPAR STRING (_COMMA STRING)* _RPAR       -> one_of
        | unary NOT? (CONTAINS | STARTSWITH | ENDSWITH) STRING    -> has_text
    ?unary: NOT unary           -> negated
        | SIGN* NUMBER          -> number
        | STRING                -> string
        | (TRUE | FALSE | NULL) -> word
        | NAME                  -> name
        | LPAR or_ _RPAR        -> group
    NAME: /[a-z_$][a-z0-9_$]*/i
    NUMBER: /(?:[0-9]|\.[0-9])(?:e[+-]|[a-z0-9_$.])*/i
    STRING: /'(?:[^']|'')*+'/
    EQUALITY: /<>|=/
    ORDER: />=|<=|>|<(?!>)/
    SIGN: /[+-]/
    LPAR: "("
    _RPAR: ")"
    _COMMA: ","
    _OR: "OR"i
    _AND: "AND"i
    _IS: "IS"i
    NOT: "NOT"i
    BETWEEN: "BETWEEN"i
    IN: "IN"i
    CONTAINS: "CONTAINS"i
    STARTSWITH: "STARTSWITH"i
    ENDSWITH: "ENDSWITH"i
    TRUE: "TRUE"i
    FALSE: "FALSE"i
    NULL: "NULL"i
    COMMENT.2: /--[^\n\r]*|\/\*.*?\*\//s
    %ignore COMMENT
    %ignore /[ \t\n\r\f]+/
"""

WORDS = {"TRUE": True, "FALSE": False, "NULL": None}
INTEGER = re.compile(r"(0|[1-9][0-9]*)[lL]?")
DECIMAL = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+")
# Matches the longest number at the beginning of a malformed number, to find the first wrong character.
PREFIX = re.compile(r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+[lL]|[0-9]+)(?:(?<![lL])[eE][+-]?[0-9]+)?")
# Hints for the error text, by the character that the lexer refuses.
HINTS = {
    "!": "not equal is <>",
    '"': "a string stands in single quotes",
    "`": "the name of a property stands bare",
    ";": "a filter is one expression, without a semicolon",
    "*": "there is no arithmetic; a subscription to all is a tag expression",
}
# Sets of tokens, and a description of each. An error has the first description whose tokens the parser all accepts.
EXPECTED = [
    ({"$END"}, "AND, OR or the end"),
    ({"NAME"}, "a property, a constant or a parenthesis"),
    ({"NUMBER"}, "a number behind the sign"),
    ({"STRING"}, "a string in single quotes"),
    ({"_RPAR"}, ")"),
    ({"LPAR"}, "("),
    ({"NULL"}, "NULL"),
    ({"BETWEEN"}, "BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH"),
    ({"_AND"}, "AND"),
]
# The types of tokens that become an operand.
OPERANDS = {"NAME", "STRING", "NUMBER", "TRUE", "FALSE", "NULL"}


@dataclass(frozen=True, slots=True)
class Part:
    """An operand or a condition, its position in the text, and the depth of parentheses and NOTs in it."""

    value: Operand | Condition
    at: int  # from 0
    depth: int = 0
    in_parentheses: bool = False


def parse(text: str) -> tuple[Condition, frozenset[str]]:
    """Parse a condition. Returns it, and the names of the properties in it. Raises InvalidFilter."""
    reader = PARSER.parse_interactive(text)
    try:
        lexed_tokens: Iterator[Token] = reader.lexer_thread.lex(reader.parser_state)  # type: ignore[no-untyped-call]
        # Count the tokens before the parser gets them, because the stack of an LALR parser grows with its input.
        tokens = list(islice(lexed_tokens, limits.FILTER_TOKENS_MAX + 1))
        if len(tokens) > limits.FILTER_TOKENS_MAX:
            message = f"the expression has more than {limits.FILTER_TOKENS_MAX} words and signs"
            raise _error_at(tokens[-1].start_pos, message, "FILTER_TOKENS_MAX")
        for token in tokens:
            reader.feed_token(token)
        # Parts are built during the parse (`_Actions`), so there is no tree to walk, and no recursion.
        root: Part = reader.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedCharacters as error:
        raise _lexer_error(text, error.pos_in_stream or 0) from None
    except UnexpectedToken as error:
        raise _parser_error(error, len(text)) from None
    return _condition(root), frozenset(str(token) for token in tokens if token.type == "NAME")


@v_args(inline=True)
class _Actions(Transformer[Token, Part]):
    """Builds the `Part` of each grammar rule as soon as the parser has read it.

    Each method belongs to the rule of its name, and gets the parts and tokens of the rule. Tokens that begin with an
    underscore are left out. All methods raise InvalidFilter.
    """

    def start(self, part: Part) -> Part:
        return part

    def some(self, *parts: Part) -> Part:
        return _combine(parts, sql_conditions.Some(tuple(map(_condition, parts))))

    def every(self, *parts: Part) -> Part:
        return _combine(parts, sql_conditions.Every(tuple(map(_condition, parts))))

    def equal(self, left: Part, sign: Token, right: Part) -> Part:
        same = _build(sign, lambda: sql_conditions.equal(left.value, right.value))
        return _combine((left, right), sql_conditions.Not(same) if sign == "<>" else same)

    def is_null(self, left: Part, *words: Token) -> Part:
        null = sql_conditions.is_null(left.value)
        return _combine((left,), sql_conditions.Not(null) if len(words) > 1 else null)

    def ordered(self, left: Part, sign: Token, right: Part) -> Part:
        sides = _operand(left), _operand(right)
        return _combine((left, right), _build(sign, lambda: sql_conditions.ordered(str(sign), *sides)))

    def between(self, left: Part, *rest: Any) -> Part:
        """Build left [NOT] BETWEEN low AND high."""
        *negated, word, low, high = rest  # perhaps NOT, then BETWEEN, and the two limits
        make = sql_conditions.not_between if negated else sql_conditions.between
        sides = _operand(left), _operand(low), _operand(high)
        return _combine((left, low, high), _build(word, lambda: make(*sides)))

    def one_of(self, left: Part, *rest: Token) -> Part:
        """Build left [NOT] IN (strings). `rest`: perhaps NOT, then IN, the parenthesis, and the strings."""
        items = [token for token in rest if token.type == "STRING"]
        if len(items) > limits.FILTER_IN_ITEMS_MAX:
            message = f"a list has at most {limits.FILTER_IN_ITEMS_MAX} items"
            raise _error_at(items[limits.FILTER_IN_ITEMS_MAX].start_pos, message, "FILTER_IN_ITEMS_MAX")
        condition = sql_conditions.OneOf(_property(left, "IN"), frozenset(map(str, items)))
        return _combine((left,), sql_conditions.Not(condition) if rest[0].type == "NOT" else condition)

    def has_text(self, left: Part, *rest: Token) -> Part:
        """Build left [NOT] CONTAINS, STARTSWITH or ENDSWITH a string."""
        *negated, word, text = rest  # perhaps NOT, then the operation, and the string
        operation = str(word).upper()
        operand = Property(_property(left, operation))
        return _combine(
            (left,), sql_conditions.has_text(operation, operand, str(text), negated=bool(negated))
        )

    def negated(self, word: Token, part: Part) -> Part:
        """Build NOT part. Refuses a property alone."""
        # RocketMQ parses NOT a = 5 as (NOT a) = 5, which no user means.
        if isinstance(part.value, Property) and not part.in_parentheses:
            name = part.value.name[:80]
            raise _error_at(part.at, f"NOT goes before a condition in parentheses: NOT ({name} …)")
        return Part(sql_conditions.Not(_condition(part)), word.start_pos or 0, _next_depth(part))

    def number(self, *tokens: Token) -> Part:
        *signs, number = tokens
        value = _number(number, negative=[str(sign) for sign in signs].count("-") % 2 == 1)
        return Part(Constant(value), tokens[0].start_pos or 0)

    def string(self, token: Token) -> Part:
        return Part(Constant(str(token)), token.start_pos or 0)

    def word(self, token: Token) -> Part:
        return Part(Constant(WORDS[token.upper()]), token.start_pos or 0)

    def name(self, token: Token) -> Part:
        return Part(Property(str(token)), token.start_pos or 0)

    def group(self, opening: Token, part: Part) -> Part:
        return Part(part.value, opening.start_pos or 0, _next_depth(part), in_parentheses=True)


# ---- checks of parts -----------------------------------------------------------------------------------------


def _combine(parts: tuple[Part, ...], condition: Condition) -> Part:
    """Build the part of a condition that consists of these parts, and begins with the first of them."""
    return Part(condition, parts[0].at, max(part.depth for part in parts))


def _next_depth(part: Part) -> int:
    """Compute the depth of a part in parentheses or after NOT. Raises InvalidFilter above FILTER_DEPTH_MAX."""
    if part.depth == limits.FILTER_DEPTH_MAX:
        message = f"parentheses and NOTs go at most {limits.FILTER_DEPTH_MAX} deep"
        raise _error_at(part.at, message, "FILTER_DEPTH_MAX")
    return part.depth + 1


def _operand(part: Part) -> Operand:
    """Return the operand of a part. Raises InvalidFilter for a condition."""
    if isinstance(part.value, (Property, Constant)):
        return part.value
    raise _error_at(part.at, "a condition is neither larger nor smaller than another")


def _property(part: Part, word: str) -> str:
    """Return the name of the property that a part is. Raises InvalidFilter for any other part. `word`: the operator."""
    if isinstance(part.value, Property):
        return part.value.name
    raise _error_at(part.at, f"{word} stands behind the name of a property")


def _condition(part: Part) -> Condition:
    """Return the condition of a part. TRUE, FALSE and NULL become one. Raises InvalidFilter for other operands."""
    value = part.value
    if isinstance(value, Property):
        name = value.name[:80]
        raise _error_at(part.at, f"{name} is a property and no condition: compare it, as in {name} = TRUE")
    if not isinstance(value, Constant):
        return value
    if isinstance(value.value, bool):
        return sql_conditions.Always(TRUE if value.value else FALSE)
    if value.value is None:
        return sql_conditions.Always(NULL)
    raise _error_at(part.at, "a constant is no condition: compare it with a property")


def _build(sign: Token, make: Callable[[], Condition]) -> Condition:
    """Call `make`, and convert Mismatch to InvalidFilter with the position of `sign`."""
    try:
        return make()
    except Mismatch as mismatch:
        raise _error_at(sign.start_pos, str(mismatch)) from None


# ---- tokens --------------------------------------------------------------------------------------------------


def _unquote(token: Token) -> Token:
    return token.update(value=token[1:-1].replace("''", "'"))


def _check_number(token: Token) -> Token:
    """Check a NUMBER token, which the lexer only knows to begin like a number. Raises InvalidFilter."""
    if INTEGER.fullmatch(token) or DECIMAL.fullmatch(token):
        return token
    start, prefix = token.start_pos or 0, PREFIX.match(token)
    end = prefix.end() if prefix else 0
    # All characters belong to a number, so the leading zeros are wrong.
    if end == len(token):
        raise InvalidFilter(
            f"the number at character {start + 1} begins with 0; leave the zeros out", position=start + 1
        )
    raise InvalidFilter(f"the number at character {start + 1} runs into {token[end]!r}", position=start + 1)


def _number(token: Token, *, negative: bool) -> int | float:
    """Convert a NUMBER token to a 64-bit integer or a double. Raises InvalidFilter for a number out of range."""
    digits = token.rstrip("lL")
    if digits.isdecimal():
        # The digits are counted first, because Python refuses to convert thousands of them, with another error.
        value = int(digits) * (-1 if negative else 1) if len(digits) <= LONG_DIGITS else LONG_MAX + 1
        if not LONG_MIN <= value <= LONG_MAX:
            raise _error_at(token.start_pos, "the number does not fit into 64 bits; write it with a point")
        return value
    # The text has been checked, so `float` cannot fail, but it may overflow to infinity.
    decimal = float(token)
    if math.isinf(decimal):
        raise _error_at(token.start_pos, "the number is too large for a double")
    return -decimal if negative else decimal


# ---- errors --------------------------------------------------------------------------------------------------


def _lexer_error(text: str, start: int) -> InvalidFilter:
    """Build the error for a character at which no token begins. `start`: its index."""
    for mark, kind in (("'", "string"), ("/*", "comment")):
        if text.startswith(mark, start):
            return InvalidFilter(
                f"the {kind} that begins at character {start + 1} has no end", position=start + 1
            )
    hint = f": {HINTS[text[start]]}" if text[start] in HINTS else ""
    return InvalidFilter(f"unexpected {text[start]!r} at character {start + 1}{hint}", position=start + 1)


def _parser_error(error: UnexpectedToken, end: int) -> InvalidFilter:
    """Build the error for a token that the grammar does not allow. `end`: the length of the text."""
    stack, accepted = error.state.value_stack, error.expected
    expected = next(description for names, description in EXPECTED if names <= accepted)
    if "$END" in accepted:
        token_types = [symbol.type for symbol in stack if isinstance(symbol, Token)]
        # A parenthesis that is not closed is a more likely reason than a missing AND.
        if token_types.count("LPAR") > token_types.count("_RPAR"):
            expected = ")"
        elif len(stack) == 1 and _is_operand(stack[0]):
            expected = "a comparison"
    token = error.token
    if token.type == "$END":
        return _error_at(end, f"expected {expected}, found the end")
    return _error_at(token.start_pos, f"expected {expected}, found {str(token)[:80]!r}")


def _is_operand(entry: Token | Part) -> bool:
    """Check whether this entry of the parser's stack is an operand, as a token or as a part."""
    return (
        entry.type in OPERANDS if isinstance(entry, Token) else isinstance(entry.value, (Property, Constant))
    )


def _error_at(start: int | None, message: str, limit: str | None = None) -> InvalidFilter:
    """Build an error with a position. `start`: the index of the character. `limit`: the name of the limit, if any."""
    position = (start or 0) + 1
    where = f"at character {position}" + (f" ({limit})" if limit else "")
    return InvalidFilter(f"{message}, {where}", position=position, limit=limit)


# Built when the broker starts: it takes about 40 ms, and the first subscription must not delay messages that are due.
# ASCII, because otherwise letters of other alphabets may equal ASCII letters when case is ignored.
PARSER = Lark(
    GRAMMAR, parser="lalr", lexer="basic", transformer=_Actions(), g_regex_flags=re.ASCII,
    lexer_callbacks={"STRING": _unquote, "NUMBER": _check_number},
)  # fmt: skip


# ---- the filter -----------------------------------------------------------------------------------------------

try:
    from timeball.broker.filters.sql_program import Program  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    Program = None


class SqlFilter:
    """A filter that matches messages for which a condition on their properties is TRUE."""

    matches_all, uses_index = False, False

    def __init__(self, text: str) -> None:
        """Parse the condition. Raises InvalidFilter."""
        self.text = text.strip()
        self._condition, self._names = parse(text)
        self._program = None if Program is None else Program(self._condition, self._names)

    def candidates(self, entries: EntryArray) -> BoolArray:
        return np.ones(len(entries), dtype=np.bool_)  # the index does not contain properties

    def exact(self, rows: pa.RecordBatch) -> BoolArray:
        if self._program is None:
            return sql_conditions.matches(self._condition, self._names, rows)
        return np.frombuffer(self._program.matches(rows), np.bool_)
