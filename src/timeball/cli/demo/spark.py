"""The demo's own Spark: a DataFrame into the pending table, and the audit, as a user's job would do it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pyarrow as pa

from timeball.cli.audit import balance
from timeball.cli.spark import open_session
from timeball.errors import SetupError

if TYPE_CHECKING:
    from timeball.pipeline.jobs.bulk import BulkReport

# Beside the pipeline's own Spark and the broker, on a machine that may have two cores.
CONF = {"spark.driver.memory": "512m"}


@dataclass(frozen=True)
class Books:
    """What the audit found."""

    summary: str
    counts: dict[str, Any]
    balanced: bool


class Spark:
    """A session for the length of a block."""

    def __init__(self, endpoint: str, log: Path) -> None:
        self._endpoint = endpoint
        self._session = open_session("local[2]", "timeball-demo", CONF, log)

    def schedule(self, messages: pa.RecordBatch, campaign: str) -> BulkReport:
        """`bulk`: every row of a DataFrame a promise, or none, under a campaign's name."""
        from timeball.pipeline.jobs import bulk
        from timeball.pipeline.jobs.bulk_input import Columns

        try:
            frame = self._session.createDataFrame(pa.Table.from_batches([messages]))
        except ImportError as error:
            raise SetupError(
                f"{error.name or error}: install the extra, pip install 'timeball[demo]'"
            ) from error
        columns = Columns(due="due_ms", topic="topic", keys="keys", tag="tag", unique_key="unique_key")
        return bulk.run(self._session, frame, self._endpoint, columns=columns, campaign=campaign)

    def audit(self) -> Books:
        """accepted = released + cancelled + expired + pending."""
        from timeball.pipeline.jobs import audit

        report = audit.run(self._session, self._endpoint)
        summary = "balances" if report.ok else f"DOES NOT BALANCE: {balance(report)}"
        return Books(summary, msgspec.to_builtins(report), report.ok)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session.stop()
        except Exception:
            # A Java that was told to end as well: what ended the block is what matters.
            if error is None:
                raise
