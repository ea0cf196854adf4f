"""The prose of the source is plain technical English, held by shares that may only get better.

The bounds of docstrings leave a little room for a change in progress. A comment counts when it says what the code does
not: a reason, an invariant, a unit; one that repeats the line below it is worse than none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from tests.test_tidy import Source, sources

QUESTIONS_MAX = 0.002  # share of docstrings outside modules that begin with What, Who, …
PRONOUNS_MAX = 0.5  # indefinite pronouns in 1,000 words of docstrings
SEE_THE_MODULE_MAX = 0  # docstrings that say nothing themselves
COMMENTS_MIN = {
    "log": 0.08,
    "schedule": 0.08,
    "broker": 0.08,
}  # least share of lines with a comment that carries a reason

QUESTION = re.compile(r"(?:What|Who|Which|Whether|Where)\b")
PRONOUN = re.compile(
    r"\b(?:nobody|whoever|whatever|somebody|whichever|anybody|everybody|what is)\b", re.IGNORECASE
)


def docstrings(source: Source, *, modules: bool) -> Iterator[str]:
    """Yield the docstrings of a file's classes and functions, and of the module itself when asked for."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, *([ast.Module] if modules else []))
    for node in ast.walk(source.tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def question_share(found: list[Source]) -> float:
    texts = [text for source in found for text in docstrings(source, modules=False)]
    return sum(QUESTION.match(text) is not None for text in texts) / len(texts)


def pronouns_in_1000(found: list[Source]) -> float:
    texts = [text for source in found for text in docstrings(source, modules=True)]
    return 1000 * sum(len(PRONOUN.findall(text)) for text in texts) / sum(len(text.split()) for text in texts)


def see_the_module(found: list[Source]) -> int:
    return sum(
        text.startswith("See the module") for source in found for text in docstrings(source, modules=False)
    )


def comment_share(found: list[Source]) -> float:
    lines = sum(1 for source in found for line in source.text.splitlines() if line.strip())
    return sum(len(source.comments) for source in found) / lines


@pytest.fixture(scope="module")
def house() -> list[Source]:
    return sources()


def test_docstrings_begin_with_a_verb_or_a_noun(house: list[Source]) -> None:
    assert question_share(house) <= QUESTIONS_MAX


def test_docstrings_name_the_actor(house: list[Source]) -> None:
    assert pronouns_in_1000(house) <= PRONOUNS_MAX


def test_docstrings_say_something_themselves(house: list[Source]) -> None:
    assert see_the_module(house) <= SEE_THE_MODULE_MAX


@pytest.mark.parametrize("room", COMMENTS_MIN)
def test_reasons_stand_at_the_line(house: list[Source], room: str) -> None:
    assert comment_share([source for source in house if source.path.parts[0] == room]) >= COMMENTS_MIN[room]


# ---- controls: each measure sees what it measures ---------------------------------------------------------


def test_the_measures_see_a_breach() -> None:
    text = '"""What is it."""\ndef f():\n    """Whether nobody knows."""\nclass A:\n    """See the module."""\n    #\n'
    found = [Source(PurePosixPath("x.py"), text)]
    assert question_share(found) == 0.5
    assert pronouns_in_1000(found) == pytest.approx(1000 * 2 / 9)
    assert see_the_module(found) == 1
    assert comment_share(found) == pytest.approx(1 / 6)
