"""The groups of a cluster, as the pipeline reads them: one address is named, and all groups are read.

    grpc://a:7400               the broker there; of a cluster, all its groups
    grpc://a:7400,b:7400        the same, through whichever of these nodes answers
    grpc://a:7400#g2            one group alone, wherever it is led; what the option `group` makes of an endpoint

A node of a cluster says which groups there are and which nodes keep each (wire.Status.groups). So a group that is added
is seen by the next look, and each group is read from its own leader; a node that follows forwards to it. Numbers of
rows, table and versions are a group's own: what names one must name its group as well.

With one group, and with a broker that is in no cluster, everything is as if there were no groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from timeball.errors import NotFound, SetupError, Unavailable
from timeball.wire import ClusterGroup, Status

GROUP = "group"  # the column, and the option
PLACEHOLDER = "{group}"  # in the URI of a table that each group has one of


class Group(NamedTuple):
    """One group, and the endpoint at which it is read. A broker that is in no cluster is a group without a name."""

    name: str
    endpoint: str


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return the addresses of an endpoint, and the group that it is confined to: empty for all."""
    addresses, _, group = endpoint.partition("#")
    return addresses, group


def pin(endpoint: str, group: str) -> str:
    """Return the endpoint confined to one group."""
    return f"{split_endpoint(endpoint)[0]}#{group}"


def query_name(job: str, endpoint: str) -> str:
    """Return the name of a job's query: each group that has one of its own has another name."""
    _, group = split_endpoint(endpoint)
    return f"{job}-{group}" if group else job


def known_groups(status: Status) -> list[ClusterGroup]:
    """Return the groups that a broker names; raise Unavailable while it does not know them."""
    if status.groups is None:
        raise Unavailable("the broker leads, and has not read yet which other groups there are; try again")
    return status.groups


def endpoint_of(endpoint: str, group: str, groups: Sequence[ClusterGroup]) -> str:
    """Return the endpoint of a group: all nodes that keep it; raise NotFound for one that is not there."""
    for each in groups:
        if each.group == group:
            scheme = endpoint.partition("://")[0]
            return f"{scheme}://{','.join(each.addresses)}#{group}"
    names = ", ".join(each.group for each in groups)
    there = f"there are {names}" if names else "this broker belongs to no cluster; leave the group out"
    raise NotFound(f"no group {group!r}: {there}")


def groups_of(status: Status, endpoint: str) -> list[Group]:
    """Return the groups to be read at an endpoint whose broker answers this, its own group first.

    One group that is all there is, is read as it was named.
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
    """Return the URI of a group's table, `{group}` replaced; raise SetupError where `groups` would share one.

    `name`: of the option, for the error.
    """
    if uri is None:
        return None
    if groups > 1 and PLACEHOLDER not in uri:
        raise SetupError(
            f"{name}={uri}: each of the {groups} groups has a table of its own; write {PLACEHOLDER} where the group's "
            "name shall stand"
        )
    return uri.replace(PLACEHOLDER, group)
