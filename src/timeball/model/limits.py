"""All fixed bounds, with their reasons. Comments name RocketMQ's bound where users may expect it.

None of these is a setting. The settings in `config.py` may not exceed these bounds, which follow from field widths and
from the need to bound memory.
"""

from __future__ import annotations

import re

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

# RocketMQ's timer ends at 3 days, Aliyun's at 40. Ten years is beyond any order, licence or warranty reminder.
DELAY_MS_MAX = 3_653 * DAY_MS
# 9999-12-31: the last time that both Python's datetime and Delta's timestamp can represent.
INSTANT_MS_MAX = 253_402_300_799_000
# This number is March 1973 in milliseconds, and the year 5138 in seconds. A smaller due time was meant as seconds, or
# is a date such as 20300131, and is refused. Only from RocketMQ's clients is it accepted: it is in the past, so the
# message is delivered immediately.
DUE_MS_MIN = 100_000_000_000
NOT_MILLISECONDS_TEXT = "milliseconds since 1970 are meant; this looks like seconds, or like a date"

BODY_BYTES_MAX = 4 * 1024 * 1024  # RocketMQ's maxMessageSize
PROPERTIES_BYTES_MAX = 32_767  # RocketMQ's Short.MAX_VALUE, a 16-bit length in its protocol
# A trace of RocketMQ's clients contains the ids and keys of its 100 messages. A key takes 16 bytes of index.
KEYS_BYTES_MAX = PROPERTIES_BYTES_MAX
KEYS_PER_MESSAGE_MAX = 1_024
TAG_BYTES_MAX = 255
TOPIC_BYTES_MAX = 127  # RocketMQ's TOPIC_MAX_LENGTH
GROUP_BYTES_MAX = 120  # RocketMQ's GROUP_MAX_LENGTH (5.x), 255 before
OWN_TOPIC_BYTES_MAX = 255  # RocketMQ's bound for %RETRY%<group>_<topic>
UNIQUE_KEY_BYTES_MAX = 255
IDEMPOTENCY_KEY_BYTES_MAX = 512  # a topic, a message id, and the separators of a client
# Keys that the broker remembers: some 400 bytes each in memory, 150 in a snapshot and in a checkpoint.
IDEMPOTENCY_KEYS_MAX = 100_000
# Unique keys whose pending message is in memory, some 500 bytes each. Any other key is looked up.
UNIQUE_KEYS_KNOWN_MAX = 20_000
UNIQUE_SENDS_WAITING_MAX = 10_000  # for the turn of their key
# Sources whose positions are in the log, and partitions of a source. Each batch writes all positions of its source.
SOURCES_MAX = 1_000
SOURCE_PARTITIONS_MAX = 1_024
DEAD_LETTER_SPANS_MAX = 10_000  # per group; each change writes all of them
DEAD_LETTER_HANDLE_CHARACTERS_MAX = 25
DEAD_LETTERS_REPEATED_AT_ONCE = 1_000  # rows of one frame when retention repeats dead letters
DEAD_LETTERS_REPEATED_BYTES = 8 * 1024 * 1024  # approximate bytes of such a frame
RESEND_RATE_MIN, RESEND_RATE_MAX = 0.001, 100_000.0  # dead letters in a second
TOPIC_RATE_MAX = 100_000  # messages of a topic with a limit that become visible in a second
EXPIRED_TOPICS_MAX = 1_000  # per group; each change writes all of them
DEAD_LETTERS_PER_REQUEST_MAX = 1_000
SHOWN_BODY_BYTES_MAX = 64 * 1024  # per displayed message
FOUND_MESSAGES_MAX = 1_000  # with one id, in the answer to a look-up: the newest ones
FOUND_BODY_BYTES_MAX = 4 * 1024 * 1024  # of the newest of them, as displayed
NAME = re.compile(r"^[%|a-zA-Z0-9_-]+$")  # RocketMQ's own pattern; excludes path separators and dots

