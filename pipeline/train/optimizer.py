"""Optimizer and learning-rate schedule from the recipe, by their dotted torch names.

A schedule is a function of how often it was advanced, so a checkpoint stores that number and `LRSchedule` counts up to it
again. It advances once per step of the algorithm, not per optimizer update (see `TrainBackend.advance_schedule`). Schedules
that look at a metric (ReduceLROnPlateau) are left out.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from pipeline.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """One parameter group per device mesh, since torch's multi-tensor kernels do not take DTensors of several meshes at once.

    Where the optimizer has a fused kernel and the recipe says nothing about `fused` or `foreach`, it is used.
    Raises ValueError naming policy.optimizer.name or policy.optimizer.kwargs.
    """
    cls = _resolve("policy.optimizer.name", config.name, torch.optim.Optimizer, "torch.optim.AdamW")
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()}
    if "fused" in inspect.signature(cls).parameters and not {"fused", "foreach", "capturable", "differentiable"} & set(kwargs):
        kwargs["fused"] = True
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    try:
        return cls([{"params": group} for group in groups.values()], **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy.optimizer.kwargs: {config.name} does not take {config.kwargs}: {error}") from error


class LRSchedule:
    """The learning rate as a function of the steps of the algorithm."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Any):
        """config: None (constant), {name, kwargs}, or a list of those that ends in {milestones: [...]}, as in NeMo-RL.

        Raises ValueError naming policy.scheduler.
        """
        self.steps = 0
        self._optimizer = optimizer
        self._scheduler = _build_scheduler(optimizer, config)

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> None:
        self.steps += 1
        if self._scheduler is not None:
            self._scheduler.step()

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
        raise ValueError(
            "policy.scheduler: a list holds schedules {name, kwargs} and last {milestones: [...]}, the step at which each but"
            f" the first begins; this is {config}"
        )
    schedulers = [_build_one(optimizer, part, f"policy.scheduler[{i}]") for i, part in enumerate(parts)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        return SequentialLR(optimizer, schedulers, last["milestones"])


def _build_one(optimizer: torch.optim.Optimizer, config: Any, key: str) -> LRScheduler:
    if not isinstance(config, dict) or "name" not in config or set(config) - {"name", "kwargs"}:
        raise ValueError(f"{key}: a schedule is {{name, kwargs}}, this is {config}")
    cls = _resolve(f"{key}.name", config["name"], LRScheduler, "torch.optim.lr_scheduler.LinearLR")
    if issubclass(cls, ReduceLROnPlateau):
        raise ValueError(f"{key}.name: ReduceLROnPlateau looks at a metric; only schedules by step are supported")
    try:
        return cls(optimizer, **(config.get("kwargs") or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}.kwargs: {config['name']} does not take {config.get('kwargs')}: {error}") from error


def _resolve(key: str, name: Any, base: type, example: str) -> type:
    """The class of a dotted name. Raises ValueError naming `key` if there is none, or if it is no `base`."""
    module, _, attribute = str(name).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"{key}: there is no '{name}'; for example {example}") from None
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise ValueError(f"{key}: '{name}' is not a {base.__name__}; for example {example}")
    return cls
