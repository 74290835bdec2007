"""Megatron-Core's distributed optimizer: each data-parallel rank updates a flat range of every parameter, in float32.

Its settings come from `policy.megatron_cfg.optimizer` and `.scheduler` if the recipe has them, otherwise from
`policy.optimizer` and `policy.scheduler`, so a recipe can change the backend without other keys. With Megatron-Core's settings,
norms and biases have no weight decay, as is Megatron-Core's default. With torch's settings, all parameters have weight decay,
as is torch's default.

Not supported: fp16 and its loss scale; CPU offload; checkpoints in Megatron-Core's format (`ranges` returns flat ranges, which
`megatron_backend.py` writes as boxes of Hugging Face tensors).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as CoreConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pipeline.config import MegatronOptimizerConfig, OptimizerConfig, PolicyConfig, Problem, RecipeError
from pipeline.train.megatron.gradient_norm import Gradient, GradientNorm
from pipeline.train.optimizer import LRSchedule

ADAM = {"torch.optim.AdamW": True, "torch.optim.Adam": False}  # name -> whether weight decay is decoupled


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """The flat range [start, stop) of a parameter that this data-parallel rank updates."""

    parameter: torch.nn.Parameter  # of the model
    start: int
    stop: int
    main: torch.Tensor  # [stop - start] float32 weights
    state: dict[str, torch.Tensor]  # exp_avg and exp_avg_sq, each [stop - start]; empty before the first step


class ScheduledOptimizer:
    """Megatron-Core's optimizer with the schedule of its learning rate and weight decay."""

    def __init__(self, policy: PolicyConfig, model: DistributedDataParallel, norm: GradientNorm):
        """Raises RecipeError for settings that Megatron-Core's optimizer does not support."""
        optimizer = policy.megatron_cfg.optimizer
        config = _core_config(policy, optimizer)
        overrides = None if optimizer else {}  # None: Megatron-Core's default
        core = get_megatron_optimizer(config, [model], config_overrides=overrides, use_gloo_process_groups=False)
        assert isinstance(core, ChainedOptimizer)
        self._core = core
        self._norm, self._checked = norm, False
        self._policy, self._config = policy, config
        self.updates = 0  # Adam needs their number for its bias correction
        self._follow(_new_schedule(policy, config))

    @property
    def options(self) -> dict[str, Any]:
        """The settings that a checkpoint records, as JSON values."""
        config, scheduler = self._config, self._policy.megatron_cfg.scheduler
        return {
            name: getattr(config, name)
            for name in ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
        } | {
            "decoupled_weight_decay": config.decoupled_weight_decay,
            "decays_norms": self._policy.megatron_cfg.optimizer is None,
            "scheduler": asdict(scheduler) if scheduler else self._policy.scheduler,
        }

    def new_rates(self, policy: PolicyConfig) -> Callable[[], None]:
        """Return a function that switches to the rates and schedules of `policy`, as `TrainBackend.new_rates` describes."""
        config = _core_config(policy, policy.megatron_cfg.optimizer)
        schedule = _new_schedule(policy, config)
        schedule.advance(self.schedule.steps)

        def take() -> None:
            self._policy, self._config = policy, config
            self._follow(schedule)

        return take

    def _follow(self, schedule: LRSchedule) -> None:
        """Use the rate of a schedule, and the weight decay of the settings, from the next update on."""
        self.schedule = schedule
        for group in self._core.param_groups:
            group["lr"] = schedule.lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]

    def advance_schedule(self) -> None:
        """Advance the schedule by one step of the algorithm."""
        self.schedule.advance(1)  # without torch's warning: the schedule's own optimizer takes no steps
        self._follow(self.schedule)

    def zero_grad(self) -> None:
        """Remove the gradients."""
        self._core.zero_grad()

    def step(self) -> float:
        """Update the weights, and return the norm of the whole gradient before clipping. Collective over the component.

        Raises FloatingPointError if the gradient is not finite; weights and state are then unchanged. The first step of a
        process raises RuntimeError if `GradientNorm.check` fails.
        """
        self._core.prepare_grads()
        norm = self._norm.norm(self._gradients())
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
        if not self._checked:
            self._norm.check(self._gradients(), norm, self._core.get_grad_norm)
            self._checked = True
        if self._config.clip_grad > 0:
            for part in self._parts():
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=self._config.clip_grad, total_norm=norm)
        self._core.step_with_ready_grads()
        self.updates += 1
        return norm

    def _gradients(self) -> Iterator[Gradient]:
        """Yield the gradient of each range that this rank updates."""
        for part in self._parts():
            for parameter, (group, index) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][index]
                if main.grad is not None:
                    yield parameter, main, main.grad

    def ranges(self) -> Iterator[ParameterRange]:
        """Yield the ranges that this rank updates."""
        for part in self._parts():
            for parameter, (group, index) in part.model_param_group_index_map.items():
                bounds = part._get_model_param_range_map(parameter)["param"]
                main = part.optimizer.param_groups[group]["params"][index]
                state = {k: v for k, v in part.optimizer.state.get(main, {}).items() if torch.is_tensor(v) and v.dim()}
                yield ParameterRange(parameter, bounds.start, bounds.end, main.detach(), state)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors of the optimizer. If the model is in float32, the optimizer's weights are views of the model's."""
        for part in self.ranges():
            yield from (part.main, *part.state.values())

    def restore(self, updates: int, schedule_steps: int, state: dict[torch.nn.Parameter, dict[str, torch.Tensor]]) -> None:
        """Restore the optimizer and its schedule from a checkpoint.

        updates: the number of updates so far. state: {parameter: its state tensors} for the parameters of `ranges`.
        """
        self.updates = updates
        schedule = _new_schedule(self._policy, self._config)
        schedule.advance(schedule_steps)
        self._follow(schedule)
        for part in self._parts():
            # torch's Adam counts steps per parameter, TransformerEngine's and apex's per group.
            per_parameter = isinstance(part.optimizer, torch.optim.Adam)
            for parameter, (group, index) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][index]
                restored = dict(state.get(parameter, {}))
                if restored and per_parameter:
                    restored["step"] = torch.tensor(float(updates))
                part.optimizer.state[main] = restored
            if updates and not per_parameter:
                for group in part.optimizer.param_groups:
                    group["step"] = updates

    def _parts(self) -> list[Any]:
        """Return those of Megatron-Core's optimizers (for dense parameters and for experts) that have parameters."""
        return [part for part in self._core.chained_optimizers if part.optimizer is not None and part.get_parameters()]


