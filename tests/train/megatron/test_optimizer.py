"""Compare Megatron-Core's distributed optimizer with torch's on the same gradients, and its schedules with closed forms."""

import functools
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.config import MegatronOptimizerConfig, MegatronSchedulerConfig, OptimizerConfig
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, DP2, EP2, ONE, PP2, TP2_SP, Layout

KWARGS = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
OWN = MegatronOptimizerConfig(lr=1e-3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, weight_decay=0.3, clip_grad=0.1)
# What the recipe has: (policy, megatron_cfg, torch's optimizer that it means, whether norms and biases are decayed).
SETTINGS = {
    "adamw": ({"optimizer": OptimizerConfig("torch.optim.AdamW", KWARGS)}, {}, torch.optim.AdamW, True),
    "adam": ({"optimizer": OptimizerConfig("torch.optim.Adam", KWARGS)}, {}, torch.optim.Adam, True),
    "megatron": ({"max_grad_norm": 7.0}, {"optimizer": OWN}, torch.optim.AdamW, False),
}


def check_steps(layout: Layout, folder: Path, family: str, setting: str) -> None:
    """Check that three clipped steps equal those of torch's optimizer on the full gradients of Hugging Face's tensors."""
    policy, megatron, optimizer, all_decayed = SETTINGS[setting]
    trained = layouts.backend(cases.policy(folder / family, **{"max_grad_norm": 0.1, **policy}), layout, **megatron)
    theirs = ranks.weights(trained)
    decayed = [p for p in theirs.values() if all_decayed or p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0}]
    torchs = optimizer(groups[:1] if all_decayed else groups, **KWARGS)
    for _ in range(3):
        metrics = trained.step(ranks.batches(trained, layout), cases.loss).metrics
        found, _ = layouts.gradients(trained)
        assert metrics["grad_norm"] > 0.2
        assert torch.stack([g.norm() for g in found.values()]).norm() == pytest.approx(0.1, rel=1e-4)
        ours = ranks.weights(trained)
        if dist.get_rank() == 0:
            for name, tensor in theirs.items():
                tensor.grad = found.get(name)
            torchs.step()
            far = {name: d for name in ours if (d := (ours[name] - theirs[name]).abs().max().item()) > 1e-6}
            assert not far, far


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_steps_equal_torchs(models, realm, family, setting):
    check_steps(ONE, models, family, setting)


def several(settings: Iterable[tuple[str, str]], layout: Layout, folder: Path) -> None:
    for family, setting in settings:
        check_steps(layout, folder, family, setting)


QUICK = {TP2_SP: (("qwen3_moe", "adamw"),), EP2: (("mixtral", "megatron"),)}
FULL = (TP2_SP, PP2, CP2, DP2, EP2)


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_steps_equal_torchs_in_any_layout(models, layout):
    ranks.run(functools.partial(several, QUICK[layout]), layout, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL, ids=lambda layout: layout.name)
def test_steps_equal_torchs_with_either_optimizer(models, layout):
    settings = (("qwen3_moe", "adamw"), ("mixtral" if layout.ep > 1 else "qwen3_tied", "megatron"))
    ranks.run(functools.partial(several, settings), layout, models)


def inverse_square_root(step: int) -> float:
    return max(1e-3 * math.sqrt(3) / math.sqrt(step), 1e-4)


def decayed(share: float) -> float:
    return 1e-4 + 9e-4 * share


DECAYS = {  # after 3 steps of warm-up, until step 8
    "constant": lambda step: 1e-3,
    "linear": lambda step: decayed(max(0.0, 1 - (step - 3) / 5)),
    "cosine": lambda step: decayed(0.5 * (1 + math.cos(math.pi * min(1.0, (step - 3) / 5)))),
    "inverse-square-root": lambda step: inverse_square_root(step) if step <= 8 else 1e-4,
}


@pytest.mark.parametrize("style", DECAYS)
def test_megatrons_schedule(models, realm, style):
    """Check that the first step uses lr_warmup_init, and step n of the warm-up is n / 3 of the way from there."""
    optimizer = MegatronOptimizerConfig(lr=1e-3, min_lr=1e-4, clip_grad=None)
    scheduler = MegatronSchedulerConfig(lr_decay_style=style, lr_decay_iters=8, lr_warmup_iters=3, lr_warmup_init=1e-5)
    trained = layouts.backend(cases.policy(models / "qwen3"), ONE, optimizer=optimizer, scheduler=scheduler)
    batch = [cases.pack([1])]
    found = [cases.learn(trained, batch)["lr"] for _ in range(11)]
    warm_up = [1e-5 + (1e-3 - 1e-5) * step / 3 for step in range(3)]
    assert found == pytest.approx([*warm_up, *(DECAYS[style](step) for step in range(3, 11))])
    # The rate that is told is the rate that is used: Adam's step is as long, where the gradient is not near 0.
    before = [part.main.clone() for part in trained._optimizer.ranges()]
    lr = trained.step(batch, cases.loss).metrics["lr"]
    longest = max((part.main - old).abs().max().item() for part, old in zip(trained._optimizer.ranges(), before, strict=True))
    assert 0.5 * lr < longest < 3 * lr


def test_torchs_schedules(models, realm):
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.25, "total_iters": 3}}
    cosine = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 4}}
    policy = cases.policy(models / "qwen3", scheduler=[linear, cosine, {"milestones": [3]}])
    trained = layouts.backend(policy)
    found = [cases.learn(trained, [cases.pack([1])])["lr"] for _ in range(7)]
    warm_up = [1e-3 * (0.25 + 0.75 * step / 3) for step in range(3)]
    assert found == pytest.approx([*warm_up, *(1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4))])


@pytest.mark.parametrize(
    ("optimizer", "key", "code"),
    [
        (
            OptimizerConfig("torch.optim.SGD", {"lr": 0.1}),
            "policy.optimizer.name",
            "not-a-choice",
        ),
        (OptimizerConfig(kwargs={"lr": 0.1, "amsgrad": True}), "policy.optimizer.kwargs", "unsupported"),
    ],
)
def test_other_optimizers_are_refused(models, realm, optimizer, key, code):
    with refused((key, code)):
        layouts.backend(cases.policy(models / "qwen3", optimizer=optimizer))
