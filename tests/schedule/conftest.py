"""The contract's asserts say what they saw, though no test file holds them."""

import pytest

for part in ("contract", "moves", "clocks", "cuts"):
    pytest.register_assert_rewrite(f"tests.schedule.{part}")
