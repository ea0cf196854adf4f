"""Changes of the pending table: compaction of a range of the log, attach, merging and removal of files."""
