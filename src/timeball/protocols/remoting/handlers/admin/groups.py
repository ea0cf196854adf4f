"""Consumer groups as tools manage them: configure, list, delete.

What a tool writes is saved before the answer. A group that is deleted while it has members comes back with
their next heartbeat, with the defaults; RocketMQ does the same.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.errors import InvalidMessage
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.tables import data_version
from timeball.protocols.remoting.site import Site


class _Named(msgspec.Struct, rename="camel"):
    group: str


class _Clone(msgspec.Struct, rename="camel"):
    src_group: str
    dest_group: str
    topic: str = ""
    offline: bool = False


class _Configs(msgspec.Struct, rename="camel"):
    group_config_list: list[dict[str, msgspec.Raw]] = []


class _Delete(msgspec.Struct, rename="camel"):
    group_name: str
    clean_offset: bool = False


class GroupAdmin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._broker, self._clients = site.broker, site.clients
        self._groups = site.broker.parts.groups

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._one,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RequestCode.CLONE_GROUP_OFFSET: self._clone_offsets,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._update_all(call, [call.body(dict[str, msgspec.Raw])])

    async def _update_list(self, call: Call) -> Reply:
        return await self._update_all(call, call.body(_Configs).group_config_list)

    async def _update_all(self, call: Call, said: list[dict[str, msgspec.Raw]]) -> Reply:
        """Configure groups: none of them when one cannot be read, those before it when one is refused later."""
        try:
            for group in [_group(one) for one in said]:
                self._groups.update(group)
        except (msgspec.ValidationError, InvalidMessage) as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, f"the group's configuration: {error}") from error
        finally:
            await self._broker.parts.writer.flushed()
        return call.answer()

    def _all(self, call: Call) -> Reply:
        return call.answer_json(
            {
                "dataVersion": data_version(self._groups.version, 0),
                "forbiddenTable": {},
                "subscriptionGroupTable": {group.group_name: group for group in self._groups.all()},
            }
        )

    def _one(self, call: Call) -> Reply:
        name = call.fields(_Named).group
        group = self._groups.find(name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] not exist")
        return call.answer_json(group)

    async def _delete(self, call: Call) -> Reply:
        said = call.fields(_Delete)
        self._groups.remove(said.group_name)
        if said.clean_offset:
            self._broker.parts.offsets.forget_group(said.group_name)
        await self._broker.parts.writer.flushed()
        return call.answer()

    async def _clone_offsets(self, call: Call) -> Reply:
        """A group gets the offsets of another, of one topic or of all that it reads."""
        said = call.fields(_Clone)
        offsets, topics = self._broker.parts.offsets, self._broker.parts.topics
        group = self._clients.consumers(said.src_group)
        for topic in [said.topic] if said.topic else offsets.topics_of(said.src_group):
            if topics.find(topic) is None:
                continue
            if group is not None and not said.offline and topic not in group.subscriptions:
                continue  # as RocketMQ: what is left of a subscription that its members have given up
            await self._broker.commit_offsets(said.dest_group, topic, offsets.get(said.src_group, topic))
        return call.answer()


def _group(said: dict[str, msgspec.Raw]) -> SubscriptionGroup:
    # Java leaves out what is null, other tools write it; either way it means the default.
    wanted = msgspec.json.encode({name: raw for name, raw in said.items() if bytes(raw) != b"null"})
    return msgspec.json.decode(wanted, type=SubscriptionGroup, strict=False)
