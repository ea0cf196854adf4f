"""Where jobs run: a Spark session with its Java, the runner of the streaming jobs, and their status."""
