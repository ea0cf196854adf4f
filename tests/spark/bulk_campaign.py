"""A bulk write as a separate program, so that a test can kill it: numbered rows of a week, some of them invalid.

python bulk_campaign.py ENDPOINT CAMPAIGN ROWS FIRST_DUE_MS
"""

from __future__ import annotations

import sys

from timeball.model.limits import HOUR_MS
from timeball.spark.jobs import bulk
from timeball.spark.jobs.bulk import Columns
from timeball.spark.run.session import build_session

PARTITIONS = 4
REJECT_EVERY = 1_000  # each of these rows has no topic


def main(endpoint: str, campaign: str, rows: str, first_due_ms: str) -> None:
    bulk.TASK_ROWS = int(rows) // PARTITIONS
    spark = build_session("local[2]", "bulk campaign", {"spark.driver.memory": "512m"})
    frame = spark.range(0, int(rows), numPartitions=PARTITIONS).selectExpr(
        f"if(id % {REJECT_EVERY} = 0, null, 'bulk') as topic",
        "concat('body ', id) as body",
        "concat('k', id) as name",
        f"{first_due_ms} + (id % 12) * {HOUR_MS} as due",
    )
    columns = Columns(topic="topic", keys="name")
    report = bulk.run(spark, frame, endpoint, columns=columns, campaign=campaign)
    print(report.rows, report.rejected, report.repeated)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
