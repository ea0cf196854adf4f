"""`timeball` without a fence: `python -m tests.cluster.unfenced serve …`. UNFENCED names the fence.

    lease       the leader does not check its lease
    all         also not a refusal, another leader, its record or a pause, and followers acknowledge rows of an ended
                epoch
    look-ups    also not before it answers a look-up

For tests only: the first shows that the epoch fences by itself, the others that the tests would notice its absence.
"""

from __future__ import annotations

import os
from typing import Any

from timeball.cli.main import main
from timeball.cluster.member import Member
from timeball.cluster.protocol import following, leading, machine
from timeball.cluster.protocol.effects import Send
from timeball.cluster.protocol.following import Step
from timeball.cluster.protocol.messages import Ack, Data, Message
from timeball.cluster.protocol.replica import Replica
from timeball.log.disk_thread import lead_alone

FENCES = "UNFENCED"


def remove(fences: str) -> None:
    """Take fences out of this process."""
    patched: Any = leading
    patched.may_keep_leading = lambda state, now_ms: True
    if fences == "lease":
        return
    if fences == "look-ups":
        patched = Member
        patched.confirm_lead = lambda member: lead_alone()
    receive = following.receive

    def acknowledge_all(state: Replica, node: str, message: Message) -> Step:
        if isinstance(message, Data) and message.epoch < state.promised:
            end = message.position + len(message.frames)
            return state, [Send(node, Ack(message.epoch, message.ordinal, end, message.end_seq))]
        if state.lead is not None:
            return state, []  # it ignores another leader
        return receive(state, node, message)

    def go_on(state: Replica, *_: object) -> Step:
        return state, []

    async def watch_nothing(member: Member) -> None:
        pass

    for owner, name, call in (
        (following, "receive", acknowledge_all),
        (leading, "stop_leading", go_on),
        (machine, "_handle_refusal", go_on),
        (machine, "handle_seen", go_on),
        (machine, "stop_leading", go_on),
        (Member, "_watch_thread", watch_nothing),
    ):
        setattr(owner, name, call)


if __name__ == "__main__":
    remove(os.environ[FENCES])
    main()
