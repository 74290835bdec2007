"""Find questions of an evaluation in a run's training data: `python launch/contamination.py evaluation=DIR [run=RUN_DIR]`.

A question is flagged if it shares an n-gram with the training data (launch/evaluations/overlap.py). The result is in
contamination.json of the evaluation's folder: the flagged questions, each with the place where it occurs, and the scores of all
questions, of the flagged ones and of the others. The report shows these scores. All training data are read; those of the
Hugging Face Hub need the package `datasets`.

Exit status: 0 if the data were searched; 2 if the command line, the evaluation or the data have an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.evaluations.overlap import WORDS, OverlapSearch
from launch.runs import evaluation_folder as evaluations
from launch.runs import evaluation_sources
from launch.runs.evaluation_folder import CONTAMINATION, EvaluationFolder
from launch.terminal import command_line
from launch.terminal.command_line import Key
from launch.terminal.units import plural
from pipeline import config
from pipeline.config import Problem, Recipe, RecipeError, section, training_sets
from pipeline.data.datasets import load_split, readable
from pipeline.evaluation import task_data
from pipeline.evaluation.formats.user_records import texts_in
from pipeline.evaluation.questions import Question
from pipeline.evaluation.scores import as_json
from pipeline.evaluation.statistics import interval
from pipeline.files import small_files

PROGRESS = 100_000
"""Number of records between two lines that report progress."""


@dataclass(frozen=True)
class ContaminationRequest:
    """The command line."""

    evaluation: Annotated[Path, Key("DIR", "an evaluation's folder, such as RUN_DIR/evaluations/math/step_000050", bare=True)]
    run: Annotated[Path | None, Key("RUN_DIR", "the run whose training data are searched; default: the evaluation's")] = None
    words: Annotated[int, Key("N", f"words of an n-gram; default: {WORDS}")] = WORDS

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key whose value cannot be used."""
        if self.words < 1:
            yield Problem("words", "too-small", f"got {self.words}; expected 1 or more")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, ContaminationRequest, execute, arguments)


def execute(request: ContaminationRequest) -> int:
    """Search the training data, write contamination.json, and print a line for each task. Raises RecipeError."""
    evaluation = evaluations.read(request.evaluation)
    if evaluation is None:
        raise RecipeError(Problem("evaluation", "not-a-run", f"got {request.evaluation}; expected a complete evaluation"))
    trained = evaluation.scores.get("run")
    run = request.run or (Path(trained) if trained else None)
    if run is None:
        message = "the evaluation belongs to no run. Try run=RUN_DIR, the run whose training data to search"
        raise RecipeError(Problem("run", "missing-value", message))
    result = contamination(evaluation, run, request.words)
    small_files.write(request.evaluation / CONTAMINATION, result)
    for name, task in result["tasks"].items():
        print(_line(name, task))
    print(f"written: {request.evaluation / CONTAMINATION}")
    return 0


def contamination(evaluation: EvaluationFolder, run: Path, words: int = WORDS) -> dict[str, Any]:
    """Return the contents of contamination.json. Raises RecipeError for data that cannot be read."""
    recipe = config.read(evaluation.folder / "recipe.yaml")
    searches, unreadable = {}, {}
    for name in evaluation.tasks:
        if name not in recipe.evaluate.tasks:
            unreadable[name] = "lm-evaluation-harness holds the data of this task"
            continue
        try:
            questions = task_data.read(name, recipe.evaluate.tasks[name]).questions
        except RecipeError as error:
            unreadable[name] = str(error)
            continue
        searches[name] = OverlapSearch.of({question.id: _text(question) for question in questions}, words)
    records = _search(evaluation_sources.read_run(run), list(searches.values()))
    tasks: dict[str, Any] = {name: _scores(evaluation, name, search) for name, search in searches.items()}
    tasks |= {name: {"unreadable": why} for name, why in unreadable.items()}
    return {"run": str(run), "words": words, "records": records, "tasks": tasks}


def _text(question: Question) -> str:
    return question.prompt if isinstance(question.prompt, str) else "\n".join(each["content"] for each in question.prompt)


def _search(recipe: Recipe, searches: list[OverlapSearch]) -> int:
    """Check every text of every record that the run trains on, and return the number of records."""
    count = 0
    for name, dataset in training_sets(recipe.data).items():
        records, _ = load_split(replace(dataset, repeat=1), section(recipe).seed, recipe.data.bad_records == "drop")
        for index, record in readable(records):
            for text in texts_in(record):
                for search in searches:
                    search.check(text, f"{name}, record {index}")
            count += 1
            if count % PROGRESS == 0:
                print(f"searched {plural(count, 'record')}", flush=True)
    return count


def _scores(evaluation: EvaluationFolder, task: str, search: OverlapSearch) -> dict[str, Any]:
    metric = evaluation.tasks[task]["metric"]
    values = evaluation.values(task)
    flagged = {question: of for question, of in values.items() if question in search.overlaps}
    clean = {question: of for question, of in values.items() if question not in search.overlaps}
    scores = {name: as_json(interval(of.values())) for name, of in (("all", values), ("clean", clean), ("flagged", flagged))}
    found = [
        {"question": question, "where": where, "overlap": overlap}
        for question, (where, overlap) in sorted(search.overlaps.items())
    ]
    return {
        "metric": metric,
        "questions": len(values),
        "flagged": len(flagged),
        "unchecked": len(search.unchecked),
        "scores": scores,
        "overlaps": found,
    }


def _line(name: str, task: Mapping[str, Any]) -> str:
    if "unreadable" in task:
        return f"{name}: not checked: {task['unreadable']}"
    scores = {key: "-" if score["value"] is None else f"{score['value']:.3f}" for key, score in task["scores"].items()}
    unchecked = f", {task['unchecked']} too short to check" if task["unchecked"] else ""
    numbers = f"{task['metric']} {scores['all']}, without these questions {scores['clean']}, of these alone {scores['flagged']}"
    return f"{name}: {task['flagged']} of {task['questions']} questions occur in the training data{unchecked}; {numbers}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
