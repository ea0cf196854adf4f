"""Who consumes which queues, when the broker is asked to decide (QUERY_ASSIGNMENT). Pure: RocketMQ's rules.

A group that pulls divides the queues among its members, as its clients would do themselves. A group that pops
needs no division: each member asks for "any queue", or for its own share and that of the next few members.
"""

from __future__ import annotations

ANY_QUEUE = -1


def averagely(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """AVG: neighbouring queues, the first clients one more."""
    at, (each, more) = client_ids.index(client_id), divmod(len(queue_ids), len(client_ids))
    begin = at * each + min(at, more)
    return queue_ids[begin : begin + each + (at < more)]


def by_circle(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """AVG_BY_CIRCLE: every n-th queue."""
    return queue_ids[client_ids.index(client_id) :: len(client_ids)]


STRATEGIES = {"AVG": averagely, "AVG_BY_CIRCLE": by_circle}


def assign(
    client_id: str, queue_ids: list[int], client_ids: list[str], *, strategy: str, pops: bool, share_with: int
) -> list[int] | None:
    """The queues of one member; None when that cannot be said: the client then goes on as before.

    `share_with`: a popping member also gets the queues of so many members after it; 0: it pops from any queue.
    """
    allocate, members = STRATEGIES.get(strategy), sorted(set(client_ids))
    if allocate is None or not members or not queue_ids:
        return None
    if pops and share_with <= 0:
        return [ANY_QUEUE]
    if client_id not in members:
        return []
    at = members.index(client_id)
    if not pops:
        return allocate(client_id, queue_ids, members)
    if len(members) > len(queue_ids):
        return [queue_ids[at % len(queue_ids)]]
    sharing = {members[(at + i) % len(members)] for i in range(min(share_with + 1, len(members)))}
    return sorted(queue for member in sharing for queue in allocate(member, queue_ids, members))
