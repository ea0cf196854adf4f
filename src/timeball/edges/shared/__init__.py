"""Code that several edges share: Arrow columns and streams, error codes, receipt handles, sessions, shared limits."""
