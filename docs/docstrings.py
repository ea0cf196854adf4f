"""Shows the examples of docstrings as code: an extension of griffe, which makes the site's reference (mkdocs.yml).

The docstrings are written for readers of the source, with doctests between their sentences. To Markdown `>>>` would be
a quotation in a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a prompt to the blank line behind it: the example, and what it prints.
EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def with_code(text: str) -> str:
    """Return a docstring with each of its examples in a block of code."""
    return EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class Examples(griffe.Extension):
    """Changes each docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the examples of a docstring into blocks of code."""
        if obj.docstring is not None:
            obj.docstring.value = with_code(obj.docstring.value)
