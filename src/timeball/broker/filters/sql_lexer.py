"""The words of an SQL filter: one pass over the characters, no look-back, bounded in number.

    word     letters, digits, _ and $, not a digit first; a keyword in any case, or the name of a property
    number   12  12L  1.5  1.  .5  1e3
    string   'it''s'
    symbol   = <> > >= < <= ( ) , + -
    comment  -- to the end of the line, and /* … */

As in RocketMQ's grammar. A number begins with 0 only when it is 0 or has a point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from timeball import limits
from timeball.errors import InvalidFilter

KEYWORDS = frozenset(
    ["NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)  # fmt: skip
LINE_ENDS = frozenset("\n\r")
BLANKS = frozenset(" \t\n\r\f")
DIGITS = frozenset("0123456789")
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_$")
SYMBOLS = ("<>", ">=", "<=", "=", ">", "<", "(", ")", ",", "+", "-")
HINTS = {
    "!": "not equal is <>",
    '"': "a string stands in single quotes",
    "`": "the name of a property stands bare",
    ";": "a filter is one expression, without a semicolon",
    "*": "there is no arithmetic; a subscription to all is a tag expression",
}


class Sort(Enum):
    """What a token is."""

    NAME = "name"
    KEYWORD = "keyword"
    INTEGER = "integer"
    DECIMAL = "decimal number"
    STRING = "string"
    SYMBOL = "symbol"
    END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """`text`: a keyword in capitals, a string without its quotes, anything else as written."""

    sort: Sort
    text: str
    position: int  # of its first character, from 1


def tokens(text: str) -> list[Token]:
    """All tokens, the last one END; raises InvalidFilter."""
    found: list[Token] = []
    for token in _scan(text):
        found.append(token)
        if len(found) > limits.FILTER_TOKENS_MAX:
            raise InvalidFilter(
                f"the expression has more than {limits.FILTER_TOKENS_MAX} words and signs (FILTER_TOKENS_MAX); "
                f"the first too many is at character {token.position}",
                position=token.position,
                limit="FILTER_TOKENS_MAX",
            )
    return [*found, Token(Sort.END, "", len(text) + 1)]


def _scan(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        first = text[at]
        if first in BLANKS:
            at += 1
        elif text.startswith("--", at):
            while at < len(text) and text[at] not in LINE_ENDS:
                at += 1
        elif text.startswith("/*", at):
            at = _closed(text, "*/", at + 2, at, "comment")
        elif first == "'":
            end = _string_end(text, at)
            yield Token(Sort.STRING, text[at + 1 : end - 1].replace("''", "'"), at + 1)
            at = end
        elif first in LETTERS:
            end = _run(text, at, LETTERS | DIGITS)
            word = text[at:end]
            is_keyword = word.upper() in KEYWORDS
            yield Token(
                Sort.KEYWORD if is_keyword else Sort.NAME, word.upper() if is_keyword else word, at + 1
            )
            at = end
        elif first in DIGITS or (first == "." and text[at + 1 : at + 2] in DIGITS):
            token, at = _number(text, at)
            yield token
        else:
            symbol = next((s for s in SYMBOLS if text.startswith(s, at)), None)
            if symbol is None:
                hint = f": {HINTS[first]}" if first in HINTS else ""
                raise InvalidFilter(f"unexpected {first!r} at character {at + 1}{hint}", position=at + 1)
            yield Token(Sort.SYMBOL, symbol, at + 1)
            at += len(symbol)


def _number(text: str, at: int) -> tuple[Token, int]:
    whole = end = _run(text, at, DIGITS)
    if text.startswith(".", end):
        end = _run(text, end + 1, DIGITS)
    if text[end : end + 1] in ("e", "E"):
        sign = end + 1 + (text[end + 1 : end + 2] in ("+", "-"))
        exponent = _run(text, sign, DIGITS)
        end = exponent if exponent > sign else end
    sort, written = (Sort.INTEGER if end == whole else Sort.DECIMAL), text[at:end]
    if sort is Sort.INTEGER:
        if text[end : end + 1] in ("l", "L"):
            end += 1
        if len(written) > 1 and written[0] == "0":
            raise InvalidFilter(
                f"the number at character {at + 1} begins with 0; leave the zeros out", position=at + 1
            )
    if text[end : end + 1] in LETTERS | DIGITS | {"."}:
        raise InvalidFilter(f"the number at character {at + 1} runs into {text[end]!r}", position=at + 1)
    return Token(sort, written, at + 1), end


def _string_end(text: str, at: int) -> int:
    """The character behind the closing quote; two quotes are one of the string's own."""
    end = _closed(text, "'", at + 1, at, "string")
    while text.startswith("'", end):
        end = _closed(text, "'", end + 1, at, "string")
    return end


def _closed(text: str, mark: str, start: int, opened: int, what: str) -> int:
    """The character behind the next `mark`."""
    end = text.find(mark, start)
    if end < 0:
        raise InvalidFilter(
            f"the {what} that begins at character {opened + 1} has no end", position=opened + 1
        )
    return end + len(mark)


def _run(text: str, at: int, members: frozenset[str]) -> int:
    while at < len(text) and text[at] in members:
        at += 1
    return at
