"""RocketMQ's numeric codes, which must not be changed by accident."""

from __future__ import annotations

from timeball.edges.remoting.codec.codes import MessageFlag, PullFlag, RequestCode, ResponseCode


def test_codes_have_the_numbers_of_rocketmq() -> None:
    assert [
        RequestCode.SEND_MESSAGE, RequestCode.PULL_MESSAGE, RequestCode.HEART_BEAT,
        RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE, RequestCode.RECALL_MESSAGE,
    ] == [10, 11, 34, 36, 105, 310, 320, 370]  # fmt: skip
    assert [
        ResponseCode.SUCCESS, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED,
    ] == [0, 13, 17, 19, 20, 21]  # fmt: skip


def test_rollback_is_both_bits_of_a_transaction() -> None:
    both = MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT
    assert both == MessageFlag.TRANSACTION_ROLLBACK == 12


def test_no_two_bits_of_a_pull_are_the_same() -> None:
    assert sorted(PullFlag) == [1, 2, 4, 8, 16]
