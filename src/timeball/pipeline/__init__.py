"""The log, as tables: Spark moves the data that waits, and accounts for it; ledger and archive do without it as well.

Receives: rows of the log over Flight, files of the pending table by their URI, any DataFrame.
Keeps: ledger and archive, which know how far they are; the truth is the broker's log.
Hands on: files for the pending table (attached in one step), the ledger, audit reports.

It never imports the broker: what runs here runs in another process, and often on another machine. Modules
that need pyspark are imported by name (`timeball.pipeline.run.session`), so that this one costs nothing.
"""
