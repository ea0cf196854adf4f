"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import arrow_targets, http2_targets, log_targets, remoting_targets
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (remoting_targets, http2_targets, arrow_targets, log_targets)
    for target in module.TARGETS
}
