"""The door to Spark: imported when a command needs it, with one sentence when it is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from timeball.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ADVICE = "install the extra, pip install 'timeball[spark]'"


def load_runner() -> ModuleType:
    """The module that runs streaming jobs; SetupError when pyspark is missing."""
    try:
        from timeball.pipeline.jobs import runner
    except ModuleNotFoundError as error:
        raise SetupError(f"{error.name} is not installed: {ADVICE}") from error
    return runner


def open_session(master: str, name: str, conf: Mapping[str, str] | None = None) -> SparkSession:
    """A session that knows the format `timeball`; SetupError when pyspark or Java is missing."""
    try:
        from timeball.pipeline.session import build_session
    except ModuleNotFoundError as error:
        raise SetupError(f"{error.name} is not installed: {ADVICE}") from error
    return build_session(master, name, conf)
