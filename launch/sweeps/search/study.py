"""Keep a search's trials in Optuna's study, a journal in the sweep's folder. The only module that imports Optuna.

The process that opens the study holds the lock of the sweep's folder, so only one process writes; others read a `snapshot`.
Each trial gets a new sampler with a seed of its own, so a search that was killed continues with the same draws.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import optuna  # pyright: ignore[reportMissingImports] optional package
from optuna.distributions import (  # pyright: ignore[reportMissingImports] as above
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages.journal import JournalFileBackend  # pyright: ignore[reportMissingImports] as above
from optuna.trial import TrialState  # pyright: ignore[reportMissingImports] as above

from launch.sweeps.search import section
from launch.sweeps.search.search_report import StateOfTrial, Trial
from launch.sweeps.search.section import ParameterConfig, SearchConfig
from pipeline.files.storage import write_durably

JOURNAL = "search.journal"
STUDY = "search"
STREAM = 1_000_003  # distance of the seeds of two searches, above their numbers of trials
RANDOM_FIRST = 10
"""Maximum number of random trials before the Parzen estimator chooses."""
POINT, LOST, WHY, PRUNED_AT = "grid point", "lost", "why", "pruned at"
"""Attributes of a trial."""

optuna.logging.set_verbosity(optuna.logging.WARNING)

STATES: dict[TrialState, StateOfTrial] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class TrialStudy:
    """Holds the trials of one search."""

    def __init__(self, folder: Path, search: SearchConfig, max_steps: int | None):
        """Open the study in a sweep's folder, or create it.

        max_steps: the number of steps of a trial; None if only its data limit it.
        """
        self._search, self._max_steps = search, max_steps
        self._distributions = {key: _distribution(key, parameter) for key, parameter in search.parameters.items()}
        path = folder / JOURNAL
        _mend(path)
        self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        self._study = optuna.create_study(
            storage=self._storage,
            pruner=_pruner(search, max_steps),
            study_name=STUDY,
            direction=search.direction,
            load_if_exists=True,
        )
        self._id = self._storage.get_study_id_from_name(STUDY)
        self._give_up_incomplete()

    def _give_up_incomplete(self) -> None:
        """Set aside trials that lack values because a process was killed while it asked for them.

        They were never submitted, and do not count.
        """
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.params.keys() != self._distributions.keys():
                self.mark(trial.number, LOST, True)
                self._study.tell(trial.number, state=TrialState.FAIL)

    # ---- trials -----------------------------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """Return all trials that have all their values, in order."""
        return [_trial(trial) for trial in self._valid_trials()]

    def _valid_trials(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state in STATES and LOST not in trial.user_attrs]

    def ask(self) -> Trial:
        """Return a new trial with the values that the sampler chose."""
        self._study.sampler = _sampler(self._search, len(self._study.get_trials(deepcopy=False)))
        if self._search.sampler == "grid":
            self._enqueue()
        number = self._study.ask(self._distributions).number
        return _trial(self._study.get_trials(deepcopy=False)[number])

    def _enqueue(self) -> None:
        """Queue the first point of the grid that no trial has. Do nothing if one is still queued by a killed process."""
        if self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return
        used = {trial.user_attrs[POINT] for trial in self._valid_trials()}
        points = section.grid(self._search)
        point = next(i for i in range(len(points)) if i not in used)
        self._study.enqueue_trial(points[point], user_attrs={POINT: point})

    def report(self, number: int, step: int, value: float) -> bool:
        """Record the metric of a running trial at a step, and return whether to prune the trial.

        A decision to prune is recorded too. No trial is pruned at its last step.
        """
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        self._storage.set_trial_intermediate_value(trial_id, step, value)
        if self._max_steps is not None and step >= self._max_steps:
            return False
        if not self._study.pruner.prune(self._study, self._storage.get_trial(trial_id)):
            return False
        self.mark(number, PRUNED_AT, step)
        return True

    def end(self, number: int, state: StateOfTrial, value: float | None = None, why: str = "") -> None:
        """Record the end of a trial: complete with its final metric, pruned at the last value that it reported, or failed.

        why: a line of text that says why it failed.
        """
        if why:
            self.mark(number, WHY, why)
        self._study.tell(number, value, next(name for name, ours in STATES.items() if ours == state))

    def mark(self, number: int, key: str, value: Any) -> None:
        """Record an attribute of a trial, which Optuna's own tools show too."""
        self._storage.set_trial_user_attr(self._storage.get_trial_id_from_study_id_trial_number(self._id, number), key, value)

    # ---- results ----------------------------------------------------------------------------------------------------------

    def importances(self) -> dict[str, float]:
        """Return parameter -> its share of the importance, largest first.

        Return {} if all complete trials have the same value, or if there are fewer than two. The shares are by PED-ANOVA
        (https://arxiv.org/abs/2304.10255), which needs no further package, unlike fANOVA.
        """
        complete = [trial for trial in self.trials() if trial.state == "complete"]
        if len(complete) < 2 or len({trial.value for trial in complete}) < 2:
            return {}
        return dict(optuna.importance.get_param_importances(self._study))


def snapshot(folder: Path, search: SearchConfig) -> list[Trial]:
    """Return the trials of a search from a copy of its journal, because another process may be running the search."""
    with tempfile.TemporaryDirectory() as copy:
        if (folder / JOURNAL).exists():
            shutil.copy(folder / JOURNAL, copy)
        return TrialStudy(Path(copy), search, None).trials()


def _trial(trial: Any) -> Trial:
    attributes = trial.user_attrs
    state = STATES[trial.state]
    value = trial.value if state in ("complete", "pruned") else None
    return Trial(
        number=trial.number,
        state=state,
        values=dict(trial.params),
        reports=dict(sorted(trial.intermediate_values.items())),
        value=None if value is None or math.isnan(value) else value,
        why=attributes.get(WHY, ""),
        pruned_at=attributes.get(PRUNED_AT),
    )


def _mend(path: Path) -> None:
    """Remove what a killed process left: the journal's lock, and an incomplete last line, on which Optuna would fail."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists() and not (text := path.read_text()).endswith("\n") and text:
        write_durably(path, text[: text.rfind("\n") + 1])


# ---- Optuna's parts -----------------------------------------------------------------------------------------------------


def _distribution(key: str, parameter: ParameterConfig) -> BaseDistribution:
    if parameter.choices is not None:
        return CategoricalDistribution(parameter.choices)
    low, high, step = parameter.low, parameter.high, parameter.step
    assert low is not None and high is not None, "`section.problems` requires them"
    if section.is_whole(key, parameter):
        return IntDistribution(int(low), int(high), parameter.log, int(step or 1))
    return FloatDistribution(low, high, parameter.log, step)


def _sampler(search: SearchConfig, earlier: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of the next trial. earlier: the number of trials before it."""
    seed = search.seed * STREAM + earlier
    if search.sampler == "tpe":
        first = min(RANDOM_FIRST, max(1, search.number_of_trials // 4))
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=first)
    if search.sampler == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)  # the grid's points are queued, so nothing is drawn


def _pruner(search: SearchConfig, max_steps: int | None) -> optuna.pruners.BasePruner:
    first, factor = search.min_steps, search.reduction_factor
    if search.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(first, factor)
    if search.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(first, max_steps or "auto", factor)
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=first)
    return optuna.pruners.NopPruner()
