"""Jobs on executors that are processes of their own, as a program, so that a test can kill one of them.

python cluster_jobs.py ENDPOINT ROWS FIRST_DUE_MS TOPIC. The last line it prints is the audit's report, as JSON.
"""

from __future__ import annotations

import sys

import msgspec

from timeball.limits import HOUR_MS
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import audit, ledger
from timeball.pipeline.run import runner
from timeball.pipeline.run.session import build_session

MASTER = (
    "local-cluster[2,1,640]"  # two executors with a core and 640 MB each, behind a master and two workers
)
CONF = {"spark.executor.memory": "640m", "spark.driver.memory": "512m"}
PARTITIONS = 12


def main(endpoint: str, rows: str, first_due_ms: str, topic: str) -> None:
    spark = build_session(MASTER, "cluster jobs", CONF)
    frame = spark.range(0, int(rows), numPartitions=PARTITIONS).selectExpr(
        f"'{topic}' as topic",
        "concat('body ', id) as body",
        "concat('key ', id) as unique_key",
        f"{first_due_ms} + (id % 12) * {HOUR_MS} as due_ms",
    )
    frame.write.format("timeball").option("endpoint", endpoint).option("job_id", "cluster").mode(
        "append"
    ).save()
    runner.run(["compact", "ledger"], spark=spark, endpoint=endpoint, once=True)
    report = audit.run(spark, endpoint)
    with Endpoint(endpoint) as broker:
        known = ledger.promises(spark, endpoint).where(f"topic = '{topic}'").count()
        watermark = broker.status().watermark
    spark.stop()
    print(msgspec.json.encode({"known": known, "watermark": watermark, "audit": report}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
