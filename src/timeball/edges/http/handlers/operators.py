"""Information for operators and their tools: the broker, the cluster, jobs, topics, metrics and health."""

from __future__ import annotations

from collections.abc import Callable

from timeball.broker.registry.rates import shares
from timeball.broker.service import Broker
from timeball.edges.http import codec
from timeball.edges.http.answers_codec import Health, Jobs, Leads, ReplicaGroups, TopicDeleted, TopicSize
from timeball.edges.http.problems import Answer
from timeball.edges.http.requests import Call, Paths, read_request
from timeball.model.access import Caller, Verb
from timeball.model.errors import NotFound, Unavailable
from timeball.monitoring.metrics import CONTENT_TYPE, Metrics

# returns the figures of the broker and its process; raises Forbidden for a caller who may not see them
Status = Callable[[Caller], dict[str, object]]


class Operators:
    """Serves the paths for operators, monitoring and load balancers. Belongs to the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, status: Status) -> None:
        self._broker, self._metrics, self._status = broker, metrics, status
        self.paths: Paths = {
            "/metrics": {"GET": self._get_metrics},
            "/v1/broker": {"GET": self._get_broker},
            "/v1/cluster": {"GET": self._get_cluster},
            "/v1/jobs": {"GET": self._get_jobs},
            "/v1/topics": {"GET": self._list_topics},
            "/v1/topics/{topic}": {"PUT": self._create_topic, "DELETE": self._delete_topic},
        }
        self.open_paths: Paths = {
            "/health/live": {"GET": self._check_live},
            "/health/ready": {"GET": self._check_ready},
            "/leader/{group}": {"GET": self._check_leader},
        }

    async def _get_broker(self, call: Call) -> Answer:
        """Show the figures of the broker, and whether the caller may administer."""
        may_admin = self._broker.policy.allows(call.caller, Verb.ADMIN)
        return Answer(200, {**self._status(call.caller), "may_admin": may_admin})

    async def _get_cluster(self, call: Call) -> Answer:
        self._broker.policy.allow(call.caller, Verb.LOOK)
        if self._metrics.replica is None:
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        return Answer(200, ReplicaGroups(await self._metrics.replica.survey()))

    async def _list_topics(self, call: Call) -> Answer:
        """List the topics with their numbers of queues and messages."""
        topics = []
        async for names in shares(sorted(self._broker.topics(call.caller))):
            for topic in filter(
                None, map(self._broker.tables.topics.find_topic, names)
            ):  # None if the topic was deleted meanwhile
                ranges = self._broker.queues(topic.name, call.caller).values()
                rows = sum(end - begin for begin, end in ranges)
                topics.append(codec.Topic(topic.name, len(ranges), rows))
        return Answer(200, codec.Topics(topics))

    async def _create_topic(self, call: Call) -> Answer:
        request: codec.TopicMade = await read_request(call, codec.TopicMade, self._broker.policy, Verb.ADMIN)
        await self._broker.create_topic(call.path["topic"], request.queues, call.caller)
        queues = self._broker.queues(call.path["topic"], call.caller)
        return Answer(200, TopicSize(call.path["topic"], len(queues)))

    async def _delete_topic(self, call: Call) -> Answer:
        name = call.path["topic"]
        deleted = await self._broker.administration.delete_topic(name, call.caller)
        if deleted is None:
            raise NotFound(f"topic {name!r} does not exist")
        return Answer(200, TopicDeleted(name, deleted.unread, deleted.dead_letters, deleted.pending))

    async def _get_jobs(self, call: Call) -> Answer:
        jobs, audit = await self._broker.job_reports.all(call.caller)
        return Answer(200, Jobs(jobs, audit))

    async def _get_metrics(self, call: Call) -> Answer:
        return Answer(200, await self._metrics.text(call.caller), media_type=CONTENT_TYPE)

    async def _check_live(self, call: Call) -> Answer:
        return Answer(200, Health("live"))

    async def _check_leader(self, call: Call) -> Answer:
        """Answer 200 on the leader of the group, and 503 on its followers, for load balancers."""
        figures = self._metrics.replica.figures() if self._metrics.replica is not None else None
        if figures is None or figures.group != call.path["group"]:
            raise NotFound("this node keeps no group of this name")
        status = 200 if figures.role == "leader" else 503
        return Answer(status, Leads(figures.group, figures.leader, figures.role))

    async def _check_ready(self, call: Call) -> Answer:
        """Answer 200 if the broker accepts messages. Raises Unavailable."""
        writer = self._broker.log.writer
        if writer.failed is not None:
            raise Unavailable("the log has stopped: see the broker's log")
        if writer.no_room:
            raise Unavailable("disk full: free some space, the broker goes on by itself")
        return Answer(200, Health("ready"))
