"""The optimizer and the learning-rate schedule of a recipe, by their dotted torch names.

A schedule is a function of the number of its steps, so a checkpoint stores this number and `LRSchedule` advances to it again.
It advances once per step of the algorithm, not per optimizer update (see `TrainBackend.advance_schedule`). Schedules that
depend on a metric (ReduceLROnPlateau) are not supported.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from pipeline.config import OptimizerConfig, Problem, RecipeError
from pipeline.recipe import user_code

FUSED_FOR_DTENSORS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels take DTensors. The fused kernels of SGD and Adagrad do not."""


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer, with one parameter group per device mesh.

    torch's multi-tensor kernels do not accept DTensors of several meshes in one call. A fused kernel is used if the optimizer
    has one for these parameters and the recipe sets none of `fused`, `foreach`, `capturable` and `differentiable`. Raises
    RecipeError if policy.optimizer.name or policy.optimizer.kwargs cannot be used.
    """
    cls = _resolve("policy.optimizer.name", config.name, torch.optim.Optimizer, "torch.optim.AdamW")
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()}
    parameters = list(parameters)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    has_kernel = cls in FUSED_FOR_DTENSORS if sharded else "fused" in inspect.signature(cls).parameters
    if has_kernel and not {"fused", "foreach", "capturable", "differentiable"} & set(kwargs):
        kwargs["fused"] = True
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    try:
        return cls([{"params": group} for group in groups.values()], **kwargs)
    except (TypeError, ValueError) as error:
        message = f"{config.name} does not take {config.kwargs}: {error}"
        raise RecipeError(Problem("policy.optimizer.kwargs", "unsupported", message)) from error


class LRSchedule:
    """The learning rate as a function of the steps of the algorithm."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Any, step: Callable[[], object] | None = None):
        """config: None (a constant rate), {name, kwargs}, or a list of these that ends in {milestones: [...]}, as in NeMo-RL.

        step: takes a step of another library's schedule, which sets the optimizer's rate in place of `config`. Raises
        RecipeError if policy.scheduler cannot be used.
        """
        self.steps = 0
        self._optimizer = optimizer
        scheduler = None if step else _build_scheduler(optimizer, config)
        self._step = scheduler.step if scheduler else step

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        """Advance by one step of the algorithm."""
        self.steps += 1
        if self._step is not None:
            self._step()

    def advance(self, steps: int) -> None:
        """Call `step` that many times."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            for _ in range(steps):
                self.step()


def _build_scheduler(optimizer: torch.optim.Optimizer, config: Any) -> LRScheduler | None:
    if config is None:
        return None
    if isinstance(config, dict):
        return _build_one(optimizer, config, "policy.scheduler")
    *parts, last = config or [{}]
    if not parts or set(last) != {"milestones"} or len(last["milestones"]) != len(parts) - 1:
        message = (
            f"got {config}; expected a list of schedules {{name, kwargs}} that ends in {{milestones: [...]}}, the steps at"
            " which the second and later schedules begin"
        )
        raise RecipeError(Problem("policy.scheduler", "bad-format", message))
    schedulers = [_build_one(optimizer, part, f"policy.scheduler[{i}]") for i, part in enumerate(parts)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        return SequentialLR(optimizer, schedulers, last["milestones"])


def _build_one(optimizer: torch.optim.Optimizer, config: Any, key: str) -> LRScheduler:
    if not isinstance(config, dict) or "name" not in config or set(config) - {"name", "kwargs"}:
        raise RecipeError(Problem(key, "bad-format", f"got {config}; expected a schedule {{name, kwargs}}"))
    cls = _resolve(f"{key}.name", config["name"], LRScheduler, "torch.optim.lr_scheduler.LinearLR")
    if issubclass(cls, ReduceLROnPlateau):
        message = "got ReduceLROnPlateau, which depends on a metric; expected a schedule that depends on the step alone"
        raise RecipeError(Problem(f"{key}.name", "unsupported", message))
    try:
        return cls(optimizer, **(config.get("kwargs") or {}))
    except (TypeError, ValueError) as error:
        message = f"{config['name']} does not take {config.get('kwargs')}: {error}"
        raise RecipeError(Problem(f"{key}.kwargs", "unsupported", message)) from error


def _resolve(key: str, name: Any, base: type, example: str) -> type:
    """Return the class of a dotted name. Raises RecipeError for `key` if there is none, or if it is no subclass of `base`."""
    try:
        cls = user_code.load(str(name))
    except (ImportError, ValueError):
        message = f"got {name}, which cannot be imported; expected a class such as {example}"
        raise RecipeError(Problem(key, "not-importable", message)) from None
    if not isinstance(cls, type) or not issubclass(cls, base):
        message = f"got {name}; expected a subclass of {base.__name__}, such as {example}"
        raise RecipeError(Problem(key, "wrong-type", message))
    return cls
