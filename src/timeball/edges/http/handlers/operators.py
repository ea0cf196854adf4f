"""Requests of operators and their tools: the broker, topics, groups, the cluster, campaigns and push subscriptions."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from timeball.broker.consuming.dead_letters import Pace
from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.registry.push_subscriptions import TIMEOUT_MS, FilterKind, PushSubscription
from timeball.broker.registry.rates import GROUPS_AT_ONCE, shares
from timeball.broker.revoking.group_questions import AnyQuestion
from timeball.broker.service import Broker
from timeball.broker.virtual_time import VirtualTime
from timeball.edges.http import answers_codec, codec
from timeball.edges.http.answers_codec import (
    Health,
    Jobs,
    Leads,
    ReplicaGroups,
    SubscriptionDeleted,
    TopicDeleted,
    TopicSize,
)
from timeball.edges.http.codec import Answer
from timeball.edges.http.requests import (
    Call,
    Handler,
    Paths,
    check_no_body,
    parse_count,
    parse_group,
    read_request,
)
from timeball.model import http_api, limits, time_parsing
from timeball.model.access import Caller, Verb
from timeball.model.answers import CampaignChange, QueueRange
from timeball.model.errors import InvalidMessage, NotFound, NotLeader, OutOfRange, Unavailable
from timeball.model.http_api import GroupOffsets, TopicQueues
from timeball.monitoring.figures import PushFigures
from timeball.monitoring.metrics import CONTENT_TYPE, Metrics

# ---- the broker, the cluster, jobs, topics, metrics and health -----------------------------------------------

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
            "/v1/topics/{topic}": {
                "GET": self._get_queues,
                "PUT": self._create_topic,
                "DELETE": self._delete_topic,
            },
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
        """Show the groups of the cluster. Raises NotFound without a cluster."""
        self._broker.policy.allow(call.caller, Verb.LOOK)
        if self._metrics.replica is None:
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        return Answer(200, ReplicaGroups(await self._metrics.replica.survey()))

    async def _list_topics(self, call: Call) -> Answer:
        """List the topics with their numbers of queues and messages."""
        all_topics = self._broker.tables.topics
        # A single sort and a single encoding of a hundred thousand topics would hold the loop for a tenth of a second.
        sorted_shares = [
            sorted(self._broker.topics(call.caller, share)) async for share in shares(all_topics.all())
        ]
        names, encoded = heapq.merge(*sorted_shares), list[bytes]()
        while share := list(itertools.islice(names, GROUPS_AT_ONCE)):
            await asyncio.sleep(0)  # lets the event loop do its other work
            topics = list[http_api.Topic]()
            for topic in filter(None, map(all_topics.find_topic, share)):  # None if it was deleted meanwhile
                ranges = self._broker.queues(topic.name, call.caller).values()
                rows = sum(end - begin for begin, end in ranges)
                topics.append(http_api.Topic(topic.name, len(ranges), rows))
            encoded += map(codec.encode, topics)
        return Answer(200, b'{"topics":[%b]}' % b",".join(encoded))

    async def _get_queues(self, call: Call) -> Answer:
        """Show the offsets of each queue of a topic, its rate limit, and how many due messages wait for that limit."""
        ranges = self._broker.queues(call.path["topic"], call.caller)
        queues = {number: QueueRange(low, high) for number, (low, high) in ranges.items()}
        name = call.path["topic"]
        rate = self._broker.tables.topics.get(name).max_per_second
        return Answer(200, TopicQueues(name, queues, rate, self._broker.pacing.held().get(name, 0)))

    async def _create_topic(self, call: Call) -> Answer:
        """Create a topic or change its settings, and answer with its number of queues."""
        request: http_api.TopicMade = await read_request(
            call, http_api.TopicMade, self._broker.policy, Verb.ADMIN
        )
        await self._broker.create_topic(
            call.path["topic"], request.queues, call.caller, request.on_pending, request.max_per_second
        )
        queues = self._broker.queues(call.path["topic"], call.caller)
        return Answer(200, TopicSize(call.path["topic"], len(queues)))

    async def _delete_topic(self, call: Call) -> Answer:
        """Delete a topic, and answer with the numbers of its messages. Raises NotFound."""
        name = call.path["topic"]
        deletion = await self._broker.administration.delete_topic(name, call.caller)
        if deletion is None:
            raise NotFound(f"topic {name!r} does not exist")
        return Answer(200, TopicDeleted(name, deletion.unread, deletion.dead_letters, deletion.pending))

    async def _get_jobs(self, call: Call) -> Answer:
        jobs, audit = await self._broker.job_reports.all(call.caller)
        return Answer(200, Jobs(jobs, audit))

    async def _get_metrics(self, call: Call) -> Answer:
        return Answer(200, await self._metrics.text(call.caller), media_type=CONTENT_TYPE)

    async def _check_live(self, call: Call) -> Answer:
        return Answer(200, Health("live"))

    async def _check_leader(self, call: Call) -> Answer:
        """Answer 200 on the leader of the group, and 503 on its followers, for load balancers. Raises NotFound."""
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


# ---- a manual clock ------------------------------------------------------------------------------------------

RELEASED_ROWS_MAX = 1_000  # in one answer


class ManualTime:
    """Serves the paths of a manual clock. They exist only with --clock manual. Belongs to the event loop."""

    def __init__(self, broker: Broker, time: VirtualTime) -> None:
        self._broker, self._time = broker, time
        self.paths: Paths = {
            "/v1/clock": {"GET": self._get},
            "/v1/clock/advance": {"POST": self._advance},
        }

    async def _get(self, call: Call) -> Answer:
        self._broker.policy.allow(call.caller, Verb.LOOK)
        return Answer(200, answers_codec.clock_answer(self._time.now_ms))

    async def _advance(self, call: Call) -> Answer:
        """Advance the clock step by step to a time, and list the first messages that were released on the way.

        Raises InvalidMessage unless the request names one time, and the errors of `read_request`.
        """
        request: codec.Moving = await read_request(call, codec.Moving, self._broker.policy, Verb.ADMIN)
        due_ms, delay_ms = codec.due_and_delay_ms(request.at, request.after)
        if due_ms is None and delay_ms is None:
            raise InvalidMessage("give one of at and after")
        target_ms = due_ms if due_ms is not None else self._time.now_ms + (delay_ms or 0)
        messages: list[answers_codec.ReleasedMessage] = []
        released_rows, is_last = 0, False
        while not is_last:
            step = await self._time.step(target_ms)
            is_last = step.is_last
            for rows in step.released:
                released_rows += rows.num_rows
                messages += answers_codec.released_messages(rows.slice(0, RELEASED_ROWS_MAX - len(messages)))
        return Answer(200, answers_codec.clock_answer(step.now_ms, released_rows, messages))


# ---- consumer groups, and their dead letters -----------------------------------------------------------------

DEAD_LETTERS_PER_PAGE = 50


class Groups:
    """Serves the paths of consumer groups. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        dead_letters_path = "/v1/groups/{group}/dead-letters"
        self.paths: Paths = {
            "/v1/groups": {"GET": self._list},
            "/v1/groups/{group}": {"GET": self._get_group, "PUT": self._limit_group},
            "/v1/topics/{topic}/offsets": {"GET": self._get_offsets, "PUT": self._commit_offsets},
            dead_letters_path: {"GET": self._list_dead_letters},
            f"{dead_letters_path}/resend": {"POST": self._resend_dead_letters},
            f"{dead_letters_path}/delete": {"POST": self._delete_dead_letters},
        }

    async def _list(self, call: Call) -> Answer:
        rows = parse_count(call, "max", limits.LISTED_ROWS_MAX, limits.LISTED_ROWS_MAX)
        page = await self._broker.groups.page(rows, call.query.get("page"), call.caller)
        return Answer(200, http_api.Groups(page.groups, page.next_page))

    async def _get_group(self, call: Call) -> Answer:
        return Answer(200, await self._broker.groups.one(call.path["group"], call.caller))

    async def _limit_group(self, call: Call) -> Answer:
        """Limit how many messages with the same key the group may have leased at the same time."""
        request: http_api.GroupLimits = await read_request(
            call, http_api.GroupLimits, self._broker.policy, Verb.ADMIN
        )
        await self._broker.administration.limit_keys(call.path["group"], request.max_per_key, call.caller)
        return Answer(200, request)

    async def _get_offsets(self, call: Call) -> Answer:
        """Show the offsets that a group has committed in a topic."""
        topic, group = call.path["topic"], parse_group(call)
        offsets = self._broker.offsets(group, topic, call.caller)
        self._broker.policy.check_known(topic, has_messages=bool(offsets))
        return Answer(200, GroupOffsets(group, topic, offsets))

    async def _commit_offsets(self, call: Call) -> Answer:
        """Commit offsets of a group by queue, and answer with all its offsets in the topic.

        Raises OutOfRange for an invalid queue or offset, NotFound, and the errors of `read_request`.
        """
        topic, group = call.path["topic"], parse_group(call)
        request: http_api.Committing = await read_request(
            call, http_api.Committing, self._broker.policy, Verb.RECEIVE, topic=topic, group=group
        )
        if len(request.offsets) > limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(
                f"offsets of {len(request.offsets)} queues: a topic has at most {limits.QUEUES_PER_TOPIC_MAX}"
            )
        if any(number < 0 for pair in request.offsets.items() for number in pair):
            raise OutOfRange("queues and offsets are not negative")
        await self._broker.commit_offsets(group, topic, request.offsets, call.caller)
        return Answer(200, GroupOffsets(group, topic, self._broker.offsets(group, topic, call.caller)))

    async def _list_dead_letters(self, call: Call) -> Answer:
        """Show a page of the group's dead letters."""
        rows = parse_count(call, "max", DEAD_LETTERS_PER_PAGE, limits.DEAD_LETTERS_PER_REQUEST_MAX)
        page = await self._broker.dead_letters.page(
            call.path["group"], rows, call.query.get("page"), call.caller
        )
        size_bytes = sum(len(dead_letter.body) for dead_letter in page.dead_letters)
        return Answer(200, answers_codec.show_dead_letters(page), size_bytes=size_bytes)

    async def _resend_dead_letters(self, call: Call) -> Answer:
        """Send dead letters again: the named dead letters, or all, if they meet the condition `where`."""
        request: http_api.Resolving = await read_request(
            call, http_api.Resolving, self._broker.policy, Verb.ADMIN
        )
        handles = _dead_letter_handles(request)
        after_ms = 0 if request.after is None else time_parsing.delay_ms(request.after)
        result = await self._broker.dead_letters.resend(
            call.path["group"], handles, call.caller, Pace(after_ms, request.rate), request.where
        )
        return Answer(200, answers_codec.show_outcomes(handles or [], result.found, result.rows, "resent"))

    async def _delete_dead_letters(self, call: Call) -> Answer:
        """Delete the dead letters that are named, or all dead letters of the group.

        Raises InvalidMessage for fields of a resend, OutOfRange, and the errors of `read_request`.
        """
        request: http_api.Resolving = await read_request(
            call, http_api.Resolving, self._broker.policy, Verb.ADMIN
        )
        handles = _dead_letter_handles(request)
        if request.after is not None or request.rate is not None or request.where:
            raise InvalidMessage("after, rate and where: only for a resend")
        result = await self._broker.dead_letters.delete(call.path["group"], handles, call.caller)
        return Answer(200, answers_codec.show_outcomes(handles or [], result.found, result.rows, "deleted"))


