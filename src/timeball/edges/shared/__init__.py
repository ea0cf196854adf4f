"""What several edges use: Arrow columns and streams, error codes, receipts, sessions, and limits that clients share."""
