"""Changes of the pending table: a range of the log is compacted into files, files are attached, merged and removed."""
