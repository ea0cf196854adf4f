"""Monitoring of a broker from outside: metrics, traces, the figures that they read, and the states for systemd."""
