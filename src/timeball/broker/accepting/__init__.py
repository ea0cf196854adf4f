"""Accepts messages: checks and completes sends, appends rows to the log, and releases due messages."""
