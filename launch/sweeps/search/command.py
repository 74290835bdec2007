"""Begin or continue the search of a suite, and write its results: report.html, and verdict.json at its end."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launch.pages.document import add_plotly
from launch.recipes import reading
from launch.sweeps import jobs
from launch.sweeps.search import search_checks, search_page, space, trials
from launch.sweeps.search.config import SearchConfig
from launch.sweeps.search.search_checks import CheckedSearch
from launch.sweeps.search.search_loop import SearchLoop
from launch.sweeps.search.trial import Trial
from launch.sweeps.search.trials import SearchResult, TrialResult
from launch.sweeps.suite import LoadedSuite, Suite, as_arguments
from launch.sweeps.sweep_folder import PROBE_S, SweepFolder, SweepPlan
from launch.sweeps.verdict import read as read_verdict
from pipeline.config import Problem, RecipeError, bound, refuse, section
from pipeline.files import small_files
from pipeline.files.storage import write_durably

if TYPE_CHECKING:
    from launch.sweeps.search.study import TrialStudy

VERDICT = "verdict.json"


def check(loaded: LoadedSuite, folder: SweepFolder) -> CheckedSearch:
    """Check a search that has not begun. Raises RecipeError with all problems; writes nothing."""
    overrides = _overrides(loaded.suite, loaded.overrides)
    checked = search_checks.check(_search(loaded.suite), overrides, [f"run_dir={folder.path / 'runs' / 'trial-0000'}"])
    refuse(jobs.not_submitting({checked.lowest[-1].executor.name}))
    return checked


def begin(loaded: LoadedSuite, folder: SweepFolder, dry_run: bool = False, update_baseline: bool = False) -> int:
    """Begin or continue a search, wait for its end, and return the exit status: 0 if any trial is complete, else 1.

    dry_run: only print the search, and write nothing. update_baseline: must be False, because a search has no baseline. Raises
    RecipeError.
    """
    if update_baseline:
        raise RecipeError(Problem("update_baseline", "has-no-effect", "a search has no gates, and so no baseline"))
    search, overrides = _search(loaded.suite), _overrides(loaded.suite, loaded.overrides)
    refuse(search_checks.package_problems(search))
    checked = None if folder.begun else check(loaded, folder)
    if dry_run:
        return _show(loaded, folder, checked)
    with folder.locked(PROBE_S):
        folder.take_up()
        if checked and folder.begun:  # by another process, meanwhile
            folder.refuse_other(loaded.suite, loaded.overrides)
        elif checked:
            needed = jobs.with_needs(search.recipe, overrides, checked.lowest, "trial", 0)[:-1]
            executor = checked.lowest[-1].executor.name
            folder.begin(loaded.suite, SweepPlan(folder.path.name, executor, str(Path.cwd()), "", loaded.overrides, needed))
        if (over := read_verdict(folder.path)) is not None:
            print(f"{over['summary']}\n{folder.path} is complete; id=NAME begins another search")
            return 0 if over["passed"] else 1
        print(f"{folder.title}: {space.trials(search)} trials, {search.parallel} at once, in {folder.path}", flush=True)
        if checked and checked.price:
            print(checked.price, flush=True)
        open_search = _open(folder)
        SearchLoop(folder, search, open_search.study, overrides, open_search.write_page).run()
        return _conclude(open_search)


def report(folder: SweepFolder) -> int:
    """Write the report of a search in its current state. Return 0 if any trial is complete, else 1. Raises RecipeError."""
    refuse(search_checks.package_problems(_search(folder.suite)))
    open_search = _open(folder)
    open_search.write_page()
    result = open_search.result()
    print(f"{result.summary}\n{folder.path}/report.html")
    return 0 if result.best else 1


def _study():
    from launch.sweeps.search import study  # imports Optuna, an optional package

    return study


def trials_of(folder: SweepFolder) -> list[Trial]:
    """Return the trials of a search that has begun, in their current state. Raises RecipeError if Optuna is missing."""
    search = _search(folder.suite)
    refuse(search_checks.package_problems(search))
    return _study().snapshot(folder.path, search)


def _search(suite: Suite) -> SearchConfig:
    assert suite.search is not None, "the caller has looked"
    return suite.search


def _overrides(suite: Suite, command_line: list[str]) -> list[str]:
    """Return the overrides of every trial: those of the suite, of its section `search`, and of the command line."""
    return [*as_arguments(suite.overrides), *as_arguments(_search(suite).overrides), *command_line]


def _show(loaded: LoadedSuite, folder: SweepFolder, checked: CheckedSearch | None) -> int:
    """Print a search: before it begins, its price and its corners; afterwards, each trial with its recipe and result."""
    search = _search(loaded.suite)
    print(f"{folder.title}: {space.trials(search)} trials by {search.sampler}, {search.parallel} at once, in {folder.path}")
    if checked:
        print(checked.price or "its price is not known: the plan has no times")
        for corner in space.corners(search):
            values = [*_overrides(loaded.suite, loaded.overrides), *space.as_overrides(corner)]
            print(f"corner: recipe={search.recipe} {' '.join(values)}")
        return 0
    outcomes = {outcome.name: outcome for outcome in trials_of(folder)}
    for job in folder.plan.jobs:
        trial = outcomes.get(job.name)
        ending = f"  {trial.state}{'' if trial.value is None else f' {trial.value:.6g}'}" if trial else ""
        print(f"{job.name}: recipe={job.recipe} {' '.join(job.overrides)}{ending}")
    return 0


# ---- results ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedSearch:
    """Holds a search that has begun, and its study."""

    folder: SweepFolder
    suite: Suite
    study: TrialStudy
    max_steps: int | None  # of a trial; None if only its data bound it

    def result(self) -> SearchResult:
        """Return the result of the search with its trials in their current state."""
        trials_now, importances = self.study.trials(), self.study.importances()
        return trials.result(self.folder, _search(self.suite), trials_now, importances, self.max_steps)

    def write_page(self) -> None:
        """Write report.html, with Plotly's script beside it."""
        write_durably(self.folder.path / "report.html", search_page.page(self.result(), self.suite))
        add_plotly(self.folder.path)


