"""Due messages carried to the broker by Spark: a stream of file positions and the tasks that bring the rows."""
