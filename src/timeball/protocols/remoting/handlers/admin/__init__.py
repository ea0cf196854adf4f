"""The requests of mqadmin and the dashboard."""
