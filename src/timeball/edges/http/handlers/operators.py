"""Information for people and their tools: the broker, the cluster, jobs, topics, metrics and health."""

from __future__ import annotations

from collections.abc import Callable

from timeball.broker.registry.rates import shares
from timeball.broker.service import Broker
from timeball.edges.http import codec
from timeball.edges.http.answers_codec import Health, Jobs, Leads, ReplicaGroups, TopicDeleted, TopicSize
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, read
from timeball.model.access import Caller, Verb
from timeball.model.errors import NotFound, Unavailable
from timeball.monitoring.metrics import CONTENT_TYPE, Metrics

# Returns the figures of the broker and its process, for a caller who may look.
Status = Callable[[Caller], dict[str, object]]


class Operators:
    """Serves this information. Belongs to the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status) -> None:
        self._broker, self._metrics, self._status = broker, metrics, status
        self.paths: Paths = {
            "/metrics": {"GET": self._measure},
            "/v1/broker": {"GET": self._look},
            "/v1/cluster": {"GET": self._survey},
            "/v1/jobs": {"GET": self._jobs},
            "/v1/topics": {"GET": self._topics},
            "/v1/topics/{topic}": {"PUT": self._create_topic, "DELETE": self._delete_topic},
        }
        self.open_paths: Paths = {
            "/health/live": {"GET": self._live},
            "/health/ready": {"GET": self._ready},
            "/leader/{group}": {"GET": self._leads},
        }

    async def _look(self, call: Call) -> Answer:
        may_admin = self._broker.policy.allows(call.caller, Verb.ADMIN)
        return Answer(200, {**self._status(call.caller), "may_admin": may_admin})

    async def _survey(self, call: Call) -> Answer:
        self._broker.policy.allow(call.caller, Verb.LOOK)
        if self._metrics.replica is None:
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        return Answer(200, ReplicaGroups(await self._metrics.replica.survey()))

    async def _topics(self, call: Call) -> Answer:
        found = []
        async for names in shares(sorted(self._broker.topics(call.caller))):
            for topic in filter(
                None, map(self._broker.tables.topics.find_topic, names)
            ):  # None if the topic was deleted meanwhile
                ranges = self._broker.queues(topic.name, call.caller).values()
                rows = sum(end - begin for begin, end in ranges)
                found.append(codec.Topic(topic.name, len(ranges), rows))
        return Answer(200, codec.Topics(found))

    async def _create_topic(self, call: Call) -> Answer:
        request: codec.TopicMade = await read(call, codec.TopicMade, self._broker.policy, Verb.ADMIN)
        await self._broker.create_topic(call.path["topic"], request.queues, call.caller)
        queues = self._broker.queues(call.path["topic"], call.caller)
        return Answer(200, TopicSize(call.path["topic"], len(queues)))

    async def _delete_topic(self, call: Call) -> Answer:
        name = call.path["topic"]
        removed = await self._broker.administration.delete_topic(name, call.caller)
        if removed is None:
            raise NotFound(f"topic {name!r} does not exist")
        return Answer(200, TopicDeleted(name, removed.unread, removed.dead_letters, removed.pending))

    async def _jobs(self, call: Call) -> Answer:
        jobs, audit = await self._broker.job_reports.all(call.caller)
        return Answer(200, Jobs(jobs, audit))

    async def _measure(self, call: Call) -> Answer:
        return Answer(200, await self._metrics.text(call.caller), media_type=CONTENT_TYPE)

    async def _live(self, call: Call) -> Answer:
        return Answer(200, Health("live"))

    async def _leads(self, call: Call) -> Answer:
        figures = self._metrics.replica.figures() if self._metrics.replica is not None else None
        if figures is None or figures.group != call.path["group"]:
            raise NotFound("this node keeps no group of this name")
        status = 200 if figures.role == "leader" else 503
        return Answer(status, Leads(figures.group, figures.leader, figures.role))

    async def _ready(self, call: Call) -> Answer:
        writer = self._broker.log.writer
        if writer.failed is not None:
            raise Unavailable("the log has stopped: see the broker's log")
        if writer.no_room:
            raise Unavailable("disk full: free some space, the broker goes on by itself")
        return Answer(200, Health("ready"))
