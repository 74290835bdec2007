"""Megatron-Core's distributed optimizer: each data-parallel rank updates a flat range of every parameter, in float32.

Its settings come from `policy.megatron_cfg.optimizer` and `.scheduler` where the recipe has them, else from `policy.optimizer`
and `policy.scheduler`, so that a recipe changes backend without other keys. With Megatron's own settings, norms and biases are
not decayed, as is its habit; with torch's, all parameters are, as is torch's.

Left out: fp16 and its loss scale; CPU offload; checkpoints in Megatron-Core's format (`ranges` gives flat ranges, which
`backend.py` writes as boxes of Hugging Face tensors).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as CoreConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pipeline.config import MegatronOptimizerConfig, MegatronSchedulerConfig, PolicyConfig
from pipeline.train.optimizer import LRSchedule

ADAM = {"torch.optim.AdamW": True, "torch.optim.Adam": False}  # name -> whether weight decay is decoupled


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """The entries [start, stop) of a parameter, counted flat, that this data-parallel rank updates."""

    parameter: torch.nn.Parameter  # of the model
    start: int
    stop: int
    main: torch.Tensor  # [stop - start] float32, the weights
    state: dict[str, torch.Tensor]  # each [stop - start]: exp_avg, exp_avg_sq, or nothing before the first step


class MegatronOptimizer:
    def __init__(self, policy: PolicyConfig, model: DistributedDataParallel):
        """Raises ValueError, naming the key, for what Megatron-Core's optimizer does not do."""
        own = policy.megatron_cfg.optimizer
        config = _core_config(policy, own)
        overrides = None if own else {}  # None: Megatron-Core's habit
        self._core = get_megatron_optimizer(config, [model], config_overrides=overrides, use_gloo_process_groups=False)
        self._policy, self._config = policy, config
        scheduler = policy.megatron_cfg.scheduler
        self.options = {
            name: getattr(config, name)
            for name in ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
        } | {
            "decoupled_weight_decay": config.decoupled_weight_decay,
            "decays_norms": overrides is not None,
            "scheduler": asdict(scheduler) if scheduler else policy.scheduler,
        }
        self.updates = 0  # Adam counts them to correct its moments
        self._schedule = self._new_schedule()

    def _new_schedule(self) -> TorchLRSchedule | MegatronLRSchedule:
        scheduler = self._policy.megatron_cfg.scheduler
        if scheduler is not None:
            return MegatronLRSchedule(self._core, self._config, scheduler)
        return TorchLRSchedule(self._core, self._config, self._policy.scheduler)

    @property
    def schedule_steps(self) -> int:
        """How often the schedule was advanced."""
        return self._schedule.steps

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return self._schedule.lr

    def advance_schedule(self) -> None:
        self._schedule.step()

    def zero_grad(self) -> None:
        self._core.zero_grad()

    def step(self) -> float:
        """One update; the norm of the whole gradient before clipping. Collective over the component.

        Raises FloatingPointError if the gradient is not finite; nothing has changed then.
        """
        self._core.prepare_grads()
        norm = float(self._core.get_grad_norm())
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
        if self._config.clip_grad > 0:
            for part in self._parts():
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=self._config.clip_grad, total_norm=norm)
        self._core.step_with_ready_grads()
        self.updates += 1
        return norm

    def ranges(self) -> Iterator[ParameterRange]:
        """What this rank updates."""
        for part in self._parts():
            for parameter, (group, place) in part.model_param_group_index_map.items():
                where = part._get_model_param_range_map(parameter)["param"]
                main = part.optimizer.param_groups[group]["params"][place]
                state = {k: v for k, v in part.optimizer.state.get(main, {}).items() if torch.is_tensor(v) and v.dim()}
                yield ParameterRange(parameter, where.start, where.end, main.detach(), state)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it holds. Without a second precision its weights are views of the model's."""
        for part in self.ranges():
            yield from (part.main, *part.state.values())

    def restore(self, updates: int, schedule_steps: int, state: dict[torch.nn.Parameter, dict[str, torch.Tensor]]) -> None:
        """Take over what a checkpoint holds. state: for each parameter of `ranges()`, its state tensors."""
        self.updates = updates
        self._schedule = self._new_schedule()
        self._schedule.advance(schedule_steps)
        for part in self._parts():
            # torch's Adam counts steps for each parameter, TransformerEngine's and apex's for each group.
            per_parameter = isinstance(part.optimizer, torch.optim.Adam)
            for parameter, (group, place) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][place]
                found = dict(state.get(parameter, {}))
                if found and per_parameter:
                    found["step"] = torch.tensor(float(updates))
                part.optimizer.state[main] = found
            if updates and not per_parameter:
                for group in part.optimizer.param_groups:
                    group["step"] = updates

    def _parts(self) -> list[Any]:
        """Megatron-Core's optimizers, of dense parameters and of experts, that have something to update."""
        return [part for part in self._core.chained_optimizers if part.optimizer is not None and part.get_parameters()]


