"""One Spark session for the whole run: it takes seconds to start. Brokers are real nodes on free ports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode, running_node

from timeball.spark.endpoint import Endpoint
from timeball.spark.run.session import SparkEngine, build_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Tests check what Spark raises, and py4j would log it, too.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    session = build_session(app_name="timeball-tests", conf={"spark.driver.memory": "512m"})
    yield session
    session.stop()


@pytest.fixture
def engine(spark: SparkSession) -> SparkEngine:
    """The engine that runs tasks of jobs in the Spark session."""
    return SparkEngine(spark)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    """A broker that does not compact by itself."""
    with running_node(tmp_path / "data", compact_rows=0, grpc_port=-1) as running:
        yield running


@pytest.fixture
def broker(node: RunningNode) -> Iterator[Endpoint]:
    """An endpoint of `node`."""
    with Endpoint(node.endpoint, patience_s=5) as endpoint:
        yield endpoint
