"""Tests of timeball.spark.spark_errors."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException

from timeball.model.errors import (
    InvalidMessage,
    OutOfRange,
    SetupError,
    StorageError,
    TimeballError,
    Unavailable,
)
from timeball.spark.spark_errors import spark_errors, to_timeball_error

PAGE = """An error occurred while calling o12.save.
Traceback (most recent call last):
  File "endpoint.py", line 3, in attach
pyarrow._flight.FlightServerError: compact from seq 3: the watermark is 7. Detail: Failed
The above exception was the direct cause of the following exception:
timeball.model.errors.OutOfRange: compact from seq 3: the watermark is 7
\tat org.apache.spark.Something(Something.scala:9)
"""


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (PAGE, OutOfRange, "^compact from seq 3: the watermark is 7$"),
        ("java.lang.OutOfMemoryError: Java heap space", SetupError, "spark.driver.memory"),
        ("java.io.IOException: No space left on device", StorageError, "no space left"),
        ("ModuleNotFoundError: No module named 'pyarrow'", SetupError, "cannot import pyarrow"),
        (
            'Cannot run program "/opt/v/bin/python": error=2',
            SetupError,
            "no /opt/v/bin/python: set PYSPARK_PYTHON",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            SetupError,
            "executors run Python 3.10 and the driver 3.11: set PYSPARK_PYTHON",
        ),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: timeball", SetupError, "session.register"),
        (
            "Traceback\n  File x\nValueError: seven\n\tat java",
            Unavailable,
            "in a Python worker: ValueError: seven",
        ),
        ("something new\n\tat java.lang", Unavailable, "^Spark failed: something new$"),
        ("timeball.model.errors.NotAnError: x", Unavailable, "Spark failed"),
        (
            "org.apache.spark.SparkException: Python worker failed to connect back.",
            Unavailable,
            "connect back",
        ),
        (
            "[JAVA_GATEWAY_EXITED] Java gateway process exited before",
            Unavailable,
            "is JAVA_HOME a full Java 17",
        ),
    ],
)
def test_stack_traces_become_one_sentence(text: str, kind: type[TimeballError], said: str) -> None:
    result = to_timeball_error(PySparkException(text))
    assert type(result) is kind
    with pytest.raises(kind, match=said):
        raise result


def test_unplannable_query_raises_setup_error() -> None:
    assert "cannot run this: no such column" in str(
        to_timeball_error(AnalysisException("no such column\nlong plan"))
    )


def test_errors_of_timeball_are_not_converted() -> None:
    error = InvalidMessage("tag: too long")
    assert to_timeball_error(error) is error


def test_exception_of_spark_is_the_cause() -> None:
    for cause in (Py4JError("gateway gone"), ConnectionRefusedError("gateway gone")):
        with pytest.raises(Unavailable, match="gateway gone") as caught, spark_errors():
            raise cause
        assert caught.value.__cause__ is cause


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), spark_errors():
        raise KeyError("a bug of ours is not Spark's failure")
