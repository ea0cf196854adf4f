"""The groups of a cluster in the pipeline: the user gives one address, and the pipeline reads all groups.

    grpc://a:7400               this broker; if it is in a cluster, all groups of the cluster
    grpc://a:7400,b:7400        the same, through any of these nodes that answers
    grpc://a:7400#g2            only the group g2, on any node; the option `group` produces this form

The status of a node lists the cluster's groups and the nodes of each (wire.Status.groups). So the next query sees a new
group. Each group is read from its leader: a follower forwards requests to it. Each group has its own row numbers, table
and versions, so a row number or version is meaningful only together with its group.

With one group, and with a broker that is in no cluster, users see nothing of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.model.wire import ClusterGroup, Status

GROUP = "group"  # the column, and the option
PLACEHOLDER = "{group}"  # replaced by the group's name in the URI of a table that each group has


class Group(NamedTuple):
    """One group, and the endpoint at which it is read. A broker that is in no cluster has the group name ""."""

    name: str
    endpoint: str


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into its addresses and the group that it is confined to: "" for all groups."""
    addresses, _, group = endpoint.partition("#")
    return addresses, group


def pin(endpoint: str, group: str) -> str:
    """Return the endpoint confined to one group."""
    return f"{split_endpoint(endpoint)[0]}#{group}"


def query_name(job: str, endpoint: str) -> str:
    """Return the name of a job's query. An endpoint confined to a group adds the group's name."""
    _, group = split_endpoint(endpoint)
    return f"{job}-{group}" if group else job


def known_groups(status: Status) -> list[ClusterGroup]:
    """Return the groups in a broker's status. Raises Unavailable while the broker has not read them yet."""
    if status.groups is None:
        raise Unavailable("the broker leads, and has not read yet which other groups there are; try again")
    return status.groups


def endpoint_of(endpoint: str, group: str, groups: Sequence[ClusterGroup]) -> str:
    """Return the endpoint of a group, with the addresses of all its nodes. Raises NotFound for an unknown group."""
    for each in groups:
        if each.group == group:
            scheme = endpoint.partition("://")[0]
            return f"{scheme}://{','.join(each.addresses)}#{group}"
    names = ", ".join(each.group for each in groups)
    there = f"there are {names}" if names else "this broker belongs to no cluster; leave the group out"
    raise NotFound(f"no group {group!r}: {there}")


def groups_of(status: Status, endpoint: str) -> list[Group]:
    """Return the groups to read at an endpoint, given the status of its broker. The broker's group comes first.

    If there is only one group, its endpoint is the address that the user gave.
    """
    addresses, confined = split_endpoint(endpoint)
    groups = known_groups(status)
    if confined:
        return [Group(confined, endpoint_of(endpoint, confined, groups))]
    if len(groups) < 2:
        return [Group(status.group, addresses)]
    names = sorted((each.group for each in groups), key=lambda name: (name != status.group, name))
    return [Group(name, endpoint_of(endpoint, name, groups)) for name in names]


def place_of(name: str, uri: str | None, group: str, groups: int) -> str | None:
    """Return the URI of a group's table, with `{group}` replaced. `name` is the option's name, for the error.

    Raises SetupError if there are several groups but no `{group}`: they would share one table.
    """
    if uri is None:
        return None
    if groups > 1 and PLACEHOLDER not in uri:
        raise SetupError(
            f"{name}={uri}: each of the {groups} groups has a table of its own; write {PLACEHOLDER} where the group's "
            "name shall stand"
        )
    return uri.replace(PLACEHOLDER, group)
