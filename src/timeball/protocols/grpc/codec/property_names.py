"""Names of properties that are RocketMQ's or ours: no user may give a value to one, and none is shown as a user's.

A gRPC client says such things in fields of their own (a tag, keys, an instant); in the log they stand among the
properties, where RocketMQ's other clients look for them.
"""

from __future__ import annotations

from timeball.broker.consuming.retry import SPENT

TAGS, KEYS, UNIQ_KEY = "TAGS", "KEYS", "UNIQ_KEY"
MESSAGE_GROUP = "__SHARDINGKEY"  # shown among a user's too, as in RocketMQ; so is the transaction's
DELIVER_MS = "TIMER_DELIVER_MS"
TRACE_CONTEXT = "TRACE_CONTEXT"
PREPARED, PRODUCER_GROUP = "TRAN_MSG", "PGROUP"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
TRANSACTION_ID = "__transactionId__"

# RocketMQ's MessageConst.STRING_HASH_SET, what has delayed a message, and what a field of a message says.
RESERVED = SPENT | frozenset(
    {
        TAGS, KEYS, UNIQ_KEY, DELIVER_MS, TRACE_CONTEXT, PREPARED, PRODUCER_GROUP, CHECK_IMMUNITY,
        "1ST_POP_TIME", "ARRIVE_TIME", "BORN_TIMESTAMP", "BUYER_ID", "CLUSTER", "CONSUME_START_TIME",
        "CORRECTION_FLAG", "CORRELATION_ID", "DLQ_ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "DUP_INFO",
        "EXTEND_UNIQ_INFO", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "INSTANCE_ID", "MAX_OFFSET",
        "MAX_RECONSUME_TIMES", "MIN_OFFSET", "MQ2_FLAG", "MSG_REGION", "MSG_TYPE", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID",
        "POP_CK", "POP_CK_OFFSET", "PUSH_REPLY_TIME", "RECONSUME_TIME", "REPLY_TO_CLIENT", "RETRY_TOPIC",
        "TIMER_DEL_MS", "TIMER_DEL_UNIQKEY", "TRACE_ON", "TRANSACTION_CHECK_TIMES", "TRANSFER_FLAG",
        "TRAN_PREPARED_QUEUE_OFFSET", "TTL", "WAIT", "__BORNHOST", "__CRC32#",
    }
)  # fmt: skip
