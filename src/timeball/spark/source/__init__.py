"""Spark data sources: the readers, writers and streams of `format("timeball")` and `format("timeball_delta")`."""
