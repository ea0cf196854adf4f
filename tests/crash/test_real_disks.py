"""Power cuts of real disks with ext4 and XFS: everything acknowledged survives, of each kind of state.

`make siege` cuts 1,000 times, in equal parts for each kind and file system. POWER_SEED selects other moments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.powered_group import PoweredGroup
from tests.crash.checker import Fault, Sent
from tests.crash.kinds_of_state import KINDS
from tests.crash.loop_disk import MAKE, loop_disk
from tests.crash.powered import PowerSiege
from tests.crash.siege import CLOCK, Siege
from tests.crash.world import HOUR_MS
from tests.rounds import IS_SIEGE, rounds

from timeball.io.files import RealFiles
from timeball.model.errors import DiskFailed

pytestmark = [pytest.mark.slow, pytest.mark.siege, pytest.mark.timeout(0)]

SEED = int(os.environ.get("POWER_SEED", "1"))
FILE_SYSTEMS = list(MAKE)
# With the replicas there are ten kinds of state: 50 cuts for each of them and each file system.
LIVES, CUTS = rounds(1, 10), rounds(2, 5 * len(KINDS))
GROUPS, GROUP_CUTS = rounds(1, 5), rounds(1, 10)
ACK_SAVE_MS = (0, 50)  # by turns


def besiege(folder: Path, file_system: str, life: int) -> Counter[str]:
    """Cut a broker's power repeatedly. Returns the cuts of each kind."""
    turn = life + FILE_SYSTEMS.index(file_system)
    kinds = list(KINDS)
    with (
        loop_disk(file_system, folder / "disk") as disk,
        PowerSiege(disk, SEED + turn, ACK_SAVE_MS[turn % len(ACK_SAVE_MS)]) as siege,
    ):
        siege.begin()
        for number in range(CUTS):
            siege.cut(kinds[(number + turn * CUTS) % len(kinds)])
        # Work that was never done cannot have been damaged.
        siege.until(lambda: all(siege.counts[kind] for kind in kinds), "each kind of work")
        faults = siege.faults()
    print(f"{file_system}: {siege}")
    assert not faults, report(faults, siege)
    return siege.cuts


def report(faults: list[Fault], siege: Siege) -> str:
    """Describe the first 20 faults."""
    lines = "\n  ".join(f"{fault.kind}: {fault.text}" for fault in faults[:20])
    return f"{len(faults)} faults after {siege}\nmoments {siege.moments}:\n  {lines}"


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_disk_keeps_synced_files_only_although_a_namespace_has_a_copy_of_its_mount(
    tmp_path: Path, file_system: str
) -> None:
    with loop_disk(file_system, tmp_path / "disk") as disk:
        files = RealFiles(disk.folder)
        files.replace("synced", b"1")
        (disk.folder / "unsynced").write_bytes(b"2")
        other = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; cat"]
        with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as copy:
            assert copy.stdout is not None and copy.stdout.readline()
            disk.cut()
            with pytest.raises(DiskFailed):
                files.replace("later", b"3")
            disk.restore()
            assert files.list_dir(".") == ["synced"] and bytes(files.map_readonly("synced")) == b"1"
            copy.communicate()


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_each_kind_of_state_survives_power_cuts(tmp_path: Path, file_system: str) -> None:
    cuts: Counter[str] = Counter()
    for life in range(LIVES):
        cuts += besiege(tmp_path / str(life), file_system, life)
    print(f"{file_system}: {dict(cuts)}")
    assert not IS_SIEGE or set(cuts.values()) == {LIVES * CUTS // len(KINDS)}


@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize("file_system", FILE_SYSTEMS[: rounds(1, 2)])
def test_replicas_survive_power_cuts_of_one_and_of_all(tmp_path: Path, file_system: str) -> None:
    need_etcd()
    cuts: Counter[str] = Counter()
    for number in range(GROUPS):
        folder = tmp_path / str(number)
        with ExitStack() as stack:
            disks = {name: stack.enter_context(loop_disk(file_system, folder / name)) for name in "abc"}
            siege = stack.enter_context(PoweredGroup(folder, disks, SEED + number))
            siege.clients()
            for _ in range(GROUP_CUTS):
                siege.kill()
            faults = siege.faults()
        print(f"{file_system}: {siege}")
        assert not faults, report(faults, siege)
        cuts += siege.cuts
    print(f"{file_system}: {dict(cuts)}")


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_broker_that_syncs_nothing_is_noticed(tmp_path: Path, file_system: str) -> None:
    """Control: the same disk, and no fsync or fdatasync."""
    unsynced = [sys.executable, "-m", "tests.crash.unsynced"]
    with loop_disk(file_system, tmp_path / "disk") as disk, PowerSiege(disk, SEED, program=unsynced) as siege:
        sent: list[Sent] = []
        with siege.broker.client() as ball:
            for _ in range(10):
                sent += siege.ask("a", [CLOCK.wall_ms() + HOUR_MS])
                ball.send("a", sent[-1].body, at=sent[-1].due_ms, message_id=sent[-1].key)
                siege.ended(sent[-1:], acked=True)
        faults = Siege.faults(siege)
    assert "lost" in {fault.kind for fault in faults}
