"""Administration of topics and of the broker: topics, the table of ordered topics, metrics and settings.

Tools create, change, list and delete topics. broker/admin/administration.py implements the changes. A change is saved
before the answer.

The name server's key-value table has one namespace that tools still use: ordered topics. In RocketMQ, a topic is marked
as ordered in two places, in the broker and in this table. The route of an ordered topic contains the number of queues
of each broker, so that clients do not redistribute queues while a broker is down. Here only the topic's configuration
is stored: a write to the table changes it, and a read is computed from it.

The metrics and settings have RocketMQ's names.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import NamedTuple

import msgspec

from timeball import __version__
from timeball.broker.admin.administration import TopicChange
from timeball.broker.registry.rates import STATS, Rate, Stat, Window, shares
from timeball.broker.registry.topics import READ, WRITE, FilterType, Topic, TopicConfig
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    address,
    data_version,
    encode_by_name,
)
from timeball.edges.remoting.codec.codes import BROKER_VERSION, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import text
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model import limits, rules
from timeball.model.errors import OutOfRange, RequestError

# ---- topics --------------------------------------------------------------------------------------------------

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"


class _CreateFields(msgspec.Struct, rename="camel"):
    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""

    def to_change(self) -> TopicChange:
        """Convert to the broker's TopicChange."""
        config = TopicConfig(
            self.read_queue_nums, self.write_queue_nums, self.perm, self.order, self.topic_sys_flag
        )
        return TopicChange(self.topic, config, self.attributes, self.topic_filter_type)


class _Config(msgspec.Struct, rename="camel"):
    """RocketMQ's TopicConfig, as `mqadmin updateTopicList` reads it from a file."""

    topic_name: str
    read_queue_nums: int = 16  # RocketMQ's defaults
    write_queue_nums: int = 16
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] | None = None

    def to_change(self) -> TopicChange:
        """Convert to the broker's TopicChange. An attribute without a sign is added."""
        config = TopicConfig(
            self.read_queue_nums, self.write_queue_nums, self.perm, self.order, self.topic_sys_flag
        )
        changes = [
            name if name.startswith("-") else f"+{name.removeprefix('+')}={value}"
            for name, value in (self.attributes or {}).items()
        ]
        return TopicChange(self.topic_name, config, ",".join(changes), self.topic_filter_type)


class _Configs(msgspec.Struct, rename="camel"):
    topic_config_list: list[_Config] = []


class _Topic(msgspec.Struct):
    topic: str


class _KeyFields(msgspec.Struct):
    namespace: str = ""
    key: str = ""


class _Namespace(msgspec.Struct):
    namespace: str = ""


