"""`timeball` as a drain's receiver that adopts each transfer twice: `python -m tests.cluster.forgetful serve …`.

It answers the first try with "not available", though it has adopted the transfer, and does not remember that. For tests
only: they must find the doubled messages.
"""

from __future__ import annotations

from timeball.broker.groups.draining import DrainReceiver
from timeball.broker.registry.tables import Drains
from timeball.broker.revoking.group_questions import AdoptHere
from timeball.cli.main import main
from timeball.model.access import Caller
from timeball.model.errors import Unavailable

if __name__ == "__main__":
    adopt, adopted_transfers = DrainReceiver.adopt, set[int]()

    async def forget(self: DrainReceiver, question: AdoptHere, caller: Caller) -> None:
        """Adopt the transfer, but answer its first try with an error."""
        await adopt(self, question, caller)
        if question.transfer and question.transfer not in adopted_transfers:
            adopted_transfers.add(question.transfer)
            raise Unavailable("forgotten")

    DrainReceiver.adopt = forget  # type: ignore[method-assign]
    Drains.adopted = lambda self, source: None  # type: ignore[method-assign]
    main()
