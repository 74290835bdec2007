"""What several tests compare with."""

import pytest

from tests.end_to_end.runs import LOCAL, submit


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> list[dict]:
    """The metrics of the recipe's four steps, run in one go."""
    run = submit(tmp_path_factory.mktemp("whole") / "run", *LOCAL)
    assert run.status == 0, run.output
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len({line["train/loss"] for line in lines}) == 4  # it does learn something
    return lines
