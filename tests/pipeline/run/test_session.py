"""Tests of timeball.pipeline.run.session."""

from __future__ import annotations

import os

import pytest
from pyspark.sql import SparkSession

from timeball.errors import SetupError
from timeball.pipeline.run.session import LOCAL, settings
from timeball.pipeline.spark_errors import spark_errors


def test_local_settings_stay_local() -> None:
    local, cluster = settings("local[2]"), settings("spark://host:7077")
    assert local["spark.driver.host"] == "127.0.0.1"
    assert not set(cluster) & (set(LOCAL) - {"spark.driver.extraJavaOptions"})
    assert "SerialGC" not in cluster["spark.driver.extraJavaOptions"]


def test_the_caller_has_the_last_word() -> None:
    chosen = settings("local[2]", {"spark.driver.memory": "3g", "spark.driver.extraJavaOptions": "-Dmine=1"})
    assert chosen["spark.driver.memory"] == "3g"
    assert "-Dmine=1" in chosen["spark.driver.extraJavaOptions"]
    assert "log4j2.configurationFile" in chosen["spark.driver.extraJavaOptions"]


@pytest.mark.spark
def test_java_home_is_given_back(spark: SparkSession) -> None:
    assert "timeball" not in os.environ.get("JAVA_HOME", "")
    assert spark.range(3).count() == 3


@pytest.mark.spark
def test_a_bad_option_reaches_the_user_as_one_sentence(spark: SparkSession) -> None:
    with (
        pytest.raises(SetupError, match=r"^option colour: unknown; there are endpoint, ") as caught,
        spark_errors(),
    ):
        spark.read.format("timeball").option("colour", "red").load()
    assert caught.value.__cause__ is not None
