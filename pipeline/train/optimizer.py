"""The optimizer and the learning-rate schedule of a recipe, by their dotted torch names.

A schedule is a function of the number of its steps, so a checkpoint stores this number and `LRSchedule` advances to it again.
It advances once per step of the algorithm, not per optimizer update (see `TrainBackend.advance_schedule`). Schedules that
depend on a metric (ReduceLROnPlateau) are not supported.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from pipeline.boxes import whole
from pipeline.config import OptimizerConfig, Problem, RecipeError, aliases
from pipeline.recipe import user_code
from pipeline.train.muon import DistributedMuon, Matrices, Matrix

FUSED_FOR_DTENSORS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels take DTensors. The fused kernels of SGD and Adagrad do not."""
KEY = "policy.optimizer"
SHARED = ("lr", "weight_decay")
"""Options of torch.optim.Muon that AdamW takes over where its own options do not set them."""


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    matrices: Matrices | None = None,
    device: torch.device | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer, with one parameter group per device mesh.

    torch's multi-tensor kernels do not accept DTensors of several meshes in one call. A fused kernel is used if the optimizer
    has one for these parameters and the recipe sets none of `fused`, `foreach`, `capturable` and `differentiable`. matrices:
    what torch.optim.Muon updates; None: every parameter of two dimensions. device: where Muon computes; None: where the
    parameters are. Raises RecipeError if policy.optimizer.name or policy.optimizer.kwargs cannot be used.
    """
    cls = resolve_optimizer(config)
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in config.kwargs.items()}
    parameters = list(parameters)
    if cls is torch.optim.Muon:
        if matrices is None:
            matrices = {p: [Matrix(whole(tuple(p.shape)))] for p in parameters if p.dim() == 2}
        return _build_muon(kwargs, parameters, matrices, device)
    _check_names(f"{KEY}.kwargs", cls, kwargs)
    fused = _fused(cls, parameters, kwargs)
    return construct(f"{KEY}.kwargs", cls, kwargs, lambda options: cls(_groups(parameters), **options, **fused))


def resolve_optimizer(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the optimizer's class. Raises RecipeError if there is none."""
    return _resolve(f"{KEY}.name", config.name, torch.optim.Optimizer, "torch.optim.AdamW")


def _build_muon(
    kwargs: dict[str, Any], parameters: list[nn.Parameter], matrices: Matrices, device: torch.device | None
) -> torch.optim.Optimizer:
    """Build Muon with AdamW for other parameters. kwargs: torch.optim.Muon's, and `adamw`: torch.optim.AdamW's."""
    key = f"{KEY}.kwargs"
    adamw = kwargs.pop("adamw", None) or {}
    if not isinstance(adamw, dict):
        raise RecipeError(Problem(f"{key}.adamw", "wrong-type", f"got {adamw!r}; expected options of torch.optim.AdamW"))
    adamw = {name: tuple(value) if isinstance(value, list) else value for name, value in adamw.items()}
    shared = {name: kwargs[name] for name in SHARED if name in kwargs}
    others = [parameter for parameter in parameters if parameter not in matrices]
    _check_names(key, torch.optim.Muon, kwargs)
    _check_names(f"{key}.adamw", torch.optim.AdamW, adamw)
    construct(key, torch.optim.Muon, kwargs, _try_muon)
    construct(f"{key}.adamw", torch.optim.AdamW, adamw, lambda options: torch.optim.AdamW([torch.zeros(1)], **options))
    adamw = {**shared, **adamw, **_fused(torch.optim.AdamW, others, adamw)}
    return DistributedMuon(matrices, _groups(others), kwargs, adamw, device)


def _try_muon(options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return torch's Muon, which checks all options but the number of steps that its loop takes."""
    if type(steps := options.get("ns_steps", 1)) is not int:
        raise TypeError(f"got {steps}; expected a whole number")
    return torch.optim.Muon([torch.zeros(1, 1)], **options)


def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return one parameter group per device mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _fused(cls: type, parameters: Iterable[nn.Parameter], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the option that selects the fused kernel; {} if there is none for these parameters, or `kwargs` chooses."""
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    has_kernel = cls in FUSED_FOR_DTENSORS if sharded else "fused" in inspect.signature(cls).parameters
    chosen = {"fused", "foreach", "capturable", "differentiable"} & set(kwargs)
    return {"fused": True} if has_kernel and not chosen else {}


def construct(
    key: str, cls: type, kwargs: dict[str, Any], build: Callable[[dict[str, Any]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Return build(kwargs). Raises RecipeError, which names the option at fault: the one without which `build` succeeds."""
    name, parameters = f"{cls.__module__}.{cls.__qualname__}", inspect.signature(cls).parameters
    try:
        return build(kwargs)
    except Exception as error:
        wrong = next((option for option in kwargs if _succeeds(build, kwargs, option)), None)
        got = kwargs if wrong is None else f"{kwargs[wrong]!r}"
        where = f"{key}.{wrong}" if wrong is not None else key
        default = "" if wrong is None else f". Its default is {parameters[wrong].default!r}" * (wrong in parameters)
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        message = f"got {got}, which {name} does not take: {why}{default}"
        raise RecipeError(Problem(where, "unsupported", message)) from error


def _check_names(key: str, cls: type, kwargs: dict[str, Any]) -> None:
    """Raise RecipeError for options that a class does not have."""
    parameters = inspect.signature(cls).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in kwargs:
            if option not in parameters:
                near = aliases.option(option, parameters)
                hint = f"Did you mean '{near}'?" if near else "Leave it out"
                message = f"{cls.__module__}.{cls.__qualname__} has no such option. {hint}"
                raise RecipeError(Problem(f"{key}.{option}", "unknown-key", message))


def _succeeds(build: Callable[[dict[str, Any]], object], kwargs: dict[str, Any], without: str) -> bool:
    """Return whether `build` succeeds with all options but one."""
    with contextlib.suppress(Exception):
        build({option: value for option, value in kwargs.items() if option != without})
        return True
    return False


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
    except Exception as error:  # code of a library or a user
        why = f"{type(error).__name__}: {error}"
        message = f"got {name}, which cannot be imported ({why}); expected a class such as {example}"
        raise RecipeError(Problem(key, "not-importable", message)) from error
    if not isinstance(cls, type) or not issubclass(cls, base):
        message = f"got {name}; expected a subclass of {base.__name__}, such as {example}"
        raise RecipeError(Problem(key, "wrong-type", message))
    return cls
