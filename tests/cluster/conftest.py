"""Three members of etcd for the tests of this folder, started once for each process."""

from collections.abc import Iterator

import pytest
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    need_etcd()
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster
