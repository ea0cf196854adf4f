"""SQL views of pending messages and of past events, on DuckDB and on Spark, and the forecast on top of them."""