CLIENT_ID_CHARACTERS_MAX = 1_024  # an address and a name; gRPC's clients send it with every call

# A filter's text comes from any consumer, is parsed on the event loop, and stays in memory while it consumes.
FILTER_BYTES_MAX = 16_384  # a page of conditions; parsing takes milliseconds
FILTER_TOKENS_MAX = 4_096  # words, numbers, strings and signs
FILTER_DEPTH_MAX = 32  # nested parentheses and NOTs; each takes some frames of Python's stack
FILTER_IN_ITEMS_MAX = 1_024
FILTER_TAGS_MAX = 1_024  # tags of one subscription

TOPICS_MAX = 100_000
# Bounds for topics that clients create by using them. RocketMQ has no such bound, so a client that sends a key as the
# topic can bring its brokers down.
NEW_TOPICS_PER_REQUEST_MAX = 100  # a batch for more new topics is a mistake
# Per account. It takes eight minutes to reach NEW_TOPICS_PER_ACCOUNT_MAX, so an operator can notice it.
NEW_TOPICS_PER_SECOND = 100
NEW_TOPICS_BURST = 1_000  # an application may use all its topics at once when it starts
NEW_TOPICS_PER_ACCOUNT_MAX = TOPICS_MAX // 2  # so that one account cannot use up the topics of the others
QUEUES_PER_TOPIC_MAX = 1_024
GROUPS_MAX = 100_000