class TorchLRSchedule:
    """A schedule of torch's, run on a stand-in, since Megatron-Core's optimizer is none of torch's."""

    def __init__(self, core: Any, config: CoreConfig, schedule: Any):
        self._core, self._config = core, config
        self._stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr)
        self._schedule = LRSchedule(self._stand_in, schedule)
        self._apply()

    @property
    def steps(self) -> int:
        return self._schedule.steps

    @property
    def lr(self) -> float:
        return self._schedule.lr

    def step(self) -> None:
        self.advance(1)

    def advance(self, steps: int) -> None:
        self._schedule.advance(steps)
        self._apply()

    def _apply(self) -> None:
        for group in self._core.param_groups:
            group["lr"] = self._schedule.lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]


class MegatronLRSchedule:
    """Megatron-Core's warm-up and decay, counted in steps of the algorithm."""

    def __init__(self, core: Any, config: CoreConfig, schedule: MegatronSchedulerConfig):
        if schedule.lr_decay_iters is None and schedule.lr_decay_style != "constant":
            raise ValueError(
                f"policy.megatron_cfg.scheduler.lr_decay_iters: {schedule.lr_decay_style} needs the number of steps it takes"
            )
        steps = max(schedule.lr_decay_iters or 0, schedule.lr_warmup_iters + 1)
        self.steps = 0
        self._core = core
        self._scheduler = OptimizerParamScheduler(
            core,
            init_lr=schedule.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=schedule.lr_warmup_iters,
            lr_decay_steps=steps,
            lr_decay_style=schedule.lr_decay_style,
            start_wd=config.weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
            end_wd=config.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
            wd_incr_steps=steps,
            wd_incr_style=schedule.weight_decay_incr_style,
        )

    @property
    def lr(self) -> float:
        return float(self._core.param_groups[0]["lr"])

    def step(self) -> None:
        self.advance(1)

    def advance(self, steps: int) -> None:
        self.steps += steps
        self._scheduler.step(increment=steps)


def _core_config(policy: PolicyConfig, own: MegatronOptimizerConfig | None) -> CoreConfig:
    shared = {
        "bf16": policy.precision == "bfloat16",
        "params_dtype": getattr(torch, policy.precision),
        "use_distributed_optimizer": True,
    }
    if own is not None:
        if own.optimizer != "adam":
            raise ValueError(
                "policy.megatron_cfg.optimizer.optimizer: Megatron-Core's distributed optimizer takes adam only,"
                f" not {own.optimizer}"
            )
        return CoreConfig(
            optimizer=own.optimizer,
            lr=own.lr,
            min_lr=own.min_lr,
            weight_decay=own.weight_decay,
            adam_beta1=own.adam_beta1,
            adam_beta2=own.adam_beta2,
            adam_eps=own.adam_eps,
            clip_grad=own.clip_grad or 0.0,
            **shared,
        )
    torch_config = policy.optimizer
    kwargs = dict(torch_config.kwargs)
    if torch_config.name not in ADAM:
        raise ValueError(
            f"policy.optimizer.name: the Megatron backend takes {', '.join(ADAM)}, not {torch_config.name}; or give"
            " policy.megatron_cfg.optimizer"
        )
    decoupled = ADAM[torch_config.name]
    lr, (beta1, beta2) = kwargs.pop("lr", 1e-3), kwargs.pop("betas", (0.9, 0.999))
    eps, decay = kwargs.pop("eps", 1e-8), kwargs.pop("weight_decay", 0.01 if decoupled else 0.0)
    for speed_only in ("fused", "foreach"):
        kwargs.pop(speed_only, None)
    if kwargs:
        raise ValueError(f"policy.optimizer.kwargs: Megatron-Core's optimizer does not take {', '.join(kwargs)}")
    return CoreConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=decay,
        decoupled_weight_decay=decoupled,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=eps,
        clip_grad=policy.max_grad_norm or 0.0,
        **shared,
    )