def _open(folder: SweepFolder) -> OpenedSearch:
    """Open the study of a search that has begun. Raises RecipeError."""
    suite = folder.suite
    recipe = reading.load(_search(suite).recipe, _overrides(suite, folder.plan.overrides))
    max_steps = bound(section(recipe).max_num_steps)
    return OpenedSearch(folder, suite, _study().TrialStudy(folder.path, _search(suite), max_steps), max_steps)


def _conclude(open_search: OpenedSearch) -> int:
    """Write the report and verdict.json of a search whose trials have ended, and return the exit status."""
    open_search.write_page()
    result = open_search.result()
    best = result.best
    value = {
        "passed": best is not None,
        "summary": result.summary,
        "judged": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdicts": [],
        "best": _as_json(best) if best else None,
        "importances": dict(result.importances),
        "trials": [_as_json(entry) for entry in result.trials],
    }
    small_files.write(result.folder / VERDICT, value)
    print(result.summary)
    if best:
        print(f"best: {result.search.metric} {best.trial.value:.6g} of {best.trial.name}")
        print(f"python launch/submit.py recipe={result.search.recipe} {' '.join(space.as_overrides(best.trial.values))}")
    print(f"{result.folder}/report.html", flush=True)
    return 0 if best else 1


def _as_json(entry: TrialResult) -> dict[str, object]:
    reports = {step: value if math.isfinite(value) else None for step, value in entry.trial.reports.items()}
    return {
        **asdict(entry.trial),
        "reports": reports,
        "name": entry.trial.name,
        "seconds": entry.seconds,
        "devices": entry.devices,
    }
