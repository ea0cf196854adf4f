"""Every bound in one place, each with its reason; precedents are named where a user may expect them.

Nothing here is a tuning knob in disguise: what an operator may change is in `config.py`, and it may not
exceed what stands here, because these follow from field widths and from memory that must stay bounded.
"""

from __future__ import annotations

import re

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

# RocketMQ's timer ends at 3 days, Aliyun's at 40; ten years is beyond any order, licence or warranty reminder.
DELAY_MS_MAX = 3_653 * DAY_MS
# 9999-12-31: the last instant Python's datetime and Delta's timestamp can both name.
INSTANT_MS_MAX = 253_402_300_799_000
# 1973 in milliseconds, but 5138 in seconds. A due time that is a smaller number was meant as seconds, or is a date such
# as 20300131. RocketMQ's clients alone may send one: it is in the past, so their message is delivered at once.
DUE_MS_MIN = 100_000_000_000
NO_MILLISECONDS = "milliseconds since 1970 are meant; this looks like seconds, or like a date"

BODY_BYTES_MAX = 4 * 1024 * 1024  # RocketMQ's maxMessageSize
PROPERTIES_BYTES_MAX = 32_767  # RocketMQ's Short.MAX_VALUE, a 16-bit length on its wire
# A trace of RocketMQ's clients names the ids and keys of the 100 messages that it tells of. A key is 16 bytes of index.
KEYS_BYTES_MAX = PROPERTIES_BYTES_MAX
KEYS_PER_MESSAGE_MAX = 1_024
TAG_BYTES_MAX = 255
TOPIC_BYTES_MAX = 127  # RocketMQ's TOPIC_MAX_LENGTH
GROUP_BYTES_MAX = 120  # RocketMQ's GROUP_MAX_LENGTH (5.x), 255 before
OWN_TOPIC_BYTES_MAX = 255  # RocketMQ's, for %RETRY%<group>_<topic>: made of two that are each in bounds
UNIQUE_KEY_BYTES_MAX = 255
IDEMPOTENCY_KEY_BYTES_MAX = 512  # a topic, a message id, and what a client puts between them
# Known at a time: some 400 bytes each in memory, 150 in a snapshot and in a checkpoint.
IDEMPOTENCY_KEYS_MAX = 100_000
# Sources of batches whose positions the log keeps, and the partitions of one: each batch writes all of its source's.
SOURCES_MAX = 1_000
SOURCE_PARTITIONS_MAX = 1_024
DEAD_LETTER_SPANS_MAX = 10_000  # of one group; each change writes all of them
DEAD_LETTER_HANDLE_CHARACTERS_MAX = 25
DEAD_LETTERS_REPEATED_AT_ONCE = 1_000  # rows of one frame that retention repeats
DEAD_LETTERS_REPEATED_BYTES = 8 * 1024 * 1024  # and about as many bytes
EXPIRED_TOPICS_MAX = 1_000  # of one group; each change writes all of them
DEAD_LETTERS_PER_REQUEST_MAX = 1_000
SHOWN_BODY_BYTES_MAX = 64 * 1024  # of each that is shown
NAME = re.compile(r"^[%|a-zA-Z0-9_-]+$")  # RocketMQ's own pattern; excludes separators and dots of paths

CLIENT_ID_CHARACTERS_MAX = 1_024  # an address and a name; gRPC's clients send it with every call

# A filter's text comes from any consumer, is parsed on the event loop, and is held while it consumes.
FILTER_BYTES_MAX = 16_384  # a page of conditions; takes milliseconds to read
FILTER_TOKENS_MAX = 4_096  # words, numbers, strings and signs
FILTER_DEPTH_MAX = 32  # parentheses and NOTs inside each other; each is some frames of Python's stack
FILTER_IN_ITEMS_MAX = 1_024
FILTER_TAGS_MAX = 1_024  # tags of one subscription

TOPICS_MAX = 100_000
# Topics that clients make by naming them. RocketMQ has no bound; a key put in the place of a topic ends its brokers.
NEW_TOPICS_PER_REQUEST_MAX = 100  # a batch for more of them is a mistake
NEW_TOPICS_PER_SECOND = (
    100  # of one account: the 50,000 below take it eight minutes, in which an operator sees it
)
NEW_TOPICS_BURST = 1_000  # an application that starts may name all its topics at once
NEW_TOPICS_PER_ACCOUNT_MAX = TOPICS_MAX // 2  # one account leaves room for the others
QUEUES_PER_TOPIC_MAX = 1_024
GROUPS_MAX = 100_000

