"""Topic names that mean something to RocketMQ's clients and tools."""

from __future__ import annotations

TEMPLATE_TOPIC = "TBW102"  # producers ask for its route before they send to a topic nobody has made
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"  # where promises of delay levels wait, a queue a level
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
