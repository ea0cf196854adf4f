"""The four outcomes of a condition, one byte a message, and how AND, OR, NOT and = put them together.

SQL has three: a comparison with a property that the message does not have is NULL. The fourth is ERROR, a property that
is no number where one is asked for. As in RocketMQ an error ends the evaluation, and the message is not
delivered, unless what stands to the left has settled the matter already (FALSE AND …, TRUE OR …).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TruthArray = npt.NDArray[np.uint8]

FALSE, TRUE, NULL, ERROR = range(4)

#                         right: FALSE  TRUE   NULL   ERROR
AND = np.array([
    [FALSE, FALSE, FALSE, FALSE],  # left FALSE
    [FALSE, TRUE, NULL, ERROR],  # left TRUE
    [FALSE, NULL, NULL, ERROR],  # left NULL
    [ERROR, ERROR, ERROR, ERROR],  # left ERROR
], dtype=np.uint8)  # fmt: skip
OR = np.array([
    [FALSE, TRUE, NULL, ERROR],
    [TRUE, TRUE, TRUE, TRUE],
    [NULL, TRUE, NULL, ERROR],
    [ERROR, ERROR, ERROR, ERROR],
], dtype=np.uint8)  # fmt: skip
EQUAL = np.array([
    [TRUE, FALSE, NULL, ERROR],
    [FALSE, TRUE, NULL, ERROR],
    [NULL, NULL, NULL, ERROR],
    [ERROR, ERROR, ERROR, ERROR],
], dtype=np.uint8)  # fmt: skip
NOT = np.array([TRUE, FALSE, NULL, ERROR], dtype=np.uint8)
IS_NULL = np.array([FALSE, FALSE, TRUE, ERROR], dtype=np.uint8)


def of_bools(values: npt.NDArray[np.bool_]) -> TruthArray:
    """TRUE and FALSE of a mask."""
    return values.astype(np.uint8)


def constant(outcome: int, count: int) -> TruthArray:
    """One outcome for `count` messages."""
    return np.full(count, outcome, dtype=np.uint8)
