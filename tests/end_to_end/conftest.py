"""Fixtures of uninterrupted runs."""

import pytest

from tests.end_to_end.runs import LOCAL, Run, printed, submit


@pytest.fixture(scope="session")
def whole(made_once) -> Run:
    """Return the recipe's four steps, run without interruption."""

    def make(folder):
        run = submit(folder / "run", *LOCAL)
        assert run.status == 0, run.output

    folder = made_once("whole", make) / "run"
    return Run(folder, 0, printed(folder), 0.0)


@pytest.fixture(scope="session")
def uninterrupted(whole) -> list[dict]:
    """Return the metrics of its steps."""
    lines = whole.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len({line["train/loss"] for line in lines}) == 4  # it does learn something
    return lines