def _dead_letter_handles(request: http_api.Resolving) -> list[str] | None:
    """Extract the handles of dead letters from a request, None for all. Raises InvalidMessage and OutOfRange."""
    if (request.dead_letters is None) != request.all:
        raise InvalidMessage('name "dead_letters", or "all": true')
    handles_max = limits.DEAD_LETTERS_PER_REQUEST_MAX
    if request.dead_letters is not None and len(request.dead_letters) > handles_max:
        raise OutOfRange(f"{len(request.dead_letters)} dead letters: at most {handles_max} in one request")
    return request.dead_letters


# ---- requests from nodes of other cluster groups -------------------------------------------------------------
# They are answered from this group's log, and never forwarded.


class GroupQuestions:
    """Serves the requests that other nodes make on behalf of their callers. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.paths: Paths = {"/v1/cluster/{group}": {"POST": self._answer}}

    async def _answer(self, call: Call) -> Answer:
        """Answer a request of another node, if this node leads the requested group. Raises NotFound and NotLeader."""
        broker, group = self._broker, call.path["group"]
        if not isinstance(broker, GroupedBroker):
            raise NotFound("this broker belongs to no cluster: it was started without --cluster")
        if group != broker.group:
            # The asking node has an outdated directory of the groups. An answer from this group would lack the messages
            # that it asked for.
            raise NotLeader(f"this node leads group {broker.group}, and not {group}")
        question: AnyQuestion = await read_request(
            call,
            AnyQuestion,  # type: ignore[arg-type]
            broker.policy,
            Verb.LOOK,
        )
        return Answer(200, await broker.answer(question, call.caller))


# ---- campaigns -----------------------------------------------------------------------------------------------
# A campaign is a bulk write. Spark plans it, and operators can show, pause, resume and cancel it.


class Campaigns:
    """Serves the paths of campaigns, to accounts that may administer. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        campaign_path = "/v1/campaigns/{campaign}"
        self.paths: Paths = {
            "/v1/campaigns": {"GET": self._list},
            campaign_path: {"GET": self._get_campaign},
            f"{campaign_path}/pause": {"POST": self._handler_for("pause")},
            f"{campaign_path}/resume": {"POST": self._resume},
            f"{campaign_path}/cancel": {"POST": self._handler_for("cancel")},
        }

    async def _list(self, call: Call) -> Answer:
        campaigns = self._broker.campaigns(caller=call.caller)
        return Answer(
            200, answers_codec.Campaigns([answers_codec.show_campaign(campaign) for campaign in campaigns])
        )

    async def _get_campaign(self, call: Call) -> Answer:
        (campaign,) = self._broker.campaigns(call.path["campaign"], call.caller)
        return Answer(200, answers_codec.show_campaign(campaign))

    def _handler_for(self, change: CampaignChange) -> Handler:
        """Build the handler for a change that has no arguments in its body."""

        async def handle(call: Call) -> Answer:
            await read_request(call, codec.Nothing, self._broker.policy, Verb.ADMIN)
            return await self._change(call, change)

        return handle

    async def _resume(self, call: Call) -> Answer:
        request: codec.Resuming = await read_request(call, codec.Resuming, self._broker.policy, Verb.ADMIN)
        return await self._change(call, "resume", shift=request.shift)

    async def _change(self, call: Call, change: CampaignChange, *, shift: bool = False) -> Answer:
        """Change a campaign, and answer with its new state. `shift`: see codec.Resuming."""
        campaign = call.path["campaign"]
        return Answer(
            200,
            answers_codec.show_campaign(
                await self._broker.change_campaign(campaign, change, shift=shift, caller=call.caller)
            ),
        )


