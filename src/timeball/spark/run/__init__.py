"""Run jobs: the Spark session and its Java, the runner of the continuous jobs, and their status files."""

# spark-submit sets this variable for the process that it starts, whose JVM is running already.
SUBMITTED = "PYSPARK_GATEWAY_PORT"
