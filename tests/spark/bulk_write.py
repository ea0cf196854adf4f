"""A bulk write as a separate program, so that a test can kill it: numbered rows, due in many hours of a week.

python bulk_write.py ENDPOINT ROWS FIRST_DUE_MS [JOB_ID]
"""

from __future__ import annotations

import sys

from timeball.model.limits import HOUR_MS
from timeball.spark.run.session import build_session

TOPIC = "bulk"
PARTITIONS = 4


def main(endpoint: str, rows: str, first_due_ms: str, *job_id: str) -> None:
    spark = build_session("local[2]", "bulk write", {"spark.driver.memory": "512m"})
    frame = spark.range(0, int(rows), numPartitions=PARTITIONS).selectExpr(
        f"'{TOPIC}' as topic",
        "concat('body ', id) as body",
        "concat('key ', id) as unique_key",
        f"{first_due_ms} + (id % 12) * {HOUR_MS} as due_ms",
    )
    writer = frame.write.format("timeball").option("endpoint", endpoint).mode("append")
    for name in job_id:
        writer = writer.option("job_id", name)
    writer.save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
