"""`timeball dump`: what stands in a data folder, without a broker and without changing a byte."""

from __future__ import annotations


def dump() -> None:
    """Show what stands in a data folder."""
