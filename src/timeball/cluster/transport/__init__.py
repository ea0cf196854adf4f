"""Connections between nodes, and the data files and client connections that they forward."""
