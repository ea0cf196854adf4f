"""What waits and what happened as SQL views, on DuckDB and on Spark, and the forecast over them."""
