"""VIEW_BROKER_STATS_DATA: how many messages and bytes by topic and group, which exporters and consoles draw."""

from __future__ import annotations

import msgspec

from timeball.broker.rates import STATS, Rate, Stat, Window
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.site import Site

_OF_THE_BROKER = (
    Stat.BROKER_PUT_NUMS,
    Stat.BROKER_GET_NUMS,
)  # RocketMQ's key for these is the cluster's name


class _View(msgspec.Struct, rename="camel"):
    stats_name: str
    stats_key: str


class RateAdmin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._rates = site, site.broker.parts.rates
        self.sample()

    def handlers(self) -> Handlers:
        """Return the requests answered here."""
        return {RequestCode.VIEW_BROKER_STATS_DATA: self._view}

    def sample(self) -> None:
        """Let the counters know the time; called about once a second."""
        self._rates.sample(self._site.monotonic_ms())

    def _view(self, call: Call) -> Reply:
        asked = call.fields(_View)
        rates = self._rates
        return call.answer_json(
            {
                "statsMinute": self._words(asked, rates.minute),
                "statsHour": self._words(asked, rates.hour),
                "statsDay": self._words(asked, rates.day),
            }
        )

    def _words(self, asked: _View, window: Window) -> dict[str, object]:
        """RocketMQ's BrokerStatsItem."""
        found = self._rate(asked, window)
        if found is None:
            # RocketMQ's sentence; tools take it for "nothing yet".
            remark = f"The stats <{asked.stats_name}> <{asked.stats_key}> not exist"
            raise Refused(ResponseCode.SYSTEM_ERROR, remark)
        return {"sum": found.sum, "tps": found.per_second, "avgpt": found.per_time}

    def _rate(self, asked: _View, window: Window) -> Rate | None:
        stat, key = asked.stats_name, asked.stats_key
        if stat not in STATS:
            return None
        if stat in _OF_THE_BROKER:
            if key != self._site.cluster_name:
                return None
            key = ""
        return self._rates.rate(stat, key, window, self._site.monotonic_ms())
