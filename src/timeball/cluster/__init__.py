"""The cluster: one log kept by three replicas.

Receives: frames of the leader's log, messages of peers, and records of the coordinator.
Keeps: the promised epoch, how far each replica's log reaches, and which of it is committed.
Hands on: bytes to the other replicas, and to the broker the answer when a row is committed and when it may serve.

The protocol is functions without I/O, `(state, event) -> (state, effects)`: tests/cluster/simulation.py runs exactly
these (docs/cluster-protocol.md).
"""
