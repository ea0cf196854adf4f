"""Monitoring of a broker from outside: metrics, traces, the lag of the event loop, and the states for systemd."""
