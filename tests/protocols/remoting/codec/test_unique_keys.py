"""Message ids for clients that send none."""

from __future__ import annotations

from timeball.protocols.remoting.codec.unique_keys import UniqueKeys


def test_ids_are_rocketmqs_32_digits_and_differ() -> None:
    keys = UniqueKeys(bytes([127, 0, 0, 1]), 4242, 99)
    made = [keys.next(1_761_000_000_000) for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert all(len(key) == 32 and key == key.upper() and int(key, 16) for key in made)
    assert made[0].startswith("7F000001" + f"{4242:04X}")


def test_two_runs_differ() -> None:
    assert UniqueKeys(b"", 1, 1).next(5) != UniqueKeys(b"", 1, 2).next(5)
