"""How long a message stays away after an attempt that failed, by its group's policy. Arithmetic only.

    CUSTOMIZED    a list of durations, the last one for ever after; without one, RocketMQ's 18 levels from 10 s on
    EXPONENTIAL   initial x multiplier^n, at most max

The attempts are counted from 1 as consumers of RocketMQ 5 see them; n, RocketMQ's reconsumeTimes, is one less. Policies
come from an administrator's tools with whatever numbers they hold, so what comes out is held within what an invisible
time may be.
"""

from __future__ import annotations

from timeball import limits
from timeball.broker.registry.groups import CustomizedRetry, ExponentialRetry, RetryPolicy

_S, _M, _H = limits.SECOND_MS, limits.MINUTE_MS, limits.HOUR_MS
LEVELS_MS = (
    1 * _S, 5 * _S, 10 * _S, 30 * _S, 1 * _M, 2 * _M, 3 * _M, 4 * _M, 5 * _M, 6 * _M, 7 * _M, 8 * _M, 9 * _M,
    10 * _M, 20 * _M, 30 * _M, 1 * _H, 2 * _H,
)  # fmt: skip
FIRST = 2  # where in its list a customised policy begins; RocketMQ's levels 1 and 2 are no retries
POWER_MAX = 32


def delay_ms(policy: RetryPolicy | None, attempt: int) -> int:
    """Milliseconds to wait after attempt number `attempt` (from 1); None: as for a group that says nothing."""
    policy = policy or RetryPolicy()
    times = max(0, attempt - 1)
    if policy.type == "EXPONENTIAL":
        found = _exponential(policy.exponential_retry_policy or ExponentialRetry(), times)
    else:
        found = _customized(policy.customized_retry_policy or CustomizedRetry(), times)
    return min(max(0, found), limits.INVISIBLE_MS_MAX)


def durations_ms(policy: CustomizedRetry | None) -> list[int]:
    """The durations of a customised policy; RocketMQ's levels for one that names none."""
    return list(policy.next) if policy is not None and policy.next else list(LEVELS_MS)


def _customized(policy: CustomizedRetry, times: int) -> int:
    durations = durations_ms(policy)
    return durations[min(times + FIRST, len(durations) - 1)]


def _exponential(policy: ExponentialRetry, times: int) -> int:
    factor: int = policy.multiplier ** min(times, POWER_MAX)
    return min(policy.max, policy.initial * factor)
