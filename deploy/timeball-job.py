"""Timeball's Spark commands for spark-submit, on the master that it names.

    spark-submit --master spark://head:7077 timeball-job.py compact ledger --endpoint grpc://broker:7400
    spark-submit --master spark://head:7077 timeball-job.py audit --endpoint grpc://broker:7400

The words are those of the command `timeball`; names of streaming jobs stand for `pipeline run` with them.
"""

import sys

from timeball.cli.main import main
from timeball.cli.pipeline import Job

words = sys.argv[1:]
main(["pipeline", "run", *words] if words and words[0] in list(Job) else words)
