"""The measurement of the coordinator, run once with small numbers."""

import pytest
from tests.cluster import figures
from tests.cluster.etcd_cluster import need_etcd


@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
def test_all_figures_of_etcd_are_measured() -> None:
    need_etcd()
    lines = figures.measure(1)
    assert [line.partition(":")[0] for line in lines] == [
        "swap of a record", "lead and resign", "renewal of a lease", "read of a group",
        "takeover, TTL 1000 ms", "idle, TTL 1000 ms", "idle without a group, TTL 1000 ms",
        "takeover, TTL 2000 ms", "idle, TTL 2000 ms", "idle without a group, TTL 2000 ms",
        "etcd's leader killed, no swap for", "etcd's leader killed, lease of 1000 ms lapsed",
        "etcd's leader killed, lease of 2000 ms lapsed",
    ]  # fmt: skip
    # Four renewals per lease and two reads a second, and some more at the begin. A loop without a pause has hundreds.
    assert all(float(line.split()[-2]) < 40 for line in lines if line.startswith("idle"))


def test_a_share_has_the_percentiles_of_its_values() -> None:
    assert figures.Share.of([0.001 * number for number in range(100)]) == pytest.approx((50, 99, 99))
