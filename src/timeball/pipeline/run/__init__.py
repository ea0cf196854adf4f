"""Where jobs run: a Spark session with its Java, the runner of the streaming jobs, and their status."""

SUBMITTED = (
    "PYSPARK_GATEWAY_PORT"  # in the environment of what spark-submit starts: the JVM that it has started runs
)
