"""Let pytest rewrite the asserts of the contract's modules, although they are no test files."""

import pytest

for part in ("contract", "moves", "clocks", "cuts"):
    pytest.register_assert_rewrite(f"tests.schedule.{part}")
