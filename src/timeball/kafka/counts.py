"""What a bridge has done since its start, for its status lines."""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct):
    """Each number is changed by one thread, or under a lock, and read by another, which may see it a moment late.

    taken         records of Kafka that are in Timeball's log; of them `dead` as dead letters
    cancelled     messages that records with the header `cancel` have ended
    delivered     records that are in Kafka again, committed; of them `undeliverable` as dead letters
    filed         records that are in the local file, as Kafka takes no whole dead letter of them
    transactions  in which these were written
    lost          messages or offsets that retention let go before the bridge came to them
    behind        records of the topic of --in that are not taken yet
    late_ms       how late the latest record of the last status line was committed
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
