"""Checks of frozen parameters on the train ranks of either backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.models.frozen_names import matched
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole, TrainBackend
from tests.train import cases, ranks

FSDP = {
    "qwen2": ["model.embed_tokens.*", "model.layers.0.*", "*.bias"],  # nothing below the second layer trains
    "qwen3_tied": ["*.[qk]_norm.weight", "*.layers.1.mlp.*"],
    "qwen3_moe": ["*.experts.*", "*.self_attn.k_proj.*"],
    "mixtral": ["model.layers.0.*", "*.gate.weight"],
    "qwen3_values": ["model.embed_tokens.*", "*.mlp.*"],
}
MEGATRON = {
    "qwen2": ["model.embed_tokens.*", "model.layers.0.*", "*.bias"],  # nothing on the first of two stages trains
    "qwen3_tied": ["model.embed_tokens.*", "*.[qk]_norm.weight"],
    "llama": ["model.layers.1.*", "lm_head.*", "model.norm.*"],  # nothing on the last of two stages trains
    "qwen3_moe": ["*.experts.*", "*.self_attn.[qkv]_proj.*"],
    "deepseek_v3": ["model.layers.[01].*", "*.mlp.gate.*"],
}


def patterns_of(family: str, layout) -> list[str]:
    return (FSDP if isinstance(layout, ranks.Layout) else MEGATRON)[family]


def new(folder: Path, family: str, layout, patterns: Sequence[str], recompute: bool = False, **changes) -> TrainBackend:
    policy = cases.policy(folder / family, freeze_parameters=list(patterns), scheduler=ranks.SCHEDULER, **changes)
    role = ModelRole("values") if family.endswith("_values") else ModelRole()
    return layout.backend(policy, role, activation_checkpointing=recompute)


def families(changes: Mapping[str, Sequence[dict[str, Any]]], layout, folder: Path) -> None:
    """changes: {family: the changes of `new` of each check}. The last of them resumes, if the model is a policy."""
    for family, all_of in changes.items():
        for each in all_of:
            check(folder, family, layout, **each)
        if not family.endswith("_values"):
            check_resumed(folder, family, layout, **all_of[-1])


def check(folder: Path, family: str, layout, **changes) -> None:
    """Compare with a run in which all trains: the same gradients of the others, and their norm; no change of frozen weights."""
    patterns, loss = patterns_of(family, layout), cases.value_loss if family.endswith("_values") else cases.loss
    whole = new(folder, family, layout, [], **changes)
    whole.step(ranks.batches(whole, layout), loss)
    expected = layout.gradients(whole)
    trained = new(folder, family, layout, patterns, **changes)
    before = ranks.weights(trained)
    norm = trained.step(ranks.batches(trained, layout), loss).metrics["grad_norm"]
    found = layout.gradients(trained)
    assert found and found.keys() < expected.keys()
    # Megatron-Core has another function for frozen linear layers, which rounds otherwise in multi-latent attention.
    largest = max(gradient.abs().max().item() for gradient in expected.values()) if family == "deepseek_v3" else 0.0
    for name, gradient in found.items():
        assert gradient.equal(expected[name]) or (gradient - expected[name]).abs().max().item() <= 5e-6 * largest, name
    assert abs(torch.stack([g.double().norm() for g in found.values()]).norm().item() / norm - 1) < 1e-6
    for _ in range(2):
        trained.step(ranks.batches(trained, layout, 1), loss)
    check_optimized(trained, found.keys(), expected.keys())
    after, frozen = ranks.weights(trained), matched(patterns, before)
    if dist.get_rank() == 0:
        never = {name for name in before if name.endswith("e_score_correction_bias")}
        assert {name for name in before if torch.equal(before[name], after[name])} == frozen | never
        files = load_file(folder / family / "model.safetensors")
        assert all(torch.equal(after[name], files[name].to(after[name].dtype)) for name in frozen)
    cases.check_all_held(cases.check_layout(trained, {name: on_all(tensor) for name, tensor in after.items()}, 1e-2))


def check_optimized(trained: TrainBackend, gradients: Set[str], of_whole: Set[str]) -> None:
    """Check that the optimizer has the state of the parameters with gradients alone. of_whole: those if nothing is frozen."""
    if isinstance(trained, FSDPBackend):
        for name, parameter in trained._parameters.items():
            assert (parameter in trained._optimizer.state) == (name in gradients) == (parameter.grad is not None), name
        return
    assert gradients == of_whole - matched(trained._policy.freeze_parameters, trained.shapes)
    held = {id(part.parameter) for part in trained._optimizer.ranges()}
    for local in trained._local.values():
        assert local.tensor.requires_grad or id(local.tensor) not in held


def on_all(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's tensor on all ranks."""
    found = [tensor]
    dist.broadcast_object_list(found, 0)
    return found[0]


def check_resumed(folder: Path, family: str, layout, **changes) -> None:
    """Check that a run continues from its checkpoint to the bit."""
    trained = new(folder, family, layout, patterns_of(family, layout), **changes)
    mine = ranks.batches(trained, layout)
    cases.learn(trained, mine)
    saved = folder / f"frozen-{family}-{layout.name}"
    trained.shards().write(saved, dist.get_rank())
    dist.barrier()
    expected, weights = [cases.learn(trained, mine) for _ in range(2)], held(trained)
    again = new(folder, family, layout, patterns_of(family, layout), **changes)
    again.load(saved)
    assert [cases.learn(again, mine) for _ in range(2)] == expected
    assert weights and all(ours.dtype == w.dtype and ours.equal(w) for ours, w in zip(held(again), weights, strict=True))


def held(trained: TrainBackend) -> list[torch.Tensor]:
    """Return this rank's part of all weights, in the precision in which they train."""
    return [trained.local_tensor(name).clone() for name in sorted({region.tensor for region in trained.layout()})]
