"""The cluster: replicates one log on several nodes, usually three (a group), and elects the leader that writes it.

Receives: frames of the leader's log, messages from other replicas, and records from the coordinator (etcd).
Keeps: the promised epoch, the end of each replica's log, and the committed part of the log.
Hands on: log bytes for the other replicas. The broker is informed when rows are committed and when it may serve.

The protocol consists of pure functions, `(state, event) -> (state, effects)`, without I/O. The simulation in
tests/cluster/simulation.py runs exactly these functions. docs/cluster-protocol.md describes the protocol.
"""
