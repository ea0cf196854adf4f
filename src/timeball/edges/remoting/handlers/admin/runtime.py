"""The broker's figures and settings, for tools, under RocketMQ's names.

Some figures of RocketMQ have no counterpart in Timeball (thread pools, page-cache locks). They are 0, since tools read
these names and fail without them. Rates come from samples that the edge takes once a second. "Yesterday" and "today"
are days of UTC. If the broker started today, "today" begins with its start. Settings can be read but not written,
because they are fixed when the broker starts. broker/registry/rates.py counts messages and bytes by topic and group,
which exporters and consoles draw.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields

import msgspec

from timeball import __version__
from timeball.broker.registry.rates import STATS, Rate, Stat, Window
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, data_version
from timeball.edges.remoting.codec.codes import BROKER_VERSION, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import text
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import OutOfRange

TPS_WINDOWS_S = (10, 60, 600)  # RocketMQ's three averages

_NOTHING_OF_THE_KIND = (
    "sendThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueSize",
    "pullThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueSize", "ackThreadPoolQueueSize",
    "queryThreadPoolQueueHeadWaitTimeMills", "ackThreadPoolQueueHeadWaitTimeMills", "EndTransactionQueueSize",
    "pageCacheLockTimeMills", "dispatchBehindBytes", "timerReadBehind", "timerOffsetBehind",
)  # fmt: skip


_OF_THE_BROKER = (
    Stat.BROKER_PUT_NUMS,
    Stat.BROKER_GET_NUMS,
)  # RocketMQ's key for these is the cluster's name


class _View(msgspec.Struct, rename="camel"):
    stats_name: str
    stats_key: str


class Runtime:
    """Serves the requests about the broker's figures and settings."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker = context, context.broker
        self._started_ms = self._now_ms()
        # Monotonic ms, rows written, rows read.
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=TPS_WINDOWS_S[-1] + 1)
        self._day = self._started_ms // limits.DAY_MS
        self._put_yesterday_morning = self._put_at_midnight = 0
        self._get_yesterday_morning = self._get_this_morning = 0
        self.sample()
        self.handlers: Handlers = {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._info,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.GET_NAMESRV_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._update_config,
            RequestCode.GET_ALL_DELAY_OFFSET: self._delay_offsets,
            RequestCode.VIEW_BROKER_STATS_DATA: self._view,
        }

    def sample(self) -> None:
        """Note the numbers of rows, and pass the time to the counters of rates. Called about once a second."""
        rows, day = self._broker.log.writer.statistics.rows, self._now_ms() // limits.DAY_MS
        gets = self._gets()
        if day > self._day:
            self._put_yesterday_morning, self._put_at_midnight = self._put_at_midnight, rows
            self._get_yesterday_morning, self._get_this_morning = self._get_this_morning, gets
            self._day = day
        now_ms = self._context.monotonic_ms()
        self._samples.append((now_ms, rows, gets))
        self._broker.rates.sample(now_ms)

    def _gets(self) -> int:
        return self._broker.rates.total(Stat.BROKER_GET_NUMS)

    def _now_ms(self) -> int:
        return self._broker.clock.now_ms()

    async def _info(self, call: Call) -> Reply:
        earliest_ms = await in_thread(self._broker.threads.reader, first_store_ms, self._broker.log.reader)
        return call.answer_json({"table": self._table(earliest_ms or self._now_ms())})

    def _table(self, earliest_ms: int) -> dict[str, str]:
        """Return RocketMQ's BrokerRuntimeInfo."""
        now_ms = self._now_ms()
        written, segments = self._broker.log.writer.statistics, self._broker.log.reader.segments
        put_tps, get_tps = self._tps(1, written.rows), self._tps(2, self._gets())
        found: dict[str, object] = dict.fromkeys(_NOTHING_OF_THE_KIND, 0)
        found |= {
            "brokerActive": "true",
            "brokerVersion": BROKER_VERSION,
            "brokerVersionDesc": f"Timeball {__version__}",
            "bootTimestamp": self._started_ms,
            "runtime": _spelled(now_ms - self._started_ms),
            "startAcceptSendRequestTimeStamp": self._started_ms,
            "msgPutTotalYesterdayMorning": self._put_yesterday_morning,
            "msgPutTotalTodayMorning": self._put_at_midnight,
            "msgPutTotalTodayNow": written.rows,
            "msgGetTotalYesterdayMorning": self._get_yesterday_morning,
            "msgGetTotalTodayMorning": self._get_this_morning,
            "msgGetTotalTodayNow": self._gets(),
            "putTps": put_tps,
            "getTransferredTps": get_tps,
            "getTransferedTps": get_tps,  # 4.x's spelling
            "putMessageTimesTotal": written.rows,
            "putMessageSizeTotal": written.bytes,
            "putMessageAverageSize": written.bytes / written.rows if written.rows else 0.0,
            "earliestMessageTimeStamp": earliest_ms,
            "commitLogMinOffset": segments.first_seq,
            "commitLogMaxOffset": segments.next_seq,
            "commitLogDirCapacity": f"Total : unknown, used : {segments.size_bytes} bytes.",
            "commitLogDiskRatio": 0.0,
            "consumeQueueDiskRatio": 0.0,
            "remainHowManyDataToFlush": "0 B",
            "timerCongestNum": self._waiting_rows(),
            "timerEnqueueTps": 0.0,
            "timerDequeueTps": 0.0,
        }
        offsets = self._broker.scheduling.levels.offsets()
        for level in range(1, len(self._broker.scheduling.levels.table) + 1):
            offset, end = offsets.get(level, (0, 0))
            found[f"scheduleMessageOffset_{level}"] = f"{offset},{end}"
        return {name: str(value) for name, value in sorted(found.items())}

    def _waiting_rows(self) -> int:
        counts = self._broker.schedule_statistics()
        waiting = counts["tail_rows"] + counts["table_rows"] + counts.get("waiting_rows", 0)
        return waiting - counts["cancelled_rows"]

    def _tps(self, of_sample: int, rows: int) -> str:
        """Return RocketMQ's three averages of one count of the samples, whose value now is `rows`."""
        now_ms, rates = self._context.monotonic_ms(), []
        for window_s in TPS_WINDOWS_S:
            begin_ms = now_ms - window_s * limits.SECOND_MS
            sample = next((s for s in self._samples if s[0] >= begin_ms), self._samples[-1])
            passed_ms = now_ms - sample[0]
            rates.append((rows - sample[of_sample]) * 1_000 / passed_ms if passed_ms > 0 else 0.0)
        return " ".join(f"{rate:.1f}" for rate in rates)

    def _view(self, call: Call) -> Reply:
        asked = call.fields(_View)
        rates = self._broker.rates
        return call.answer_json(
            {
                "statsMinute": self._words(asked, rates.minute),
                "statsHour": self._words(asked, rates.hour),
                "statsDay": self._words(asked, rates.day),
            }
        )

    def _words(self, asked: _View, window: Window) -> dict[str, object]:
        """Return RocketMQ's BrokerStatsItem."""
        found = self._rate(asked, window)
        if found is None:
            # RocketMQ's sentence. Tools understand it as "no data yet".
            remark = f"The stats <{asked.stats_name}> <{asked.stats_key}> not exist"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        return {"sum": found.sum, "tps": found.per_second, "avgpt": found.per_time}

    def _rate(self, asked: _View, window: Window) -> Rate | None:
        stat, key = asked.stats_name, asked.stats_key
        if stat not in STATS:
            return None
        if stat in _OF_THE_BROKER:
            if key != self._context.cluster_name:
                return None
            key = ""
        return self._broker.rates.rate(stat, key, window, self._context.monotonic_ms())

    def _config(self, call: Call) -> Reply:
        settings, context = self._broker.settings, self._context
        named = {
            "brokerName": context.broker_name,
            "brokerClusterName": context.cluster_name,
            "brokerId": 0,
            "listenPort": context.port,
            "messageDelayLevel": settings.delay_levels,
            "defaultTopicQueueNums": settings.queues_per_topic,
            "autoCreateTopicEnable": settings.auto_create_topics,
            "autoCreateSubscriptionGroup": True,
            "fileReservedTime": settings.retention_ms // limits.HOUR_MS,
            "flushDiskType": "SYNC_FLUSH" if settings.durability == "sync" else "ASYNC_FLUSH",
            "maxMessageSize": limits.BODY_BYTES_MAX,
            "timerMaxDelaySec": settings.delay_ms_max // limits.SECOND_MS,
            **{f"timeball.{field.name}": getattr(settings, field.name) for field in fields(settings)},
        }
        lines = [f"{name}={text(value)}\n" for name, value in named.items()]
        return call.answer(body="".join(lines).encode(), ext={"version": '{"counter":0,"timestamp":0}'})

    def _update_config(self, call: Call) -> Reply:
        raise Refused(
            ResponseCode.NO_PERMISSION,
            "the settings of a running Timeball do not change: stop it, and start it with other options",
        )

    def _delay_offsets(self, call: Call) -> Reply:
        levels = self._broker.scheduling.levels
        offsets = dict.fromkeys(range(1, len(levels.table) + 1), (0, 0)) | levels.offsets()
        return call.answer_json(
            {
                "dataVersion": data_version(0, self._started_ms),
                "offsetTable": {str(level): offset for level, (offset, _) in offsets.items()},
            }
        )


def first_store_ms(reader: LogReader) -> int | None:
    """Return when the oldest row of the log was stored, or None for an empty log (reader thread)."""
    try:
        _, rows = next(reader.frames(reader.first_seq, reader.first_seq + 1))
    except (StopIteration, OutOfRange):  # retention may delete it at this moment
        return None
    found = rows.column("store_ms")[0].as_py()
    return None if found is None else int(found)


def _spelled(ms: int) -> str:
    """Format a duration as RocketMQ does."""
    seconds = max(0, ms) // 1_000
    days, seconds = divmod(seconds, 86_400)
    hours, seconds = divmod(seconds, 3_600)
    minutes, seconds = divmod(seconds, 60)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
