"""The demo's own Spark: a DataFrame into the pending table, and the audit, as a user's job would do it."""

from __future__ import annotations
