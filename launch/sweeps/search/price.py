"""Price a search before it starts: the GPU-hours of all trials according to the plan, as if no trial were pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.plan.estimate import Plan
from launch.sweeps.search import space
from launch.sweeps.search.config import SearchConfig
from pipeline.config import Problem

KEY = "search.budget_gpu_hours"


@dataclass(frozen=True)
class Price:
    """Holds the price of a search. Every trial is taken to cost as much as the costliest of the planned corners."""

    trials: int
    steps: int
    step_seconds: float
    gpus: int
    trial_gpu_hours: float  # with validations

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all trials."""
        return self.trials * self.trial_gpu_hours

    def __str__(self) -> str:
        steps = f"{self.steps:,} steps of {self.step_seconds:.3g} s on {self.gpus} GPUs"
        trial = f"{self.trial_gpu_hours:,.4g} GPU-hours with validations"
        return f"{self.gpu_hours:,.4g} GPU-hours by the plan: {self.trials} trials x {trial} ({steps})"


def of(search: SearchConfig, plans: Sequence[Plan | None]) -> Price | None:
    """Return the price of a search by the plans of its corners; None if a plan is missing or has no times or no last step."""
    hours_and_plans = [(plan.gpu_hours, plan) for plan in plans if plan is not None and plan.phases]
    priced = [(hours, plan) for hours, plan in hours_and_plans if hours is not None and plan.steps is not None]
    if not priced or len(priced) < len(plans):
        return None
    hours, plan = max(priced, key=lambda pair: pair[0])
    return Price(space.trials(search), plan.steps or 0, plan.step, plan.gpus, hours)


def problems(search: SearchConfig, price: Price | None) -> Iterator[Problem]:
    """Yield a problem if a search with a budget costs more than that, or if its price is not known."""
    budget = search.budget_gpu_hours
    if budget is None:
        return
    if price is None:
        message = "the plan cannot price a trial without GPUs, a known model and a last step. Try null"
        yield Problem(KEY, "has-no-effect", message)
    elif price.gpu_hours > budget:
        most = int(budget / price.trial_gpu_hours)
        cure = f"at most {most} trials" if most else "fewer steps"
        yield Problem(KEY, "too-small", f"got {budget:g}; expected at least {price}. Try {cure}, or a larger budget")
