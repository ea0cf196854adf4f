"""Coordination through etcd: leases, the record of each group, and the directory of leaders."""
