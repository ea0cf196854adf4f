"""Who is connected, and as what."""

from __future__ import annotations


class Clients:
    """See the module."""
