"""The grammar of SQL filters: a text becomes one condition, or InvalidFilter says where it went wrong.

    or          and (OR and)*
    and         equality (AND equality)*
    equality    comparison [ (= | <>) comparison | IS [NOT] NULL ]
    comparison  unary [ (> | >= | < | <=) unary
                      | [NOT] BETWEEN unary AND unary
                      | [NOT] IN ( string (, string)* )
                      | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) string ]
    unary       NOT unary | (+ | -)* number | primary
    primary     string | number | TRUE | FALSE | NULL | property | ( or )

RocketMQ's grammar, with its binding: NOT is closer than =. Where that would surprise (NOT a = 5), where RocketMQ's
reading is never true (a property alone as a condition) and where it stops reading (text behind the end), this one
refuses and says what to write. Recursion is bounded by FILTER_DEPTH_MAX, the conditions' as much as the parser's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from timeball import limits
from timeball.broker.filters import sql_conditions as made
from timeball.broker.filters.sql_conditions import Condition, Constant, Mismatch, Operand, Property
from timeball.broker.filters.sql_lexer import Sort, Token, tokens
from timeball.broker.filters.sql_truth import FALSE, NULL, TRUE
from timeball.broker.filters.sql_values import LONG_DIGITS, LONG_MAX, LONG_MIN
from timeball.errors import InvalidFilter

WORDS = {"TRUE": True, "FALSE": False, "NULL": None}


def parse(text: str) -> tuple[Condition, frozenset[str]]:
    """The condition, and the names of the properties in it."""
    parser = _Parser(tokens(text))
    return parser.whole(), frozenset(parser.names)


class _Parser:
    """Recursive descent over the tokens, one ahead."""

    def __init__(self, read: list[Token]) -> None:
        self._tokens, self._at, self._depth = read, 0, 0
        self.names: set[str] = set()

    def whole(self) -> Condition:
        start = self._next
        found = self._or()
        if self._next.sort is not Sort.END:
            is_operand = isinstance(found, (Property, Constant))
            raise _expected("a comparison" if is_operand else "AND, OR or the end", self._next)
        return self._as_condition(found, start)

    # -- the grammar, from loose to close -------------------------------------------------------------------

    def _or(self) -> Operand | Condition:
        return self._row("OR", self._and, made.Some)

    def _and(self) -> Operand | Condition:
        return self._row("AND", self._equality, made.Every)

    def _row(
        self,
        word: str,
        part: Callable[[], Operand | Condition],
        of: Callable[[tuple[Condition, ...]], Condition],
    ) -> Operand | Condition:
        start = self._next
        first = part()
        if not self._is(word):
            return first
        parts = [self._as_condition(first, start)]
        while self._take(word):
            parts.append(self._condition(part, self._next))
        return of(tuple(parts))

    def _equality(self) -> Operand | Condition:
        left = self._comparison()
        sign = self._next
        if self._take("=") or self._take("<>"):
            right = self._comparison()
            same = self._made(sign, lambda: made.equal(left, right))
            return made.Not(same) if sign.text == "<>" else same
        if self._take("IS"):
            negated = self._take("NOT")
            self._expect("NULL")
            null = made.is_null(left)
            return made.Not(null) if negated else null
        return left

    def _comparison(self) -> Operand | Condition:
        start = self._next
        left = self._unary()
        sign = self._next
        if sign.sort is Sort.SYMBOL and sign.text in (">", ">=", "<", "<="):
            self._advance()
            value, right = self._operand(left, start), self._closer()
            return self._made(sign, lambda: made.ordered(sign.text, value, right))
        negated = self._take("NOT")
        sign = self._next
        if self._take("BETWEEN"):
            value, low = self._operand(left, start), self._closer()
            self._expect("AND")
            high = self._closer()
            make = made.not_between if negated else made.between
            return self._made(sign, lambda: make(value, low, high))
        if self._take("IN"):
            one = made.OneOf(self._property(left, start, "IN").name, self._items())
            return made.Not(one) if negated else one
        if self._take("CONTAINS") or self._take("STARTSWITH") or self._take("ENDSWITH"):
            searched = self._property(left, start, sign.text)
            return made.has_text(sign.text, searched, self._string(), negated=negated)
        if negated:
            raise _expected("BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH", self._next)
        return left

    def _unary(self) -> Operand | Condition:
        token = self._next
        if self._take("NOT"):
            if self._next.sort is Sort.NAME:
                raise _refused(
                    self._next, f"NOT goes before a condition in parentheses: NOT ({self._next.text[:80]} …)"
                )
            self._enter(token)
            part = self._condition(self._unary, self._next)
            self._depth -= 1
            return made.Not(part)
        return self._signed() if self._is("+") or self._is("-") else self._primary()

    def _signed(self) -> Constant:
        negative = False
        while self._is("+") or self._is("-"):
            negative ^= self._advance().text == "-"
        token = self._advance()
        if token.sort not in (Sort.INTEGER, Sort.DECIMAL):
            raise _expected("a number behind the sign", token)
        return Constant(_number(token, negative=negative))

    def _primary(self) -> Operand | Condition:
        token = self._advance()
        if token.sort is Sort.STRING:
            return Constant(token.text)
        if token.sort in (Sort.INTEGER, Sort.DECIMAL):
            return Constant(_number(token))
        if token.sort is Sort.NAME:
            self.names.add(token.text)
            return Property(token.text)
        if token.sort is Sort.KEYWORD and token.text in WORDS:
            return Constant(WORDS[token.text])
        if token.sort is Sort.SYMBOL and token.text == "(":
            self._enter(token)
            inside = self._or()
            self._expect(")")
            self._depth -= 1
            return inside
        raise _expected("a property, a constant or a parenthesis", token)

    def _items(self) -> frozenset[str]:
        self._expect("(")
        items = {self._string()}
        count = 1
        while self._take(","):
            position = self._next
            items.add(self._string())
            count += 1
            if count > limits.FILTER_IN_ITEMS_MAX:
                raise _refused(
                    position, f"a list has at most {limits.FILTER_IN_ITEMS_MAX} items", "FILTER_IN_ITEMS_MAX"
                )
        self._expect(")")
        return frozenset(items)

    # -- what an operator may stand beside --------------------------------------------------------------------

    def _closer(self) -> Operand:
        """What stands behind a sign of order: a number or a property."""
        start = self._next
        return self._operand(self._unary(), start)

    def _operand(self, side: Operand | Condition, start: Token) -> Operand:
        if isinstance(side, (Property, Constant)):
            return side
        raise _refused(start, "a condition is neither larger nor smaller than another")

    def _property(self, side: Operand | Condition, start: Token, word: str) -> Property:
        if isinstance(side, Property):
            return side
        raise _refused(start, f"{word} stands behind the name of a property")

    def _condition(self, part: Callable[[], Operand | Condition], start: Token) -> Condition:
        return self._as_condition(part(), start)

    def _as_condition(self, side: Operand | Condition, start: Token) -> Condition:
        if isinstance(side, Property):
            shown = side.name[:80]
            raise _refused(start, f"{shown} is a property and no condition: compare it, as in {shown} = TRUE")
        if not isinstance(side, Constant):
            return side
        if isinstance(side.value, bool):
            return made.Always(TRUE if side.value else FALSE)
        if side.value is None:
            return made.Always(NULL)
        raise _refused(start, "a constant is no condition: compare it with a property")

    def _made(self, sign: Token, make: Callable[[], Condition]) -> Condition:
        try:
            return make()
        except Mismatch as mismatch:
            raise _refused(sign, str(mismatch)) from None

    # -- tokens -----------------------------------------------------------------------------------------------

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _is(self, text: str) -> bool:
        return self._next.sort in (Sort.KEYWORD, Sort.SYMBOL) and self._next.text == text

    def _advance(self) -> Token:
        token = self._next
        if token.sort is not Sort.END:
            self._at += 1
        return token

    def _take(self, text: str) -> bool:
        if not self._is(text):
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise _expected(text, self._next)

    def _string(self) -> str:
        token = self._advance()
        if token.sort is not Sort.STRING:
            raise _expected("a string in single quotes", token)
        return token.text

    def _enter(self, token: Token) -> None:
        self._depth += 1
        if self._depth > limits.FILTER_DEPTH_MAX:
            raise _refused(
                token,
                f"parentheses and NOTs go at most {limits.FILTER_DEPTH_MAX} deep",
                limit="FILTER_DEPTH_MAX",
            )


def _number(token: Token, *, negative: bool = False) -> int | float:
    if token.sort is Sort.INTEGER:
        # The digits are counted first: Python refuses to convert thousands of them, with an error of its own.
        value = int(token.text) * (-1 if negative else 1) if len(token.text) <= LONG_DIGITS else LONG_MAX + 1
        if not LONG_MIN <= value <= LONG_MAX:
            raise _refused(token, "the number does not fit into 64 bits; write it with a point")
        return value
    decimal = float(token.text)
    if math.isinf(decimal):
        raise _refused(token, "the number is too large for a double")
    return -decimal if negative else decimal


def _expected(what: str, found: Token) -> InvalidFilter:
    shown = "the end" if found.sort is Sort.END else repr(found.text[:80])
    return _refused(found, f"expected {what}, found {shown}")


def _refused(token: Token, said: str, limit: str | None = None) -> InvalidFilter:
    where = f"at character {token.position}" + (f" ({limit})" if limit else "")
    return InvalidFilter(f"{said}, {where}", position=token.position, limit=limit)