ROWS_PER_REQUEST_MAX = 131_072  # a request is one frame, hence atomic; the client splits larger ones
FRAME_ROWS_MAX = ROWS_PER_REQUEST_MAX  # limits a commit, and a decode, to some tens of milliseconds
# The length field has 32 bits. This bound limits the memory that a corrupt length can allocate.
FRAME_BYTES_MAX = 256 * 1024 * 1024
# One batch of a send stream, encoded or decoded: the longest body, and 128 KiB for properties, keys and the rest.
BATCH_BYTES_MAX = BODY_BYTES_MAX + 128 * 1024
# Half a frame, because admission adds columns. Releases are split to the same size.
REQUEST_BYTES_MAX = FRAME_BYTES_MAX // 2
# Bytes that are accepted but not on disk yet. Above this, sends are refused with OverLimit.
APPEND_BYTES_IN_FLIGHT_MAX = 512 * 1024 * 1024
RELEASE_ROWS_IN_FLIGHT_MAX = 524_288  # released but not on disk yet
# Bodies of one hand-out: the first message of a burst is visible when this is on disk. One body always fits.
RELEASE_BYTES_MAX = BODY_BYTES_MAX
RELEASE_BYTES_IN_FLIGHT_MAX = 2 * RELEASE_BYTES_MAX  # one on its way to the disk, and the next one
PULL_ROWS_MAX = 65_536
PULL_BYTES_MAX = 64 * 1024 * 1024
PULL_WAIT_MS_MAX = 60_000
PULLS_WAITING_MAX = 10_000
POP_ROWS_MAX = 1_024
POP_BYTES_MAX = 8 * 1024 * 1024  # per answer; RocketMQ's clients close the connection at 16 MiB
POP_HELD_PER_QUEUE_MAX = 10_000  # leased in memory by one group (RocketMQ's popInflightMessageThreshold)
PARKED_PER_GROUP_MAX = 20_000  # of these, those that wait for a lease with their key to end
POP_HELD_MAX = 500_000  # leased in memory by all groups; some 300 bytes each
CREDIT_ROWS_MAX = 10_000  # messages that a streaming consumer may hold
POP_WINDOWS_MAX = 100_000  # (queue, group) pairs whose leases are managed at the same time
PUSH_SUBSCRIPTIONS_MAX = 1_000  # each has a task and a connection pool
PUSH_URL_BYTES_MAX = 2_048
PUSH_IN_FLIGHT_MAX = 1_000  # requests of one subscription; each uses a socket
PUSH_RATE_PER_S_MAX = 100_000.0
PUSH_TIMEOUT_MS_MAX = 5 * MINUTE_MS  # a receiver that needs longer answers 202 and then processes
PUSH_RETRY_AFTER_MS_MAX = HOUR_MS  # a longer Retry-After of a receiver is cut to this
# Rules and templates of schedules are in memory and in each snapshot, which is one frame.
SCHEDULES_MAX = 1_000_000
SCHEDULES_BYTES_MAX = 160 * 1024 * 1024  # rules, templates and progress of all schedules
SCHEDULE_PROGRESS_BYTES = 40  # of one schedule, in the compressed columns of a snapshot
SCHEDULE_BODY_BYTES_MAX = 64 * 1024
SCHEDULE_RULE_BYTES_MAX = 64 * 1024  # with RULE_LISTED_MAX local times and excluded dates
# An occurrence that is released up to this time after its due time is late. Later it counts as missed.
SCHEDULE_MISSED_MS = 10 * SECOND_MS
SCHEDULE_ROWS_AT_ONCE = 1_024  # in one hand-out, because each needs its rule
SCHEDULE_PREVIEW_MAX = 1_000  # occurrences in one answer
INVISIBLE_MS_MAX = 12 * HOUR_MS  # RocketMQ's maxInvisibleTime
CANCELS_PER_REQUEST_MAX = 10_000
FORECAST_BUCKETS_MAX = 10_000  # per answer
LISTED_ROWS_MAX = 1_000  # messages in a page of pending messages, or groups in a page of groups
NACK_REASON_BYTES_MAX = 1_024  # enough for a line of an exception; every later delivery carries it
CANCEL_REASON_CHARACTERS_MAX = 200  # each CANCEL row of the call contains it
ATTACH_FILES_MAX = 10_000
RESERVATIONS_MAX = 10_000  # ranges reserved by writers that have not attached yet
# Jobs whose last attach is remembered, to recognise a repetition: some 400 bytes each in memory and in the checkpoint.
JOBS_MAX = 100_000
CAMPAIGNS_MAX = 1_000  # campaigns kept in the log; finished ones are dropped for new ones
SELECTIONS_MAX = 100  # kept in the log. While messages are pending, each release evaluates their conditions
SELECTION_TOPICS_MAX = 1_000
SELECTION_RANGES_MAX = 10_000  # ranges of campaigns in the row of a selection
RULE_CHARACTERS_MAX = 20_000  # text of RFC 5545 with as many EXDATEs as may be listed
RULE_LISTED_MAX = 1_000  # local times, or excluded dates, of a recurring rule
RULE_COUNT_MAX = 1_000  # occurrences of a rule with `count`: the last is found in some milliseconds
# Parsed rules that are kept: about a kilobyte each. Schedules that are due at the same time often have equal rules.
RULES_KEPT = 16_384
LONG_RULE_CHARACTERS = 1_024
LONG_RULES_KEPT = 256  # of those that are longer: up to 200 KB each
# Minimum time that a job is remembered, so that repeating yesterday's write does not write twice.
JOB_KEPT_MS = 7 * DAY_MS
# Remembered jobs without a digest. Only a writer that still waits for its answer repeats such an attach.
JOBS_UNNAMED_MAX = 10_000
HALVES_OPEN_MAX = (
    200_000  # half messages whose transaction has not ended; all are in memory and in the checkpoint
)
# RocketMQ's transactionTimeOut, transactionCheckInterval (5.x) and transactionCheckMax.
TRANSACTION_FIRST_CHECK_MS = 6 * SECOND_MS
TRANSACTION_CHECK_INTERVAL_MS = 30 * SECOND_MS
TRANSACTION_CHECKS_MAX = 15

assert FRAME_BYTES_MAX < 2**31
assert BODY_BYTES_MAX + PROPERTIES_BYTES_MAX < FRAME_BYTES_MAX
assert INSTANT_MS_MAX + DELAY_MS_MAX < 2**63
