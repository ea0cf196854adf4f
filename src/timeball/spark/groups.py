"""The groups of a cluster: the user gives one address, and the pipeline reads all groups.

    grpc://a:7400               this broker; if it is in a cluster, all groups of the cluster
    grpc://a:7400,b:7400        the same, through any of these nodes that answers
    grpc://a:7400#g2            only the group g2, on any node; the option `group` produces this form

The status of a node lists the cluster's groups and the nodes of each (wire.Status.groups), so each query includes
groups that were added since the last one. Each group is read from its leader, to which followers forward requests. Each
group has its own row numbers, table and versions, so a row number or version is meaningful only together with its
group.

If there is only one group, or if the broker is in no cluster, groups appear neither in columns nor in names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.model.wire import ClusterGroup, Status

GROUP = "group"  # name of the column and of the option
PLACEHOLDER = "{group}"  # replaced by the group's name in the URI of a table that each group has


class Group(NamedTuple):
    """A group, and the endpoint at which it is read. The name is "" for a broker that is in no cluster."""

    name: str
    endpoint: str


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into its addresses and the group that it is pinned to, which is "" for all groups."""
    addresses, _, group = endpoint.partition("#")
    return addresses, group


def pin_to_group(endpoint: str, group: str) -> str:
    """Pin an endpoint to one group."""
    return f"{split_endpoint(endpoint)[0]}#{group}"


def query_name(job: str, endpoint: str) -> str:
    """Build the name of a job's query. It includes the group if the endpoint is pinned to one."""
    _, group = split_endpoint(endpoint)
    return f"{job}-{group}" if group else job


def known_groups(status: Status) -> list[ClusterGroup]:
    """Get the groups from a broker's status. Raises Unavailable while a new leader has not read them yet."""
    if status.groups is None:
        raise Unavailable("the broker leads, and has not read yet which other groups there are; try again")
    return status.groups


def endpoint_of(endpoint: str, group: str, groups: Sequence[ClusterGroup]) -> str:
    """Build the endpoint of a group, with the addresses of all its nodes. Raises NotFound for an unknown group."""
    for known in groups:
        if known.group == group:
            scheme = endpoint.partition("://")[0]
            return f"{scheme}://{','.join(known.addresses)}#{group}"
    names = ", ".join(known.group for known in groups)
    available = f"there are {names}" if names else "this broker belongs to no cluster; leave the group out"
    raise NotFound(f"no group {group!r}: {available}")


def groups_of(status: Status, endpoint: str) -> list[Group]:
    """List the groups to read at an endpoint, given the status of its broker. The broker's own group comes first.

    If there is only one group, its endpoint is the address that the user gave.
    """
    addresses, pinned_group = split_endpoint(endpoint)
    groups = known_groups(status)
    if pinned_group:
        return [Group(pinned_group, endpoint_of(endpoint, pinned_group, groups))]
    if len(groups) < 2:
        return [Group(status.group, addresses)]
    names = sorted((known.group for known in groups), key=lambda name: (name != status.group, name))
    return [Group(name, endpoint_of(endpoint, name, groups)) for name in names]


def group_table_uri(name: str, uri: str | None, group: str, groups: int) -> str | None:
    """Replace `{group}` in the URI of a table by the name of the group. Returns None if there is no URI.

    `groups`: the number of groups. `name`: the option that contains the URI, for the error. Raises SetupError if there
    are several groups but no `{group}` in the URI, because they would share one table.
    """
    if uri is None:
        return None
    if groups > 1 and PLACEHOLDER not in uri:
        raise SetupError(
            f"{name}={uri}: each of the {groups} groups has a table of its own; write {PLACEHOLDER} in place of "
            "the group's name"
        )
    return uri.replace(PLACEHOLDER, group)