ROWS_PER_REQUEST_MAX = 131_072  # one request is one frame, hence atomic; the client splits larger ones
FRAME_ROWS_MAX = ROWS_PER_REQUEST_MAX  # keeps one commit, and one decode, within some tens of milliseconds
FRAME_BYTES_MAX = (
    256 * 1024 * 1024
)  # the length field is 32 bits wide; this bounds the allocation behind a corrupt one
# One batch of a send stream, and what it decodes to: the longest body, its properties, its keys, and all besides.
BATCH_BYTES_MAX = BODY_BYTES_MAX + 128 * 1024
# The rest of the frame is for the columns that admission adds; a release is cut to the same size.
REQUEST_BYTES_MAX = FRAME_BYTES_MAX // 2
APPEND_BYTES_IN_FLIGHT_MAX = (
    512 * 1024 * 1024
)  # accepted but not yet on disk; beyond it the caller is told to wait
RELEASE_ROWS_IN_FLIGHT_MAX = 524_288  # released but not yet on disk
PULL_ROWS_MAX = 65_536
PULL_BYTES_MAX = 64 * 1024 * 1024
PULL_WAIT_MS_MAX = 60_000
PULLS_WAITING_MAX = 10_000
POP_ROWS_MAX = 1_024
POP_BYTES_MAX = 8 * 1024 * 1024  # of one answer; RocketMQ's clients close the connection at 16 MiB
POP_HELD_PER_QUEUE_MAX = 10_000  # leased in memory, of one group (RocketMQ's popInflightMessageThreshold)
POP_HELD_MAX = 500_000  # leased in memory, of all groups; some 300 bytes each
POP_SPAN_MAX = 100_000  # positions from a group's stored offset to its newest: what a crash hands out again
POP_WINDOWS_MAX = 100_000  # queues times groups that are looked after at once
PUSH_SUBSCRIPTIONS_MAX = 1_000  # each is a task, and a pool of connections
PUSH_URL_BYTES_MAX = 2_048
PUSH_IN_FLIGHT_MAX = 1_000  # requests of one subscription: each holds a socket
PUSH_RATE_PER_S_MAX = 100_000.0
PUSH_TIMEOUT_MS_MAX = 5 * MINUTE_MS  # a receiver that needs longer answers 202 and works then
PUSH_RETRY_AFTER_MS_MAX = HOUR_MS  # a receiver that asks for longer is asked again after that
INVISIBLE_MS_MAX = 12 * HOUR_MS  # RocketMQ's maxInvisibleTime
CANCELS_PER_REQUEST_MAX = 10_000
FORECAST_BUCKETS_MAX = 10_000  # of one answer
LISTED_ROWS_MAX = 1_000  # messages in a page of what waits, groups in one of theirs
NACK_REASON_BYTES_MAX = 1_024  # a line of an exception; it goes along with every later delivery
CANCEL_REASON_CHARACTERS_MAX = 200  # stands in every CANCEL row of the call
ATTACH_FILES_MAX = 10_000
RESERVATIONS_MAX = 10_000  # ranges set aside by writers that have not attached yet
# Jobs whose last attach is known, so that a repeated one is: some 400 bytes each, in memory and in the checkpoint.
JOBS_MAX = 100_000
CAMPAIGNS_MAX = 1_000  # of which the log keeps a row; those that are over give way
JOB_KEPT_MS = 7 * DAY_MS  # at least so long, or a write of yesterday that is run again would be written again
JOBS_UNNAMED_MAX = 10_000  # repeated only by a writer that waits for its answer
HALVES_OPEN_MAX = 200_000  # transactions not ended yet; each is in memory and in the checkpoint
# RocketMQ's transactionTimeOut, transactionCheckInterval (5.x) and transactionCheckMax.
TRANSACTION_FIRST_CHECK_MS = 6 * SECOND_MS
TRANSACTION_CHECK_INTERVAL_MS = 30 * SECOND_MS
TRANSACTION_CHECKS_MAX = 15

assert FRAME_BYTES_MAX < 2**31
assert BODY_BYTES_MAX + PROPERTIES_BYTES_MAX < FRAME_BYTES_MAX
assert INSTANT_MS_MAX + DELAY_MS_MAX < 2**63
