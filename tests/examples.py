"""The number of examples of a property: all that it names, or a few in `make test`."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis

QUICK = "quick"
SETTINGS = "_hypothesis_internal_use_settings"  # hypothesis has no public name for it


def bound_examples(test: Callable[..., object], profile: str) -> None:
    """Limit a test that names its number of examples to that of the profile `quick`, if it is the current one."""
    own, examples_max = getattr(test, SETTINGS, None), hypothesis.settings.get_profile(QUICK).max_examples
    if own is not None and profile == QUICK and own.max_examples > examples_max:
        setattr(test, SETTINGS, hypothesis.settings(own, max_examples=examples_max))
