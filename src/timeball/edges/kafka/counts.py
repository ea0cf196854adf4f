"""The counts of a bridge since its start, for its status lines."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct):
    """The counts. One thread changes each number, or several under a lock. Readers may see a slightly older value.

    taken         records of Kafka that are in Timeball's log, including the `dead` ones that became dead letters
    cancelled     messages that records with the header `cancel` have cancelled
    delivered     records committed in Kafka, including the `undeliverable` ones that became dead letters
    filed         records in the local file, because Kafka accepts no complete dead letter of them
    transactions  in which these were written
    lost          messages or offsets that retention removed before the bridge reached them
    behind        records of the topic of --in that are not taken yet
    late_ms       the largest lateness of a commit since the last status line
    """

    taken: int = 0
    dead: int = 0
    cancelled: int = 0
    delivered: int = 0
    undeliverable: int = 0
    filed: int = 0
    transactions: int = 0
    lost: int = 0
    behind: int = 0
    late_ms: int = 0
