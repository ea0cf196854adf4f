"""The contract's asserts say what they saw, though no test file holds them."""

import pytest

pytest.register_assert_rewrite("tests.schedule.contract")