def _new_schedule(policy: PolicyConfig, config: CoreConfig) -> LRSchedule:
    """Return the schedule, of an optimizer without weights, because Megatron-Core's optimizer is not a torch optimizer."""
    assert config.lr is not None  # `_core_config` sets it
    rates = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
    schedule = policy.megatron_cfg.scheduler
    if schedule is None:
        return LRSchedule(rates, policy.scheduler)
    if schedule.lr_decay_iters is None and schedule.lr_decay_style != "constant":
        message = f"got null; expected the number of steps of lr_decay_style={schedule.lr_decay_style}"
        raise RecipeError(Problem("policy.megatron_cfg.scheduler.lr_decay_iters", "missing-value", message))
    assert config.min_lr is not None
    steps = max(schedule.lr_decay_iters or 0, schedule.lr_warmup_iters + 1)
    scheduler = OptimizerParamScheduler(
        rates,  # pyright: ignore[reportArgumentType] - it uses the parameter groups alone
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    return LRSchedule(rates, None, functools.partial(scheduler.step, increment=1))


def _core_config(policy: PolicyConfig, optimizer: MegatronOptimizerConfig | None) -> CoreConfig:
    if optimizer is None:
        settings = _of_torch(policy.optimizer, policy.max_grad_norm)
    else:
        settings = {**asdict(optimizer), "clip_grad": optimizer.clip_grad or 0.0}
    return CoreConfig(
        optimizer="adam",
        bf16=policy.precision == "bfloat16",
        params_dtype=getattr(torch, policy.precision),
        use_distributed_optimizer=True,
        **settings,
    )


def _of_torch(optimizer: OptimizerConfig, max_grad_norm: float | None) -> dict[str, Any]:
    """Return the settings of Megatron-Core's optimizer that mean the same as torch's."""
    if optimizer.name not in ADAM:
        message = f"got {optimizer.name}; expected {' or '.join(ADAM)}, or policy.megatron_cfg.optimizer"
        raise RecipeError(Problem("policy.optimizer.name", "not-a-choice", message))
    kwargs, decoupled = dict(optimizer.kwargs), ADAM[optimizer.name]
    beta1, beta2 = kwargs.pop("betas", (0.9, 0.999))
    settings = {
        "lr": kwargs.pop("lr", 1e-3),
        "weight_decay": kwargs.pop("weight_decay", 0.01 if decoupled else 0.0),
        "decoupled_weight_decay": decoupled,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": kwargs.pop("eps", 1e-8),
        "clip_grad": max_grad_norm or 0.0,
    }
    if unsupported := kwargs.keys() - {"fused", "foreach"}:  # these two change the speed only
        message = f"got {', '.join(sorted(unsupported))}, which Megatron-Core's optimizer does not support"
        raise RecipeError(Problem("policy.optimizer.kwargs", "unsupported", message))
    return settings
