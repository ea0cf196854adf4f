"""`format("timeball")`: the readers, writers and streams that Spark calls."""
