"""The prose of source and documentation is plain technical English, measured by shares that may only improve.

The bounds of docstrings leave a little room for a change in progress. A comment counts when it has at least three words
and is no pragma and no heading. The decisions in docs/ are not counted: they keep their original words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from tests.docs_pages import PAGES, page
from tests.test_tidy import Source, sources

pytestmark = pytest.mark.xdist_group("source")  # with test_tidy.py, which reads the package once

QUESTIONS_MAX = 0.002  # share of docstrings outside modules that begin with What, Who, …
PRONOUNS_MAX = 0.5  # indefinite pronouns in 1,000 words of docstrings
SEE_THE_MODULE_MAX = 0  # docstrings that only refer to the module
# In 1,000 words: "what" in place of a noun ("what waits"), and semicolons. Lower them when the prose gets better.
NOMINAL_WHAT_MAX = {"docstrings": 1.5, "docs": 1.5}
SEMICOLONS_MAX = {"docstrings": 4.0, "docs": 4.0}
README_WORDS_MAX = 600
COMMENTS_MIN = {"log": 0.08, "schedule": 0.08, "broker": 0.08}  # least share of lines with a comment

QUESTION = re.compile(r"(?:What|Who|Which|Whether|Where)\b")
PRONOUN = re.compile(
    r"\b(?:nobody|whoever|whatever|somebody|whichever|anybody|everybody|what is)\b", re.IGNORECASE
)
HISTORY = {"decisions", "decisions.md", "CHANGELOG.md"}
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?:;](?:\s|$)|\n\n")
WORD = re.compile(r"[^\W\d_]+")
NO_REASON = re.compile(r"#!|#\s*(?:fmt:|noqa|type:|pragma|mypy|ruff|cython|distutils|-{2,})")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE, TARGET = re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)]*\)")


def docstrings(source: Source, *, modules: bool) -> Iterator[str]:
    """Yield the docstrings of a file's classes and functions, and of the module itself when asked for."""
    yield from filter(None, source.docstrings if modules else source.docstrings[1:])


def question_share(sources_read: list[Source]) -> float:
    """Return the share of docstrings that begin like a question."""
    texts = [text for source in sources_read for text in docstrings(source, modules=False)]
    return sum(QUESTION.match(text) is not None for text in texts) / len(texts)


def pronouns_in_1000(sources_read: list[Source]) -> float:
    """Return the number of indefinite pronouns in 1,000 words of docstrings."""
    texts = [text for source in sources_read for text in docstrings(source, modules=True)]
    return 1000 * sum(len(PRONOUN.findall(text)) for text in texts) / sum(len(text.split()) for text in texts)


def see_the_module(sources_read: list[Source]) -> int:
    """Count the docstrings that only refer to the module."""
    return sum(
        text.startswith("See the module")
        for source in sources_read
        for text in docstrings(source, modules=False)
    )


def nominal_whats(text: str) -> int:
    """Count each "what" that begins no question."""
    count = 0
    for match in WHAT.finditer(text):
        end = SENTENCE_END.search(text, match.end())
        count += end is None or text[end.start()] != "?"
    return count


def whats_in_1000(texts: list[str]) -> float:
    """Return the number of nominal whats in 1,000 words."""
    return 1000 * sum(map(nominal_whats, texts)) / sum(len(text.split()) for text in texts)


def semicolons_in_1000(texts: list[str]) -> float:
    """Return the number of semicolons in 1,000 words."""
    return 1000 * sum(text.count(";") for text in texts) / sum(len(text.split()) for text in texts)


def words_of_page(text: str) -> str:
    """Return a page without its blocks of code, its code in lines, and the targets of its links."""
    return TARGET.sub("]", CODE.sub("code", FENCE.sub("", text)))


def is_comment(text: str) -> bool:
    """Check whether a comment counts."""
    return not NO_REASON.match(text) and len(WORD.findall(text)) >= 3


def comment_share(sources_read: list[Source]) -> float:
    """Return the share of lines with a comment."""
    lines = sum(1 for source in sources_read for line in source.text.splitlines() if line.strip())
    return sum(is_comment(text) for source in sources_read for text in source.comments.values()) / lines


@pytest.fixture(scope="module")
def house() -> list[Source]:
    """Return the sources of the package."""
    return sources()


def test_docstrings_begin_with_a_verb_or_a_noun(house: list[Source]) -> None:
    assert question_share(house) <= QUESTIONS_MAX


def test_docstrings_name_the_actor(house: list[Source]) -> None:
    assert pronouns_in_1000(house) <= PRONOUNS_MAX


def test_docstrings_do_not_only_refer_to_the_module(house: list[Source]) -> None:
    assert see_the_module(house) <= SEE_THE_MODULE_MAX


def prose(house: list[Source], where: str) -> list[str]:
    """Return the texts of all docstrings, or of all pages that count."""
    if where == "docstrings":
        return [text for source in house for text in docstrings(source, modules=True)]
    return [words_of_page(path.read_text("utf-8")) for path in PAGES if not HISTORY.intersection(path.parts)]


@pytest.mark.parametrize("where", NOMINAL_WHAT_MAX)
def test_nouns_are_used_in_place_of_what(house: list[Source], where: str) -> None:
    assert whats_in_1000(prose(house, where)) <= NOMINAL_WHAT_MAX[where]


@pytest.mark.parametrize("where", SEMICOLONS_MAX)
def test_a_sentence_has_one_thought(house: list[Source], where: str) -> None:
    assert semicolons_in_1000(prose(house, where)) <= SEMICOLONS_MAX[where]


def test_the_first_page_is_short() -> None:
    assert len(words_of_page(page("README.md")).split()) <= README_WORDS_MAX


@pytest.mark.parametrize("room", COMMENTS_MIN)
def test_comments_with_reasons_are_frequent_enough(house: list[Source], room: str) -> None:
    assert comment_share([source for source in house if source.path.parts[0] == room]) >= COMMENTS_MIN[room]


# ---- controls: each measure counts its breaches ----------------------------------------------------------


def test_the_measures_see_a_breach() -> None:
    text = '"""What is it."""\ndef f():\n    """Whether nobody knows."""\nclass A:\n    """See the module."""\n    #\n'
    sources_read = [Source(PurePosixPath("x.py"), text)]
    assert question_share(sources_read) == 0.5
    assert pronouns_in_1000(sources_read) == pytest.approx(1000 * 2 / 9)
    assert see_the_module(sources_read) == 1
    assert whats_in_1000(["Return what waits.", "What is it? What waits; what is due"]) == pytest.approx(
        3000 / 11
    )
    assert semicolons_in_1000(["a; b", "c d;"]) == pytest.approx(500)


def test_comments_that_count() -> None:
    text = "#!/bin/sh\n# fmt: skip this table\n# -- a heading here --\n# too few\n#\nx = 1  # because it is one\n"
    assert comment_share([Source(PurePosixPath("x.py"), text)]) == pytest.approx(1 / 6)


def test_code_is_no_prose() -> None:
    text = "See [this](page.md; what) and `a; what`.\n```sh\nwhat; ever\n```\nDone.\n"
    assert words_of_page(text) == "See [this] and code.\n\nDone.\n"
