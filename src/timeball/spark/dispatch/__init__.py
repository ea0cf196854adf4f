"""The job `dispatch`: Spark reads due messages from the pending table and sends them to the broker for release."""
