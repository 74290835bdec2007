"""Run random programs in the sandbox with `tests/sandbox/fuzz.py`."""

import pytest

from pipeline.sandbox.limits import ProgramResult, SandboxError
from tests.sandbox import fuzz
from tests.sandbox.hosts import Host


def check(host: Host, programs: int, seed: int) -> None:
    bad = [outcome for outcome in fuzz.fuzz(host, programs, seed) if outcome.bad]
    assert not bad, "\n".join(f"seed {outcome.seed}: {outcome.bad}" for outcome in bad)


def test_some(host: Host):
    check(host, 4, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_programs(host: Host):
    check(host, 1000, seed=1000)


def test_the_fuzzer_detects_faults(host: Host, monkeypatch: pytest.MonkeyPatch):
    """They are a failing sandbox, leftovers, an unknown end, and a changed machine."""
    fails = [SandboxError("it failed"), AssertionError("it is still there"), ProgramResult(0, b"", b"", "boredom", 0.0)]

    def run(*_: object, **__: object) -> ProgramResult:
        if isinstance(what := fails.pop(0), Exception):
            raise what
        return what

    monkeypatch.setattr(host, "run", run)
    assert all(outcome.bad for outcome in fuzz.fuzz(host, 3, seed=0))
    seen = iter([{"nice": 0}, {"nice": 1}])
    monkeypatch.setattr(host, "run", lambda *_, **__: ProgramResult(0, b"", b"", "exit", 0.0))
    monkeypatch.setattr(fuzz, "machine", lambda: next(seen))
    assert [bool(outcome.bad) for outcome in fuzz.fuzz(host, 1, seed=0)] == [True]


def test_nothing_runs_uncontained():
    free = Host(backend="none")
    try:
        with pytest.raises(ValueError, match="got 'none'"):
            next(fuzz.fuzz(free, 1, seed=0))
    finally:
        free.close()
