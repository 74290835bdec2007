"""The schema of the section `search` of a sweep's suite.

search:
  recipe: tiny_grpo
  parameters:
    policy.optimizer.kwargs.lr: {low: 1.0e-5, high: 1.0e-2, log: true}
    loss_fn.reference_policy_kl_penalty: [0, 0.01, 0.1]
  metric: val/accuracy
  direction: maximize
  trials: 24
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.config_tree import ConfigMapping, ConfigValue
from pipeline.recipe.values import MISSING, Bool, Float, Int, NotNegative, Positive, Text


@dataclass
class ParameterConfig:
    """The values of one key: a range of numbers, or choices. A list stands for `{choices: [...]}`."""

    low: Annotated[Float | None, Field(description="Lower end of a range, included.")] = None
    high: Annotated[Float | None, Field(description="Upper end of a range, included.")] = None
    log: Annotated[Bool, Field(description="Draw from the range on a logarithmic scale.")] = False
    step: Annotated[Float | None, Field(gt=0, description="Step between values, starting at `low`. null: any value.")] = None
    choices: Annotated[list[Any] | None, Field(description="Texts, numbers, true, false or null, in place of a range.")] = None


@dataclass
class SearchConfig:
    """A search of hyperparameters by Optuna. Each trial is a run of one recipe with values of its own."""

    recipe: Annotated[Text, Field(description="The recipe of every trial: a name in recipes/, or a path.")] = MISSING
    overrides: Annotated[dict[str, Any], Field(description="Values of every trial. They override the suite's.")] = field(
        default_factory=dict
    )
    parameters: Annotated[dict[str, ParameterConfig], Field(description="Ranges and choices by dotted key.")] = field(
        default_factory=dict
    )
    metric: Annotated[
        Text,
        Field(
            description="What to optimize: a metric, of which the last value counts, or an expression over metrics as in gates."
            " Pruning evaluates it at every step, over the steps so far."
        ),
    ] = MISSING
    direction: Annotated[
        Literal["maximize", "minimize"], Field(description="Which values of the metric are better. Required.")
    ] = MISSING  # pyright: ignore[reportAssignmentType] as for texts
    trials: Annotated[
        Positive | None, Field(description="Number of trials. null: only with sampler=grid, the number of its points.")
    ] = None
    sampler: Annotated[
        Literal["random", "tpe", "grid", "cmaes"],
        Field(
            description="How to choose values. random: at random. tpe: by a tree-structured Parzen estimator. grid: every"
            " combination of choices and of ranges with a step. cmaes: by CMA-ES (ranges only)."
        ),
    ] = "tpe"
    pruner: Annotated[
        Literal["none", "asha", "hyperband", "median"],
        Field(
            description="Which trials to stop early. none: no trial. asha: trials that are not among the best 1 /"
            " reduction_factor at step min_steps * reduction_factor^k (asynchronous successive halving). hyperband: as asha,"
            " in several brackets. median: trials worse than the median."
        ),
    ] = "none"
    min_steps: Annotated[Positive, Field(description="No trial is pruned before this step.")] = 1
    reduction_factor: Annotated[Int, Field(ge=2, description="asha, hyperband: one of this many trials continues.")] = 3
    parallel: Annotated[Positive, Field(description="Number of trials that run at once.")] = 1
    seed: Annotated[NotNegative, Field(description="Seed of the sampler. The recipe's own seed is the same in all trials.")] = 0
    budget_gpu_hours: Annotated[
        Float | None,
        Field(gt=0, description="Refuse the search if the plan's GPU-hours of all trials, none of them pruned, exceed this."),
    ] = None


def spell_out_lists(suite: ConfigMapping) -> None:
    """Replace each list under search.parameters in the tree of a suite by `{choices: list}`, in place."""
    search = suite.children.get("search")
    parameters = search.children.get("parameters") if isinstance(search, ConfigMapping) else None
    if isinstance(parameters, ConfigMapping):
        for key, node in parameters.children.items():
            if isinstance(node, ConfigValue) and isinstance(node.value, list):
                parameters.children[key] = ConfigMapping({"choices": node}, node.origin)
