"""Administration: what RocketMQ's tools and consoles ask a broker, in rooms by what they ask about.

    topics               create, change, list, delete
    groups               consumer groups: configure, list, delete
    members              who is connected, and who reads what
    progress             how far queues and groups have come
    offset_reset         offsets set back to an instant
    client_forwarding    questions that a consumer answers
    key_values           the name server's table: ordered topics
    rates, runtime       figures and settings

Nothing of it is on the way of a message.
"""

from __future__ import annotations

from timeball.protocols.remoting.calls import Handlers
from timeball.protocols.remoting.handlers.admin.client_forwarding import Relays
from timeball.protocols.remoting.handlers.admin.groups import GroupAdmin
from timeball.protocols.remoting.handlers.admin.key_values import KeyValues
from timeball.protocols.remoting.handlers.admin.members import MemberAdmin
from timeball.protocols.remoting.handlers.admin.offset_reset import Resets
from timeball.protocols.remoting.handlers.admin.progress import Progress
from timeball.protocols.remoting.handlers.admin.rates import RateAdmin
from timeball.protocols.remoting.handlers.admin.runtime import Runtime
from timeball.protocols.remoting.handlers.admin.topics import TopicAdmin
from timeball.protocols.remoting.site import Site


class Admin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._runtime, self._rates = Runtime(site), RateAdmin(site)
        self._rooms = [
            TopicAdmin(site).handlers(),
            GroupAdmin(site).handlers(),
            MemberAdmin(site).handlers(),
            Progress(site).handlers(),
            Resets(site).handlers(),
            Relays(site).handlers(),
            KeyValues(site).handlers(),
            self._runtime.handlers(),
            self._rates.handlers(),
        ]

    def handlers(self) -> Handlers:
        """The requests of all rooms."""
        return {code: handler for room in self._rooms for code, handler in room.items()}

    def sample(self) -> None:
        """Called about once a second."""
        self._runtime.sample()
        self._rates.sample()