class TopicAdmin:
    """Serves the requests that create, change, list and delete topics, and those about the key-value table."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._administration = context, context.broker.administration
        self._topics = context.broker.tables.topics
        self.handlers: Handlers = {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._update,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self._update_list,
            RequestCode.GET_ALL_TOPIC_CONFIG: self._list,
            RequestCode.GET_TOPIC_CONFIG: self._get,
            RequestCode.DELETE_TOPIC_IN_BROKER: self._delete,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._succeed,
            RequestCode.CLEAN_UNUSED_TOPIC: self._succeed,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self._succeed,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_values,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._configure([call.fields(_CreateFields).to_change()], call)

    async def _update_list(self, call: Call) -> Reply:
        return await self._configure(
            [config.to_change() for config in call.body(_Configs).topic_config_list], call
        )

    async def _configure(self, changes: list[TopicChange], call: Call) -> Reply:
        """Create or change topics. Durable when answered. Raises Refused for an invalid name or configuration."""
        try:
            await self._administration.configure_topics(changes, call.caller)
        except RequestError as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return call.answer()

    async def _list(self, call: Call) -> Reply:
        """Serve GET_ALL_TOPIC_CONFIG: the configurations of all topics."""
        # The version is read first, so that a tool sees an outdated version if the table changes meanwhile.
        version = data_version(self._topics.version, 0)
        table = await encode_by_name(self._topics.all(), lambda topic: (topic.name, _topic_config(topic)))
        return call.answer_json({"dataVersion": version, "topicConfigTable": table})

    def _get(self, call: Call) -> Reply:
        return call.answer_json(_topic_config(self._find_topic(call.fields(_Topic).topic)))

    async def _delete(self, call: Call) -> Reply:
        await self._administration.delete_topic(call.fields(_Topic).topic, call.caller)
        return call.answer()

    def _succeed(self, call: Call) -> Reply:
        """Answer SUCCESS and do nothing: Timeball has no separate name server or index that must be cleaned up."""
        return call.answer()

    def _system_topics(self, call: Call) -> Reply:
        """Serve GET_SYSTEM_TOPIC_LIST: RocketMQ's own topics, which include the names of cluster and broker."""
        return call.answer_json(
            {
                "topicList": [self._context.cluster_name, self._context.broker_name, *rules.SYSTEM_TOPICS],
                "brokerAddr": address(self._context, call.connection),
            }
        )

    # -- the name server's key-value table ---------------------------------------------------------------------

    def _get_value(self, call: Call) -> Reply:
        """Serve GET_KV_CONFIG: the number of queues of an ordered topic. Raises Refused for other keys."""
        fields = call.fields(_KeyFields)
        topic = self._topics.find_topic(fields.key) if fields.namespace == ORDER_NAMESPACE else None
        value = topic and order_conf(topic, self._context.broker_name)
        if not value:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {fields.namespace} Key: {fields.key}",
            )
        return call.answer(ext={"value": value})

    async def _list_values(self, call: Call) -> Reply:
        """Serve GET_KVLIST_BY_NAMESPACE: the queue counts of all ordered topics. Raises Refused if there are none."""
        namespace = call.fields(_Namespace).namespace
        table = dict[str, str]()
        if namespace == ORDER_NAMESPACE:
            async for topics in shares(self._topics.all()):
                values = {topic.name: order_conf(topic, self._context.broker_name) for topic in topics}
                table |= {name: value for name, value in values.items() if value}
        if not table:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return call.answer_json({"table": table})

    async def _put_value(self, call: Call) -> Reply:
        await self._set_order(call, order=True)
        return call.answer()

    async def _delete_value(self, call: Call) -> Reply:
        """Mark a topic as not ordered. It need not exist, because tools send this for every topic that they delete."""
        await self._set_order(call, order=False)
        return call.answer()

    async def _set_order(self, call: Call, *, order: bool) -> None:
        """Mark the topic of a key-value request as ordered or not. Does nothing if the topic does not exist.

        Raises Refused for other namespaces than ORDER_NAMESPACE, and Forbidden.
        """
        fields = call.fields(_KeyFields)
        if fields.namespace != ORDER_NAMESPACE:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"namespace {fields.namespace[:80]!r}: Timeball stores only {ORDER_NAMESPACE}",
            )
        await self._administration.set_order(fields.key, call.caller, order=order)

    def _find_topic(self, name: str) -> Topic:
        """Find a topic. Raises Refused if it does not exist."""
        topic = self._topics.find_topic(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return topic


def _topic_config(topic: Topic) -> dict[str, object]:
    """Convert a topic to RocketMQ's TopicConfig."""
    return {
        "topicName": topic.name,
        "readQueueNums": topic.read_queues,
        "writeQueueNums": topic.write_queues,
        "perm": topic.perm,
        "topicFilterType": topic.filter_type,
        "topicSysFlag": topic.config.sys_flag,
        "order": topic.config.order,
        "attributes": topic.config.attributes,
    }


def order_conf(topic: Topic, broker_name: str) -> str | None:
    """Return RocketMQ's orderTopicConf, `broker:queues`, or None for a topic that is not ordered."""
    return f"{broker_name}:{topic.write_queues}" if topic.config.order else None


# ---- the broker's metrics and settings -----------------------------------------------------------------------
# Rates are computed from samples that the edge takes once a second. "Yesterday" and "today" are days in UTC. If the
# broker started today, "today" begins with its start. The counts of messages and bytes by topic and group, which
# exporters and consoles show, are from broker/registry/rates.py. Settings can be read but not written, because they are
# fixed when the broker starts.

TPS_WINDOWS_S = (10, 60, 600)  # RocketMQ's three averages

# RocketMQ's metrics without a counterpart in Timeball (thread pools, page-cache locks). They are 0, since tools fail if
# a name is missing.
_METRICS_ALWAYS_ZERO = (
    "sendThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueSize",
    "pullThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueSize", "ackThreadPoolQueueSize",
    "queryThreadPoolQueueHeadWaitTimeMills", "ackThreadPoolQueueHeadWaitTimeMills", "EndTransactionQueueSize",
    "pageCacheLockTimeMills", "dispatchBehindBytes", "timerReadBehind", "timerOffsetBehind",
)  # fmt: skip


# RocketMQ's key for these is the name of the cluster.
_BROKER_STATS = (Stat.BROKER_PUT_NUMS, Stat.BROKER_GET_NUMS)


class _StatsFields(msgspec.Struct, rename="camel"):
    stats_name: str
    stats_key: str


class _Sample(NamedTuple):
    """Counts at a time of the monotonic clock."""

    monotonic_ms: int
    rows_written: int
    rows_read: int


class Runtime:
    """Serves the requests for the broker's metrics and settings."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker = context, context.broker
        self._started_ms = self._now_ms()
        self._samples: deque[_Sample] = deque(maxlen=TPS_WINDOWS_S[-1] + 1)
        self._day = self._started_ms // limits.DAY_MS
        # Rows written and read until the last midnights.
        self._written_yesterday_morning = self._written_this_morning = 0
        self._read_yesterday_morning = self._read_this_morning = 0
        self.sample()
        self.handlers: Handlers = {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._info,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.GET_NAMESRV_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._update_config,
            RequestCode.GET_ALL_DELAY_OFFSET: self._delay_offsets,
            RequestCode.VIEW_BROKER_STATS_DATA: self._view_stats,
        }

    def sample(self) -> None:
        """Record the numbers of rows written and read, and update the rates. Called about once a second."""
        rows_written, day = self._broker.log.writer.statistics.rows, self._now_ms() // limits.DAY_MS
        rows_read = self._rows_read()
        if day > self._day:
            self._written_yesterday_morning, self._written_this_morning = (
                self._written_this_morning,
                rows_written,
            )
            self._read_yesterday_morning, self._read_this_morning = self._read_this_morning, rows_read
            self._day = day
        now_ms = self._context.monotonic_ms()
        self._samples.append(_Sample(now_ms, rows_written, rows_read))
        self._broker.rates.sample(now_ms)

    def _rows_read(self) -> int:
        return self._broker.rates.total(Stat.BROKER_GET_NUMS)

    def _now_ms(self) -> int:
        return self._broker.clock.now_ms()

    async def _info(self, call: Call) -> Reply:
        earliest_ms = await in_thread(self._broker.threads.reader, first_store_ms, self._broker.log.reader)
        return call.answer_json({"table": self._runtime_table(earliest_ms or self._now_ms())})

    def _runtime_table(self, earliest_ms: int) -> dict[str, str]:
        """Collect RocketMQ's BrokerRuntimeInfo. `earliest_ms` is the store time of the oldest message."""
        now_ms = self._now_ms()
        written, segments = self._broker.log.writer.statistics, self._broker.log.reader.segments
        put_tps, get_tps = self._tps("rows_written", written.rows), self._tps("rows_read", self._rows_read())
        metrics: dict[str, object] = dict.fromkeys(_METRICS_ALWAYS_ZERO, 0)
        metrics |= {
            "brokerActive": "true",
            "brokerVersion": BROKER_VERSION,
            "brokerVersionDesc": f"Timeball {__version__}",
            "bootTimestamp": self._started_ms,
            "runtime": _format_duration(now_ms - self._started_ms),
            "startAcceptSendRequestTimeStamp": self._started_ms,
            "msgPutTotalYesterdayMorning": self._written_yesterday_morning,
            "msgPutTotalTodayMorning": self._written_this_morning,
            "msgPutTotalTodayNow": written.rows,
            "msgGetTotalYesterdayMorning": self._read_yesterday_morning,
            "msgGetTotalTodayMorning": self._read_this_morning,
            "msgGetTotalTodayNow": self._rows_read(),
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
            "timerCongestNum": self._pending_rows(),
            "timerEnqueueTps": 0.0,
            "timerDequeueTps": 0.0,
        }
        offsets = self._broker.scheduling.levels.offsets()
        for level in range(1, len(self._broker.scheduling.levels.table) + 1):
            offset, max_offset = offsets.get(level, (0, 0))
            metrics[f"scheduleMessageOffset_{level}"] = f"{offset},{max_offset}"
        return {name: str(value) for name, value in sorted(metrics.items())}

    def _pending_rows(self) -> int:
        counts = self._broker.schedule_statistics()
        pending = counts["tail_rows"] + counts["table_rows"] + counts.get("waiting_rows", 0)
        return pending - counts["cancelled_rows"]

    def _tps(self, count_name: str, current_rows: int) -> str:
        """Compute RocketMQ's three average rates of a count, in rows per second: over 10 s, a minute and 10 minutes.

        `count_name` is a field of `_Sample`, and `current_rows` the current value of that count.
        """
        now_ms, rates = self._context.monotonic_ms(), []
        for window_s in TPS_WINDOWS_S:
            begin_ms = now_ms - window_s * limits.SECOND_MS
            # The oldest sample of the window, or the newest one if all are older.
            sample = next(
                (sample for sample in self._samples if sample.monotonic_ms >= begin_ms), self._samples[-1]
            )
            elapsed_ms, rows = now_ms - sample.monotonic_ms, current_rows - getattr(sample, count_name)
            rates.append(rows * 1_000 / elapsed_ms if elapsed_ms > 0 else 0.0)
        return " ".join(f"{rate:.1f}" for rate in rates)

    def _view_stats(self, call: Call) -> Reply:
        """Serve VIEW_BROKER_STATS_DATA: a statistic over the last minute, hour and day."""
        fields = call.fields(_StatsFields)
        rates = self._broker.rates
        return call.answer_json(
            {
                "statsMinute": self._stats_item(fields, rates.minute),
                "statsHour": self._stats_item(fields, rates.hour),
                "statsDay": self._stats_item(fields, rates.day),
            }
        )

    def _stats_item(self, fields: _StatsFields, window: Window) -> dict[str, object]:
        """Build RocketMQ's BrokerStatsItem of a rate. Raises Refused if there is none yet."""
        rate = self._rate(fields, window)
        if rate is None:
            # RocketMQ's text. Tools interpret it as "no data yet".
            remark = f"The stats <{fields.stats_name}> <{fields.stats_key}> not exist"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        return {"sum": rate.sum, "tps": rate.per_second, "avgpt": rate.average_per_add}

    def _rate(self, fields: _StatsFields, window: Window) -> Rate | None:
        """Look up the rate of a statistic. None if it is unknown or has no values yet."""
        stat, key = fields.stats_name, fields.stats_key
        if stat not in STATS:
            return None
        if stat in _BROKER_STATS:
            if key != self._context.cluster_name:
                return None
            key = ""
        return self._broker.rates.rate(stat, key, window, self._context.monotonic_ms())

    def _config(self, call: Call) -> Reply:
        """Serve GET_BROKER_CONFIG: the settings, under RocketMQ's names and under Timeball's."""
        settings, context = self._broker.settings, self._context
        values = {
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
        lines = [f"{name}={text(value)}\n" for name, value in values.items()]
        return call.answer(body="".join(lines).encode(), ext={"version": '{"counter":0,"timestamp":0}'})

    def _update_config(self, call: Call) -> Reply:
        """Refuse UPDATE_BROKER_CONFIG, because settings are fixed when the broker starts."""
        raise Refused(
            ResponseCode.NO_PERMISSION,
            "the settings of a running Timeball do not change: stop it, and start it with other options",
        )

    def _delay_offsets(self, call: Call) -> Reply:
        """Serve GET_ALL_DELAY_OFFSET: the offset of each delay level."""
        levels = self._broker.scheduling.levels
        offsets = dict.fromkeys(range(1, len(levels.table) + 1), (0, 0)) | levels.offsets()
        return call.answer_json(
            {
                "dataVersion": data_version(0, self._started_ms),
                "offsetTable": {str(level): offset for level, (offset, _) in offsets.items()},
            }
        )


def first_store_ms(reader: LogReader) -> int | None:
    """Read the store time in ms of the oldest row in the log, None for an empty log. Runs in the reader thread."""
    try:
        _, rows = next(reader.frames(reader.first_seq, reader.first_seq + 1))
    except (StopIteration, OutOfRange):  # retention may delete it at this moment
        return None
    store_ms = rows.column("store_ms")[0].as_py()
    return None if store_ms is None else int(store_ms)


def _format_duration(ms: int) -> str:
    """Format a duration as RocketMQ does: [ 0 days, 0 hours, 0 minutes, 0 seconds ]."""
    seconds = max(0, ms) // 1_000
    days, seconds = divmod(seconds, 86_400)
    hours, seconds = divmod(seconds, 3_600)
    minutes, seconds = divmod(seconds, 60)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
