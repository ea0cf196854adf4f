"""Creates the coordinator that the settings describe, for nodes and for commands."""

from __future__ import annotations

from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.etcd import EtcdStore
from timeball.cluster.coordination.etcd_members import EtcdAccess
from timeball.cluster.coordination.keys import KeyCoordinator
from timeball.io.clock import Clock
from timeball.io.files import read_secret
from timeball.io.security import OTHERS, load_client_tls
from timeball.model.config import Settings


def coordinator_of(settings: Settings, clock: Clock) -> Coordinator:
    """Create the coordinator for --cluster, --node and --etcd. Raises SetupError."""
    endpoints = [each.strip() for each in settings.etcd.split(",") if each.strip()]
    tls = None
    if any(each.startswith("https") for each in endpoints):
        tls = load_client_tls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)
    password = ""
    if settings.etcd_user:
        secret = read_secret(settings.etcd_password_file, "--etcd-password-file", forbidden_mode=OTHERS)
        password = secret.decode().strip()
    access = EtcdAccess(endpoints, tls, settings.etcd_user, password)
    store = EtcdStore(access, ttl_ms=settings.lease_ttl_ms)
    return KeyCoordinator(store, clock, cluster=settings.cluster, node=settings.node)
