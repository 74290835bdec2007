"""Submit small evaluations as a user would, and read what they leave."""

import json
from pathlib import Path

from pipeline.evaluation.answers import read_answers
from pipeline.evaluation.questions import Answer
from tests.end_to_end.runs import Run

RECIPE = Path(__file__).parent / "recipe.yaml"
QUESTIONS, SAMPLES, CHOICES = 24, 2, 32
ANSWERS = {"sampled": QUESTIONS * SAMPLES, "lm_eval": 2 * CHOICES}
"""File in answers/ from which a restart continues -> its answers: samples, or scored choices."""


def overrides(folder: Path, *more: str) -> tuple[str, ...]:
    """Return the overrides of an evaluation whose data and log are in `folder`."""
    sampled = [
        {"name": f"q{i}", "question": f"{i * 37 % 100}+{i * 91 % 100}=", "answer": str(i), "kind": "even" if i % 2 else "odd"}
        for i in range(QUESTIONS)
    ]
    chosen = [
        {"goal": f"{i * 37 % 100}+{i}", "sol1": str(i * 38), "sol2": f"none of {i * 7 % 11}", "label": i % 2}
        for i in range(CHOICES)
    ]
    for name, records in (("sampled", sampled), ("chosen", chosen)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = [f"evaluate.tasks.sampled.data.data_path={folder}/sampled.jsonl"]
    data += [f"evaluate.tasks.chosen.data.kwargs.path={folder}/chosen.jsonl"]
    return (f"recipe={RECIPE}", *data, f"env.digits.kwargs.log={folder}/judged.jsonl", *more)


def judged(folder: Path) -> int:
    """Return how many answers the environment has judged."""
    log = folder / "judged.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kept(run_dir: Path) -> dict[str, list[Answer]]:
    """Return the answers that a restart will read, by file."""
    return {task: read_answers(run_dir / f"answers/{task}.jsonl") for task in ANSWERS}


def lines(run_dir: Path) -> dict[str, int]:
    """Return the number of lines by file."""
    return {task: len((run_dir / f"answers/{task}.jsonl").read_bytes().splitlines()) for task in ANSWERS}


def scores(run: Run) -> str:
    """Return scores.json of an evaluation that has ended well."""
    assert run.status == 0, run.output
    assert json.loads((run.folder / "done.json").read_text()) == {"step": 0}
    assert lines(run.folder) == ANSWERS
    assert len(read_answers(run.folder / "answers/chosen.jsonl")) == CHOICES
    return (run.folder / "scores.json").read_text()
