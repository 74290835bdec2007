"""Checks of frozen parameters on FSDP2's train ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.models.frozen_names import matched
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from tests.train import cases, ranks
from tests.train.ranks import Layout, full

PATTERNS = {
    "qwen2": ["model.embed_tokens.*", "model.layers.0.*", "*.bias"],  # nothing below the second layer trains
    "qwen3_tied": ["*.[qk]_norm.weight", "*.layers.1.mlp.*"],
    "qwen3_moe": ["*.experts.*", "*.self_attn.k_proj.*"],
    "mixtral": ["model.layers.0.*", "*.gate.weight"],
}
VALUES = ["model.embed_tokens.*", "*.mlp.*"]


def new(folder: Path, family: str, layout: Layout, patterns: list[str], role: ModelRole | None = None, **changes):
    dtensor = {"activation_checkpointing": True} if changes.pop("recompute", False) else {}
    policy = cases.policy(folder / family, freeze_parameters=patterns, scheduler=ranks.SCHEDULER, **changes)
    return ranks.backend(policy, layout, role, **dtensor)


def precision(family: str) -> str:
    """Return the precision: torch multiplies no groups of Mixtral's 44 columns in bfloat16."""
    return "float32" if family == "mixtral" else "bfloat16"


def batches(trained: FSDPBackend, layout: Layout, count: int = 2) -> list:
    return [cases.pack(chosen) for chosen in ranks.shares(layout, count)[trained.data_rank]]


def families(chosen: tuple[str, ...], layout: Layout, folder: Path) -> None:
    for family in chosen:
        for changes in ({}, {"precision": precision(family)}, {"recompute": True}):
            check(folder, family, layout, PATTERNS[family], **changes)
        check_resumed(folder, family, layout)
    if layout.expert == 1:  # it has no experts
        check(folder, "qwen3_values", layout, VALUES, ModelRole("values"))


def check(folder: Path, family: str, layout: Layout, patterns: list[str], role: ModelRole | None = None, **changes) -> None:
    """Compare with a run in which all trains: the same gradients of the others, and their norm; no change of frozen weights."""
    loss = cases.loss if role is None else cases.value_loss
    whole = new(folder, family, layout, [], role, **changes)
    whole.step(batches(whole, layout), loss)
    expected = ranks.gradients(whole)
    trained = new(folder, family, layout, patterns, role, **changes)
    before = ranks.weights(trained)
    norm = trained.step(batches(trained, layout), loss).metrics["grad_norm"]
    found = ranks.gradients(trained)
    assert found and found.keys() < expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert abs(torch.stack([g.double().norm() for g in found.values()]).norm().item() / norm - 1) < 1e-6
    for _ in range(2):
        trained.step(batches(trained, layout, 1), loss)
    for name, parameter in trained._parameters.items():
        assert (parameter in trained._optimizer.state) == (name in found) == (parameter.grad is not None), name
    after, frozen = ranks.weights(trained), matched(patterns, before)
    if dist.get_rank() == 0:
        assert {name for name in before if torch.equal(before[name], after[name])} == frozen
        files = load_file(folder / family / "model.safetensors")
        assert all(torch.equal(after[name], files[name].to(after[name].dtype)) for name in frozen)
    cases.check_all_held(cases.check_layout(trained, {name: full_on_all(tensor) for name, tensor in after.items()}, 1e-2))


def full_on_all(tensor: torch.Tensor) -> torch.Tensor:
    """Return rank 0's tensor on all ranks."""
    found = [tensor]
    dist.broadcast_object_list(found, 0)
    return found[0]


def check_resumed(folder: Path, family: str, layout: Layout) -> None:
    """Check that a run continues from its checkpoint to the bit."""
    trained = new(folder, family, layout, PATTERNS[family], precision=precision(family))
    mine = batches(trained, layout)
    cases.learn(trained, mine)
    saved = folder / f"frozen-{family}-{layout.name}"
    trained.shards().write(saved, dist.get_rank())
    dist.barrier()
    again = new(folder, family, layout, PATTERNS[family], precision=precision(family))
    again.load(saved)
    assert [cases.learn(again, mine) for _ in range(2)] == [cases.learn(trained, mine) for _ in range(2)]
    for ours, theirs in zip(again._parameters.values(), trained._parameters.values(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(full(ours), full(theirs))
