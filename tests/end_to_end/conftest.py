"""What several tests compare with."""

import json

import pytest

from tests.end_to_end.runs import LOCAL, submit


@pytest.fixture(scope="session")
def uninterrupted(made_once) -> list[dict]:
    """The metrics of the recipe's four steps, run in one go."""

    def make(folder):
        run = submit(folder / "run", *LOCAL)
        assert run.status == 0, run.output
        (folder / "metrics.json").write_text(json.dumps(run.metrics()))

    lines = json.loads((made_once("uninterrupted", make) / "metrics.json").read_text())
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len({line["train/loss"] for line in lines}) == 4  # it does learn something
    return lines