# ---- push subscriptions --------------------------------------------------------------------------------------
# The push edge delivers their messages.

SubscriptionState = Literal["delivering", "failing", "paused", "gone"]


class Subscribing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A subscription to create or to replace. `rotate_secret` replaces the secret of an existing subscription."""

    topic: str
    group: str
    url: str
    filter: str = "*"
    filter_type: FilterKind = "tag"
    in_flight_max: int = 16
    rate_per_s: float | None = None
    timeout: str = f"{TIMEOUT_MS}ms"
    rotate_secret: bool = False

    def to_subscription(self) -> PushSubscription:
        """Convert the request to the broker's type. Raises InvalidDelay."""
        return PushSubscription(
            topic=self.topic,
            group=self.group,
            url=self.url,
            filter=self.filter,
            filter_type=self.filter_type,
            in_flight_max=self.in_flight_max,
            rate_per_s=self.rate_per_s,
            timeout_ms=time_parsing.delay_ms(self.timeout, "timeout"),
        )


class Subscribed(msgspec.Struct, kw_only=True):
    """A subscription, and its figures since the broker's start. `secret` is only shown when it is created."""

    name: str
    topic: str
    group: str
    url: str
    filter: str
    filter_type: FilterKind
    in_flight_max: int
    rate_per_s: float | None
    timeout: str
    state: SubscriptionState
    in_flight: int = 0
    delivered: int = 0  # requests with an answer 2xx
    failed: int = 0  # requests without an answer 2xx
    failures_in_row: int = 0
    last_failure: str | None = None
    secret: str | msgspec.UnsetType = msgspec.UNSET


