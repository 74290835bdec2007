"""Tiny mixtures of experts for expert parallelism, and the checks of their ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from pipeline.train.fsdp import FSDPBackend
from pipeline.train.shards import local
from pipeline.train.train_backend import ModelRole
from tests.train import cases, model_roles, offloads, ranks
from tests.train.ranks import Layout

WITHIN = 3e-6  # of the largest gradient: see cases.tolerance


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "qwen3_moe": Qwen3MoeConfig(  # the second layer is dense
            **cases.SHAPE,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        "mixtral": MixtralConfig(
            **{**cases.SHAPE, "intermediate_size": 48},  # transformers' grouped products in half precision take multiples of 8
            num_local_experts=4,
            num_experts_per_tok=2,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        ),
        "deepseek_v3": DeepseekV3Config(
            **{**cases.SHAPE, "num_key_value_heads": 4},
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            tie_word_embeddings=False,
        ),
    }


def write_mixtures(folder: Path) -> None:
    """Write one checkpoint per family. Every tensor is random, also the bias that balances experts."""
    for family, config in configs().items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        saved = model.state_dict()
        with torch.no_grad():
            for name, tensor in saved.items():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder / family)


def against_eager(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Compare log-probs and gradients of each family with HF eager, and the weights with the files.

    DeepSeek recomputes operators. Its experts are in the last layer, which gathers them in another order in the backward pass.
    """
    for family in families:
        recomputes = {"activation_checkpointing": family == "deepseek_v3", "recompute_granularity": "selective"}
        trained = ranks.backend(cases.policy(folder / family), layout, **recomputes)
        ranks.check_weights_are_the_files(trained, folder / family)
        ranks.check_against_eager(trained, layout, folder / family, WITHIN)


# ---- everything else that a run does ------------------------------------------------------------------------------------


def whole_runs(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Check recomputation, bfloat16, checkpoints, offloading, exports, a reference, a teacher and a critic."""
    for family in families:
        _check_recomputed(layout, folder, family)
        ranks.check_bfloat16(layout, folder, family)
        ranks.check_save_and_load(layout, folder, family)
        _check_offload(layout, folder, family)
        _check_several_at_once(layout, folder, family)
        _export(layout, folder, family)


def _check_recomputed(layout: Layout, folder: Path, family: str) -> None:
    """Check that gradients with recomputation are the same to the last bit."""
    found = []
    for settings in ({}, {"activation_checkpointing": True}, {"activation_checkpointing": True, **SELECTIVE}):
        trained = ranks.backend(cases.policy(folder / family), layout, **settings)
        trained.step(_batches(trained, layout), cases.loss)
        found.append(ranks.gradients(trained))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]) and torch.equal(gradient, found[2][name]), name


SELECTIVE = {"recompute_granularity": "selective"}


def _batches(trained: FSDPBackend, layout: Layout) -> list:
    return [cases.pack(chosen) for chosen in ranks.shares(layout)[trained.data_rank]]


def _check_offload(layout: Layout, folder: Path, family: str) -> None:
    def new() -> FSDPBackend:
        return ranks.backend(cases.policy(folder / family, scheduler=ranks.SCHEDULER, max_grad_norm=0.5), layout)

    def states(trained: FSDPBackend) -> list[torch.Tensor]:
        return [local(value) for state in trained._optimizer.state.values() for value in state.values() if value.dim()]

    offloads.check(new, _batches(new(), layout), states)


def _check_several_at_once(layout: Layout, folder: Path, family: str) -> None:
    """Check that a policy with its reference, a critic and a frozen teacher each behave as they do alone."""
    critic_too = family != "deepseek_v3"  # transformers has no sequence classifier of it
    policy = ranks.backend(cases.policy(folder / family), layout, ModelRole(reference=True, entropy=True))
    frozen = ranks.backend(cases.policy(folder / family), layout, ModelRole(trained=False, offload=True))
    alone = ranks.backend(cases.policy(folder / family), layout)
    packed = _batches(policy, layout)
    initial = [out.logprobs for out in alone.forward(packed)]
    assert all(torch.equal(out.logprobs, first) for out, first in zip(frozen.forward(packed), initial, strict=True))
    for _ in range(2):
        teachers = frozen.forward(packed, top_k=model_roles.CANDIDATES)
        taught = [dataclasses.replace(batch, teacher=t.top_k) for batch, t in zip(packed, teachers, strict=True)]
        reference = policy.forward(packed, "reference")
        assert all(torch.equal(out.logprobs, first) for out, first in zip(reference, initial, strict=True))
        assert policy.step(taught, cases.loss).metrics == alone.step(packed, cases.loss).metrics
    if critic_too:
        critics = [ranks.backend(cases.policy(folder / family), at, model_roles.VALUES) for at in (layout,)]
        before = critics[0].forward(packed)
        critics[0].step(packed, cases.value_loss)
        assert any((a.values - b.values).abs().max() > 1e-4 for a, b in zip(before, critics[0].forward(packed), strict=True))


def _export(layout: Layout, folder: Path, family: str) -> None:
    """Save a trained policy as a checkpoint, and its weights and log-probs."""
    trained = ranks.backend(cases.policy(folder / family), layout)
    trained.step(_batches(trained, layout), cases.loss)
    place = exported_by(folder, layout, family)
    trained.shards().write(place / "checkpoint", dist.get_rank())
    weights = ranks.weights(trained)
    logprobs = trained.forward([cases.pack(list(range(len(cases.LENGTHS))))])[0].logprobs
    if dist.get_rank() == 0:
        save_file(weights, place / "weights.safetensors")
        save_file({"logprobs": logprobs}, place / "logprobs.safetensors")


def exported_by(folder: Path, layout: Layout, family: str) -> Path:
    return folder / "exported" / f"{family}-{layout.name}"


def go_on(families: tuple[str, ...], by: Layout, layout: Layout, folder: Path) -> None:
    """Check that what the ranks of another layout, `by`, saved goes on at this one as it did there."""
    for family in families:
        saved = folder / ranks.saved_by(by, family)
        trained = ranks.backend(cases.policy(folder / family, scheduler=ranks.SCHEDULER), layout)
        trained.load(saved)
        metrics = [cases.learn(trained, _batches(trained, layout)) for _ in range(2)]
        for ours, theirs in zip(metrics, json.loads((saved / "after.json").read_text()), strict=True):
            assert ours["lr"] == theirs["lr"]
            assert abs(ours["loss"] - theirs["loss"]) < 1e-6
            assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) < 1e-5
