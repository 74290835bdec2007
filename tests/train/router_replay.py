"""Recorded experts for the sequences of `cases`, and Hugging Face's eager model with routers that take them.

The routers here are written out, so that they share nothing with the product's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.config.policy import RouterReplayConfig
from pipeline.train.expert_parallel import expert_modules
from pipeline.types import NO_EXPERT, PackedBatch
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.parity import references

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def experts(layers: int, count: int, chosen: int) -> list[torch.Tensor]:
    """Return experts of each sequence, [L, layers, chosen] int32, drawn at random; none for a fifth of the tokens."""
    generator = torch.Generator().manual_seed(5)
    drawn = []
    for length in cases.LENGTHS:
        rows = torch.rand(length, layers, count, generator=generator).argsort(-1)[..., :chosen].int()
        rows[torch.rand(length, generator=generator) < 0.2] = NO_EXPERT
        drawn.append(rows)
    return drawn


def of_model(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return `experts` for a model."""
    mixtures = expert_modules(model)
    config = model.config
    return experts(len(mixtures), int(next(iter(mixtures.values())).num_experts), config.num_experts_per_tok)


def pack(chosen: Sequence[int], recorded: list[torch.Tensor]) -> PackedBatch:
    """Return `cases.pack` with recorded experts."""
    return dataclasses.replace(cases.pack(list(chosen)), experts=torch.cat([recorded[i] for i in chosen]))


def eager(folder: Path) -> ranks.Expected:
    """Return (log-probs, gradients by name on disk, loss) of the model in float64 with the recorded experts."""
    model = cases.eager_model(AutoModelForCausalLM, folder, torch.float64)
    force(model)
    logprobs, total = cases.logprobs_and_loss(model)
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (
        logprobs,
        references.stored(references.Reference(logprobs, gradients, total.item()), folder).gradients,
        total.detach(),
    )


def force(model: PreTrainedModel) -> None:
    """Make the routers of a model, which computes one sequence after the other, take the recorded experts."""
    sequences = iter(of_model(model))
    now: list[torch.Tensor] = [torch.empty(0)]
    model.register_forward_pre_hook(lambda *_: now.__setitem__(0, next(sequences)))
    for layer, name in enumerate(expert_modules(model)):
        mixture = model.get_submodule(name.rpartition(".")[0])
        (router,) = (module for module in mixture.children() if "router" in type(module).__name__.lower())
        own = router.forward

        def forward(hidden: torch.Tensor, own=own, router=router, layer=layer):
            logits, _, chosen = own(hidden)
            given = now[0][:, layer].long()
            given = torch.where(given == NO_EXPERT, chosen, given)
            return logits, _weights(model.config.model_type, router, logits, given), given

        router.forward = forward


def _weights(family: str, router: torch.nn.Module, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weights of each token's experts, by the family's paper."""
    if family == "gpt_oss":  # a softmax over the chosen
        return logits.gather(1, experts).softmax(-1)
    if family == "deepseek_v3":  # equation 13 to 15 of https://arxiv.org/abs/2412.19437
        weights = logits.sigmoid().gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    weights = F.softmax(logits, -1, dtype=torch.float32).to(logits.dtype).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True)


def check(layout: ranks.Layout | layouts.Layout, folder: Path, families: Sequence[str] = FAMILIES, **changes) -> None:
    """Compare log-probs, gradients and loss of one step with the eager model's, on every rank. changes: of the backend."""
    for family in families:
        policy = cases.policy(folder / family, router_replay=RouterReplayConfig(True))
        trained = layout.backend(policy, **changes)
        expected = eager(folder / family)
        recorded = of_model(cases.eager_model(AutoModelForCausalLM, folder / family, torch.float32))
        mine = ranks.shares(layout)[trained.data_rank]
        batches = [pack(members, recorded) for members in mine]
        for members, outputs in zip(mine, trained.forward(batches), strict=True):
            assert (outputs.logprobs - torch.cat([expected[0][i] for i in members])).abs().max() < 1e-5
        metrics = trained.step(batches, cases.loss).metrics
        found = layout.gradients(trained)
        if isinstance(layout, ranks.Layout):
            found = references.stored(references.Reference([], found, 0.0), folder / family).gradients
        ranks.assert_near(found, {name: expected[1][name] for name in found}, 3e-6)
        assert abs(metrics["loss"] - expected[2].item()) < 1e-5
        if isinstance(layout, layouts.Layout):
            layouts.release()
