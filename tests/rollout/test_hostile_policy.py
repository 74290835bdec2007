"""A policy that optimizes for breaking its judges gets reward 0 each time, and the run continues. See hostile_policy.py."""

import pytest

from tests.rollout import hostile_policy
from tests.sandbox.conftest import unusable


@pytest.mark.full  # by default: tests/sandbox
@pytest.mark.parametrize("whole", [False, True])
def test_tricks_against_sandboxes_and_math(play_in, tmp_path, whole):
    if reason := unusable():
        pytest.skip(reason)
    status, printed = play_in(hostile_policy.in_sandboxes, tmp_path, whole)
    assert status == 0, printed[-8000:]
