"""Write evaluations as the loop leaves them, with the code that it uses."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from pipeline.algorithms.evaluate import EvaluateConfig, TaskConfig
from pipeline.evaluation import scores
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.questions import Answer


class Scored:
    """A task whose metric is the score of each answer."""

    name = "arithmetic"
    warnings = ()

    def __init__(self, **keys):
        self.config = TaskConfig(**keys)

    def metrics(self, answers):
        values: dict[str, list[float]] = {}
        for answer in answers:
            if answer.score is not None:
                values.setdefault(answer.question, []).append(answer.score)
        return {"accuracy": values}


def recipe(run: str | None = None, step: int | None = None, suite="math"):
    section = EvaluateConfig(run=run, step=step)
    return SimpleNamespace(name=suite, policy=SimpleNamespace(model_name="models/tiny"), evaluate=section)


def answers(questions=40, samples=2, group="", solved=0.7, seed=0, text="{score}") -> list[Answer]:
    """Return answers that are right with a chance of `solved`. A higher chance only turns wrong ones right."""
    draw = random.Random(seed)
    kept = []
    for i in range(questions):
        for sample in range(samples):
            score = float(draw.random() < solved)
            of = f"{group}{i % 3}" if group else ""
            said = text.format(score=score)
            kept.append(Answer(f"q{i}", sample, score, {"unparsed": 0.0}, f"What is {i}?", said, 3, "stop", group=of))
    return kept


def evaluation(run: Path, step: int | None, tasks: dict[str, Sequence[Answer]], suite="math") -> Path:
    """Write an evaluation of a run's checkpoint; with step None, into `run` itself. Return its folder."""
    folder = run if step is None else run / f"evaluations/{suite}/step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in tasks.items():
        log = AnswerLog(folder, name)
        for answer in kept:
            log.add(answer)
    samples = {name: len({answer.sample for answer in kept}) for name, kept in tasks.items()}
    made = {name: (Scored(num_samples=samples[name]), kept) for name, kept in tasks.items()}
    summary = scores.summarize(recipe(None if step is None else str(run), step, suite), made)
    scores.write(folder, summary, scores.values(made))
    return folder
