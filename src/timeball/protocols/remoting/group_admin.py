"""Consumer groups as tools manage them: configure, list, delete.

What a tool writes is saved before the answer. A group that is deleted while it has members comes back with
their next heartbeat, with the defaults; RocketMQ does the same.
"""

from __future__ import annotations

import msgspec

from timeball.broker.groups import SubscriptionGroup
from timeball.errors import InvalidMessage
from timeball.protocols.remoting.calls import Call, Handlers, Refused, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.tables import data_version
from timeball.protocols.remoting.site import Site


class _Named(msgspec.Struct, rename="camel"):
    group: str


class _Delete(msgspec.Struct, rename="camel"):
    group_name: str
    clean_offset: bool = False


class GroupAdmin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._broker = site.broker
        self._groups = site.broker.parts.groups

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._one,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
        }

    async def _update(self, call: Call) -> Reply:
        said = call.body(dict[str, msgspec.Raw])
        # Java leaves out what is null, other tools write it; either way it means the default.
        wanted = msgspec.json.encode({name: raw for name, raw in said.items() if bytes(raw) != b"null"})
        try:
            self._groups.update(msgspec.json.decode(wanted, type=SubscriptionGroup, strict=False))
        except (msgspec.ValidationError, InvalidMessage) as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, f"the group's configuration: {error}") from error
        await self._broker.save_groups()
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
        await self._broker.save_groups()
        return call.answer()
