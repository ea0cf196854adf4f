"""The job `dispatch`: Spark reads due messages from the pending table and brings them to the broker."""
