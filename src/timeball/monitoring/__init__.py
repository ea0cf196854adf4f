"""Monitoring of a broker from outside: metrics, traces, and the figures that they read."""