class SubscribedMany(msgspec.Struct):
    """Subscriptions, ordered by name."""

    subscriptions: list[Subscribed]


class Subscriptions:
    """Serves the paths of push subscriptions: create, change, show, pause, resume, delete.

    Belongs to the event loop.
    """

    def __init__(self, broker: Broker, figures: Mapping[str, PushFigures]) -> None:
        self._push, self._policy, self._figures = broker.push, broker.policy, figures
        subscription_path = "/v1/subscriptions/{name}"
        self.paths: Paths = {
            "/v1/subscriptions": {"GET": self._list},
            subscription_path: {"GET": self._get, "PUT": self._put, "DELETE": self._delete},
            f"{subscription_path}/pause": {"POST": self._pause},
            f"{subscription_path}/resume": {"POST": self._resume},
        }

    async def _list(self, call: Call) -> Answer:
        subscriptions = self._push.all(call.caller)
        return Answer(
            200,
            SubscribedMany(
                [
                    show_subscription(name, subscription, self._figures.get(name))
                    for name, subscription in subscriptions.items()
                ]
            ),
        )

    async def _get(self, call: Call) -> Answer:
        return self._show(call, self._push.get(call.path["name"], call.caller))

    async def _put(self, call: Call) -> Answer:
        """Create or replace a subscription. A new one is answered with 201 and its secret."""
        name = call.path["name"]
        request: Subscribing = await read_request(call, Subscribing, self._policy, Verb.ADMIN)
        result = await self._push.put(
            name, request.to_subscription(), call.caller, rotates=request.rotate_secret
        )
        answer = show_subscription(name, result.subscription, self._figures.get(name), result.secret)
        return Answer(201 if result.is_new else 200, answer)

    async def _delete(self, call: Call) -> Answer:
        await self._push.delete(call.path["name"], call.caller)
        return Answer(200, SubscriptionDeleted(call.path["name"]))

    async def _pause(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._show(call, await self._push.pause(call.path["name"], call.caller))

    async def _resume(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.ADMIN)
        return self._show(call, await self._push.resume(call.path["name"], call.caller))

    def _show(self, call: Call, subscription: PushSubscription) -> Answer:
        name = call.path["name"]
        return Answer(200, show_subscription(name, subscription, self._figures.get(name)))


def show_subscription(
    name: str, subscription: PushSubscription, figures: PushFigures | None, secret: str | None = None
) -> Subscribed:
    """Build the answer that shows a subscription and its state. `figures` None: nothing was sent yet."""
    state: SubscriptionState = "delivering"
    if subscription.paused:
        state = "gone" if subscription.paused_by == "receiver" else "paused"
    elif figures is not None and figures.is_held:
        state = "failing"
    return Subscribed(
        name=name, topic=subscription.topic, group=subscription.group, url=subscription.url,
        filter=subscription.filter, filter_type=subscription.filter_type,
        in_flight_max=subscription.in_flight_max, rate_per_s=subscription.rate_per_s,
        timeout=_format_timeout(subscription.timeout_ms), state=state,
        in_flight=figures.in_flight if figures is not None else 0,
        delivered=figures.delivered if figures is not None else 0,
        failed=figures.failed if figures is not None else 0,
        failures_in_row=figures.failures if figures is not None else 0,
        last_failure=(figures.last_failure or None) if figures is not None else None,
        secret=msgspec.UNSET if secret is None else secret,
    )  # fmt: skip


def _format_timeout(timeout_ms: int) -> str:
    return f"{timeout_ms}ms" if timeout_ms % 1_000 else f"{timeout_ms // 1_000}s"
