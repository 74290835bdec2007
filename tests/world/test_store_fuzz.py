"""Run `tests/world/store_fuzz.py`'s attacks on the store's protocol."""

from collections import Counter

import pytest

from pipeline.store import auth
from tests.world import store_fuzz

LONGEST_LOG = 20_000  # bytes
MORE_MB = 60


def check(count: int, seed: int) -> None:
    with store_fuzz.house() as house:
        before = house.memory()
        outcomes = store_fuzz.fuzz(count, seed, house)
        assert not house.wrongs()
        after = house.memory()
        assert house.log.stat().st_size < LONGEST_LOG
    bad = [outcome for outcome in outcomes if outcome.bad]
    assert not bad, bad[:5]
    assert house.served > 5
    assert all(after[name] - before[name] < MORE_MB for name in after), (before, after)
    came = Counter(outcome.came for outcome in outcomes)
    assert min(came["right"], came["lost"]) > count / 10 and came["refused"], came


def test_some():
    check(60, seed=0)


@pytest.mark.long
def test_thousands():
    check(5000, seed=1)


def test_the_fuzzer_finds_a_client_that_does_not_verify_answers(monkeypatch):
    monkeypatch.setattr(auth.Channel, "verify", lambda self, header, message: message)
    with store_fuzz.house() as house:
        outcomes = store_fuzz.fuzz(15, 0, house)
    assert any(outcome.came == "wrong" for outcome in outcomes)
