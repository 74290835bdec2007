"""A policy that replays an engine's routing computes what a model with these routers' choices computes, at every layout."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from pipeline.config.policy import RouterReplayConfig
from pipeline.train.train_backend import ModelRole
from tests.models import cases as models_of_both
from tests.train import cases, ranks, router_replay
from tests.train.megatron import layouts

F, M = ranks.Layout, layouts.Layout
QWEN = ("qwen3_moe",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    models_of_both.write_models(folder, router_replay.FAMILIES)
    return folder


def layout(layout, families, marks=(), **changes):
    kind = "fsdp" if isinstance(layout, F) else "megatron"
    return pytest.param(layout, families, changes, id="-".join([kind, layout.name, *changes]), marks=marks)


@pytest.mark.parametrize(
    ("layout", "families", "changes"),
    [
        layout(F(1, 1), router_replay.FAMILIES),
        layout(F(1, 2, sequence=True, expert=2), QWEN, pytest.mark.full, activation_checkpointing=True),
        layout(F(1, 1, context=2, expert=2), router_replay.FAMILIES, pytest.mark.full),
        layout(F(2, 2, expert=2), QWEN, pytest.mark.full),
        layout(M(), router_replay.FAMILIES, pytest.mark.full),
        layout(M(pp=2), QWEN, activation_checkpointing=True),
        layout(M(tp=2, ep=2, sp=True), QWEN, pytest.mark.full, activation_checkpointing=True),
        layout(M(cp=2, ep=2), router_replay.FAMILIES, pytest.mark.full),
        layout(M(tp=2, pp=2, ep=2, sp=True), QWEN, pytest.mark.full, activation_checkpointing=True),
        layout(M(pp=2), QWEN, pytest.mark.full, recompute_granularity="selective", recompute_modules=["moe"]),
    ],
)
def test_layouts_equal_eager_routers_that_take_the_recorded_experts(layout, families, changes, folder):
    ranks.run(functools.partial(router_replay.check, families=families, **changes), layout, folder)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_model_chooses_its_own_experts(adapted, folder, realm):
    lora = {"lora_cfg": dataclasses.replace(cases.policy("").dtensor_cfg.lora_cfg, enabled=adapted)}
    policy = cases.policy(folder / "qwen3_moe", router_replay=RouterReplayConfig(True))
    trained = ranks.backend(policy, F(1, 1), ModelRole(reference=True), **lora)
    batch = router_replay.pack([3, 6], router_replay.of_model(trained._model.hf))
    own, replayed = trained.forward([batch], "reference"), trained.forward([batch])
    plain = trained.forward([dataclasses.replace(batch, experts=None)])
    torch.testing.assert_close(own[0].logprobs, plain[0].logprobs)
    assert (own[0].logprobs - replayed[0].logprobs).abs().max() > 0.01
