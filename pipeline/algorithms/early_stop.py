"""Stop a run by a metric of its validations: at a threshold, or after several validations without an improvement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import LIVE, Float, Positive, Text


@dataclass
class EarlyStopConfig:
    """Keys of the early stop, which all algorithms that train have."""

    stop_at_validation_metric: Annotated[Text | None, LIVE] = None
    """Validation metric that may end the run early, by its name in metrics.jsonl, such as `val/accuracy`; `val:accuracy` is the
    same. Lower is better if the name ends in loss. The run is then complete, and its last step is saved. With another rule, the
    same command continues the run. If the first validation lacks the metric, the run ends with an error. null: never."""
    stop_at_validation_threshold: Annotated[Float | None, LIVE] = None
    """Stop once the metric is at least this value or, for a loss, at most. null: never."""
    stop_patience: Annotated[Positive | None, LIVE] = None
    """Stop after this many validations in a row without an improvement. null: never."""
    stop_min_delta: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Least change from the best value that counts as an improvement. 0: any."""


class EarlyStop:
    """Decides after each validation whether the run stops. Checkpoints keep its state."""

    def __init__(self, algorithm: str, config: EarlyStopConfig):
        self._algorithm, self._config = algorithm, config
        self._measured = self.metric  # of the state
        self._best: float | None = None
        self._last: float | None = None
        self._since = 0  # validations since the best one

    @property
    def metric(self) -> str:
        """The name of the metric in metrics.jsonl; empty without an early stop. It may change during the run."""
        return (self._config.stop_at_validation_metric or "").replace(":", "/", 1)

    @property
    def _sign(self) -> int:
        """1 if a higher value of the metric is better, else -1."""
        return -1 if self.metric.endswith("loss") else 1

    def _drop_state_of_another_metric(self) -> None:
        if self._measured != self.metric:
            self._measured, self._best, self._last, self._since = self.metric, None, None, 0

    def record_validation(self, values: Mapping[str, float]) -> None:
        """Record the metrics of a validation. Raises RecipeError if the metric of the early stop is not among them."""
        self._drop_state_of_another_metric()
        if not self.metric:
            return
        if self.metric not in values:
            names = ", ".join(sorted(name for name in values if name.startswith("val/")))
            message = f"got {self._config.stop_at_validation_metric}, which no validation reports; expected one of {names}"
            raise RecipeError(Problem(f"{self._algorithm}.stop_at_validation_metric", "not-a-choice", message))
        value = values[self.metric]
        self._last = None if math.isnan(value) else value  # nothing was scored, or the loss diverged
        if self._last is not None and self._improves(self._last):
            self._best, self._since = self._last, 0
        else:
            self._since += 1

    def _improves(self, value: float) -> bool:
        if self._best is None:
            return True
        gain = self._sign * (value - self._best)
        return gain > 0 and gain >= self._config.stop_min_delta

    @property
    def reason(self) -> str | None:
        """The reason why the run stops; None if it continues."""
        config = self._config
        self._drop_state_of_another_metric()
        if not self.metric:
            return None
        threshold, patience = config.stop_at_validation_threshold, config.stop_patience
        if threshold is not None and self._last is not None and self._sign * self._last >= self._sign * threshold:
            return f"{self.metric} reached {self._last:g}; stop_at_validation_threshold is {threshold:g}"
        if patience is not None and self._since >= patience:
            best = "no value" if self._best is None else f"{self._best:g}"
            return f"{self.metric} has not improved on {best} in {self._since} validations; stop_patience is {patience}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON values."""
        self._drop_state_of_another_metric()
        of_metric = {"metric": self._measured, "higher": self._sign > 0}
        return {**of_metric, "best": self._best, "last": self._last, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint if it is of this run's metric and direction; ignore any other state."""
        self._drop_state_of_another_metric()
        higher = self._sign > 0
        if self.metric and (state.get("metric"), state.get("higher", higher)) == (self.metric, higher):
            self._best, self._last, self._since = state["best"], state["last"], state["since"]


def check_early_stop(algorithm: str, config: EarlyStopConfig, validates: bool) -> Iterator[Problem]:
    """Yield the problems of the early stop's keys. validates: whether the run validates before or between its steps."""
    metric, rules = config.stop_at_validation_metric, {"stop_at_validation_threshold", "stop_patience"}
    rules = sorted(name for name in rules if getattr(config, name) is not None)
    key = f"{algorithm}.stop_at_validation_metric"
    if metric is None:
        for name in rules:
            message = f"got {getattr(config, name)}, but {key} is null, so nothing stops the run early"
            yield Problem(f"{algorithm}.{name}", "has-no-effect", message)
        return
    if not metric.startswith(("val/", "val:")):
        yield Problem(key, "bad-format", f"got {metric}; expected a metric of validations, such as val/accuracy or val/loss")
    if not rules:
        message = (
            f"got {metric} without a rule; expected {algorithm}.stop_at_validation_threshold or {algorithm}.stop_patience too"
        )
        yield Problem(key, "missing-value", message)
    if not validates:
        message = f"got {metric}, but the run does not validate before its end. Try {algorithm}.val_period=10"
        yield Problem(key, "has-no-effect", message)
    if config.stop_patience is None and config.stop_min_delta:
        message = f"got {config.stop_min_delta:g}, but {algorithm}.stop_patience is null. Try {algorithm}.stop_patience=3"
        yield Problem(f"{algorithm}.stop_min_delta", "has-no-effect", message)
