"""The load-balancing loss has the value and the gradients of its formula at every layout, on both backends."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from pipeline import config
from tests.models import cases as models_of_both
from tests.problems import named
from tests.train import cases, load_balancing, ranks
from tests.train.megatron import layouts

F, M = ranks.Layout, layouts.Layout
TWO, QWEN = ("qwen3_moe", "deepseek_v3"), ("qwen3_moe",)
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    models_of_both.write_models(folder, layouts.MIXTURES)
    return folder


def layout(layout, families=TWO, batches=2, marks=(), **changes):
    kind = "fsdp" if isinstance(layout, F) else "megatron"
    name = "-".join([kind, layout.name, *(["every"] if families == layouts.MIXTURES else []), str(batches), *changes])
    return pytest.param(layout, families, {"batches": batches, **changes}, id=name, marks=marks)


RECOMPUTES = {"activation_checkpointing": True}
SELECTS = {**RECOMPUTES, "recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("layout", "families", "changes"),
    [
        layout(F(1, 1), batches=1),
        layout(F(1, 1), layouts.MIXTURES, 3, FULL),
        layout(F(1, 1), TWO, 2, FULL, **SELECTS),
        layout(F(1, 1, context=2), TWO, 2, FULL, replays=True),
        layout(F(2, 1, expert=2), marks=FULL),
        layout(F(1, 2), marks=FULL),
        layout(F(1, 2, sequence=True, expert=2), QWEN, 4, FULL, **RECOMPUTES),
        layout(F(1, 1, context=2), TWO, 2, **RECOMPUTES),
        layout(F(1, 2, context=2, sequence=True, expert=2), QWEN, 1, FULL, **RECOMPUTES),
        layout(M(), layouts.MIXTURES, 3, FULL),
        layout(M(dp=2, ep=2), marks=FULL),
        layout(M(tp=2, sp=True), TWO, 4, FULL, **RECOMPUTES),
        layout(M(cp=2, ep=2), TWO, 1, FULL),
        layout(M(pp=2), TWO, 4, **RECOMPUTES),
        layout(M(pp=2), QWEN, 4, FULL),
        layout(M(pp=2), TWO, 4, FULL, replays=True, **RECOMPUTES),
        layout(M(pp=2), QWEN, 4, FULL, **SELECTS, recompute_modules=["moe"]),
        layout(M(tp=2, cp=2, sp=True), QWEN, 2, FULL),
        layout(M(tp=2, pp=2, ep=2, sp=True), QWEN, 4, FULL, **RECOMPUTES),
    ],
)
def test_layouts_equal_the_formula(layout, families, changes, folder):
    ranks.run(functools.partial(load_balancing.check, families=families, **changes), layout, folder)


def test_a_scaled_loss_scales_it(folder, realm):
    load_balancing.check(F(1, 1), folder, QWEN, scale=1024.0)


def test_a_step_without_counted_tokens_has_no_imbalance(folder, realm):
    batch = load_balancing.pack([0, 1])
    nothing = {"loss_mask": torch.zeros_like(batch.loss_mask), "balance": torch.zeros(2)}
    backend = ranks.backend(cases.policy(folder / "qwen3_moe", moe_aux_loss_coeff=1.0))
    metrics = backend.step([dataclasses.replace(batch, **nothing)], cases.loss).metrics
    assert {name: value for name, value in metrics.items() if name.startswith("moe")} == {
        "moe_aux_loss": 0.0,
        "moe_load_imbalance": 0.0,
        "moe_load_imbalance_max": 0.0,
    }


ON, MEGATRON = "policy.moe_aux_loss_coeff=0.001", "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("recipe", "overrides", "problem"),
    [
        ("tiny_sft", (ON,), None),
        ("tiny_grpo", (ON, f"{MEGATRON}.enabled=true", f"{MEGATRON}.freeze_moe_router=false"), None),
        ("tiny_sft", ("policy.moe_aux_loss_coeff=-0.001",), ("policy.moe_aux_loss_coeff", "too-small")),
        ("tiny_lora", (ON,), ("policy.moe_aux_loss_coeff", "contradiction")),
        ("tiny_sft", (ON, f"{MEGATRON}.enabled=true"), ("policy.moe_aux_loss_coeff", "contradiction")),
        ("tiny_sft", (ON, "policy.dtensor_cfg.compile=true"), ("policy.dtensor_cfg.compile", "contradiction")),
        ("tiny_sft", (ON, f"{MEGATRON}.moe_aux_loss_coeff=0.1"), (f"{MEGATRON}.moe_aux_loss_coeff", "unsupported")),
    ],
)
def test_recipes(recipe, overrides, problem):
    assert named(config.inspect(recipe, overrides).problems) == ({problem} if problem else set())
