"""The Spark pipeline: loads, moves, queries and audits scheduled messages as tables.

Receives: rows of the log over Flight, files of the pending table by their URI, any DataFrame.
Keeps: ledger and archive, each with the row of the log up to which it is complete. The broker's log stays the source
of truth.
Hands on: files for the pending table (attached in one step), the ledger, audit reports.

The jobs for ledger and archive also run without Spark.

The pipeline never imports the broker, because it runs in another process and often on another machine. Modules that
need pyspark are imported by name (`timeball.spark.run.session`), so importing this package costs nothing.
"""
