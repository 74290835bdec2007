"""A critic's schedule in torch's words has Megatron-Core's rates, step by step."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pipeline.train.optimizer import Schedule
from tests.nemo_rl.test_translation import read

STEPS = 14


@pytest.mark.parametrize("start", [1e-6, 0.0])
def test_rates(start: float) -> None:
    value = read("ppo", f"value.megatron_cfg.scheduler.lr_warmup_init={start}").value
    rate = value.optimizer.kwargs["lr"]
    ours = Schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate), value.scheduler)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=start,
        max_lr=rate,
        min_lr=0.0,
        lr_warmup_steps=10,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=1000,
        wd_incr_style="constant",
    )
    for _ in range(STEPS):
        assert ours.lr == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-15)
        ours.step()
        theirs.step(1)
