"""All jobs on a cluster's executors, as a program, so that a test can kill it or what works for it.

python cluster_jobs.py ENDPOINT FOLDER ROWS FIRST_DUE_MS, settings of the session as JSON on stdin. It prints the name
of each step that it begins, and at last a document of what it has found.
"""

from __future__ import annotations

import json
import sys

import msgspec

from timeball.model.limits import HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit, bulk, ledger, replay
from timeball.spark.jobs.bulk import Columns
from timeball.spark.run import runner
from timeball.spark.run.session import build_session
from timeball.spark.views import spark_views

TOPIC = "cluster"
PARTITIONS = 8


def begin(step: str) -> None:
    print(step, flush=True)


def main(endpoint: str, folder: str, rows: str, first_due_ms: str) -> None:
    conf = json.load(sys.stdin)
    spark = build_session(conf.pop("spark.master"), "cluster jobs", conf)
    frame = spark.range(0, int(rows), numPartitions=PARTITIONS).selectExpr(
        f"'{TOPIC}' as topic",
        "concat('body ', id) as body",
        "concat('key ', id) as unique_key",
        f"{first_due_ms} + (id % 12) * {HOUR_MS} as due_ms",
    )
    begin("bulk")
    columns = Columns(due="due_ms", topic="topic", unique_key="unique_key")
    bulk.run(spark, frame, endpoint, columns=columns, campaign="cluster")
    begin("streams")
    runner.run(["compact", "ledger", "archive"], spark=spark, endpoint=endpoint, once=True, checkpoint=folder)
    begin("replay")
    with Endpoint(endpoint) as broker:
        now_ms = broker.status().now_ms
    window = replay.Window(from_ms=now_ms - HOUR_MS, until_ms=now_ms, start_ms=now_ms + HOUR_MS)
    repeated = replay.run(spark, endpoint, window)
    begin("dispatch")
    runner.run(["dispatch"], spark=spark, endpoint=endpoint, once=True, checkpoint=folder)
    begin("forecast")
    waiting = spark_views.waiting_frame(spark, endpoint, bodies=False).count()
    begin("audit")
    report = audit.run(spark, endpoint)
    known = ledger.scheduled_rows(spark, endpoint).where(f"topic = '{TOPIC}'").count()
    spark.stop()
    result = {"known": known, "replayed": repeated.rows, "waiting": waiting, "audit": report}
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
