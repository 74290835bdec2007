"""The seconds that a rank waits, and those in which only environments work."""

import pytest

from pipeline.observe import rank_timeline
from pipeline.observe.rank_timeline import Timeline


def test_waits_add_up_and_the_current_one_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rank_timeline.time, "monotonic", lambda: now[0])
    recorded = Timeline({"rank": 0, "realm": "generate", "engine": 0, "node": "here"}, {"generate": (0,)})
    for verb, phase, seconds in (("rollout", "decode", 4), ("rollout", "environment", 2), ("idle", "", 3), ("step", "", 1)):
        recorded.enter(verb, phase)
        now[0] += seconds
    assert recorded.waited_s() == pytest.approx((5, 2))
    recorded.enter("rollout", "environment")
    now[0] += 1
    assert recorded.waited_s() == pytest.approx((6, 3))
    assert recorded.account()[0] == pytest.approx(6), "an account is of the same seconds"
