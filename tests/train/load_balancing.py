"""Hugging Face's eager model in float64 with the load-balancing loss, by autograd on the formula of each sequence.

It shares nothing with the product: the logits come from the routers' outputs, the experts from torch.topk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.algorithms.reductions import sequence_weights
from pipeline.config.policy import RouterReplayConfig
from pipeline.train.fsdp import FSDPBackend
from pipeline.types import GlobalCounts, PackedBatch
from tests.train import cases, ranks, router_replay
from tests.train.megatron import layouts
from tests.train.parity import references

COEFFICIENT = 5.0  # so that the gradient is as large as the policy loss's
SIGMOID = ("deepseek_v3", "deepseek_v3_plain", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2", "nemotron_h_moe")


class Balanced(NamedTuple):
    """The expected gradients and metrics of a step with the load-balancing loss."""

    gradients: dict[str, torch.Tensor]  # by name on disk
    loss: float  # the policy's
    aux: float  # mean over layers, and over sequences by weight
    imbalance: list[float]  # of each layer: the busiest expert's tokens over the average expert's


def mask() -> list[torch.Tensor]:
    """Return which tokens of each sequence the loss counts: all but the first third, and none of the sixth sequence."""
    masks = [torch.arange(length) >= length // 3 for length in cases.LENGTHS]
    masks[5] = torch.zeros(cases.LENGTHS[5], dtype=torch.bool)
    return masks


def pack(chosen: Sequence[int], device: str | torch.device = "cpu") -> PackedBatch:
    """Return `cases.pack` with the mask and the weights of a step of all sequences."""
    masks = mask()
    counts = GlobalCounts(sum(int(m.sum()) for m in masks), len(masks))
    batch = dataclasses.replace(cases.pack(list(chosen)), loss_mask=torch.cat([masks[i] for i in chosen]))
    return dataclasses.replace(batch, balance=sequence_weights(batch, counts))


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the routers, in the order of layers."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("router")]


def eager(folder: Path, replays: bool = False) -> Balanced:
    """Return what one step of all sequences must give. replays: whether routers take recorded experts."""
    model = cases.eager_model(AutoModelForCausalLM, folder, torch.float64)
    if replays:
        router_replay.force(model)
    config, sigmoid = model.config, folder.name in SIGMOID
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # by router: (logits, experts) of each sequence
    for router in routers(model):
        seen.append([])
        router.register_forward_hook(lambda _, __, out, of=seen[-1]: of.append((out[0], out[2])))
    logprobs, total = cases.logprobs_and_loss(model)
    masks, chosen = mask(), config.num_experts_per_tok
    all_counted = sum(int(m.sum()) for m in masks)
    aux, imbalance = [], []
    for layer in seen:
        losses, loads = [], 0
        for (logits, went), counted in zip(layer, masks, strict=True):
            logits = logits.double()
            p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
            tokens, experts = p.shape
            assert tokens == len(counted)
            f = torch.bincount(p.topk(chosen).indices.flatten(), minlength=experts) * experts / (chosen * tokens)
            losses.append(counted.sum() / all_counted * (f * p.mean(0)).sum())
            loads += torch.bincount(went.flatten(), minlength=experts) * int(counted.any())
        aux.append(torch.stack(losses).sum())
        imbalance.append((loads.max() / loads.double().mean()).item())
    (total + COEFFICIENT * torch.stack(aux).sum()).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    stored = references.stored(references.Reference(logprobs, found, total.item()), folder).gradients
    return Balanced(stored, total.item(), torch.stack(aux).mean().item(), imbalance)


def check(
    layout: ranks.Layout | layouts.Layout,
    folder: Path,
    families: Sequence[str],
    batches: int = 2,
    scale: float = 1.0,
    replays: bool = False,
    **changes,
) -> None:
    """Compare the gradients and metrics of one step with the eager model's, on every rank.

    scale: of the loss before it is differentiated, as float16 needs it. replays: whether routers take recorded experts.
    changes: of the backend.
    """
    for family in families:
        policy = cases.policy(folder / family, moe_aux_loss_coeff=COEFFICIENT, router_replay=RouterReplayConfig(replays))
        trained, expected = layout.backend(policy, **changes), eager(folder / family, replays)
        if isinstance(trained, FSDPBackend):
            trained._scale.factor = scale
        mine = ranks.shares(layout, batches)[trained.data_rank]
        packed = [pack(members) for members in mine]
        if replays:
            recorded = router_replay.of_model(cases.eager_model(AutoModelForCausalLM, folder / family, torch.float32))
            packed = [
                dataclasses.replace(batch, experts=torch.cat([recorded[i] for i in members]))
                for batch, members in zip(packed, mine, strict=True)
            ]
        metrics = trained.step(packed, cases.loss).metrics
        found = layout.gradients(trained)
        if isinstance(layout, ranks.Layout):
            found = references.stored(references.Reference([], found, 0.0), folder / family).gradients
        ranks.assert_near(found, {name: expected.gradients[name] for name in found}, 3e-6)
        assert abs(metrics["loss"] - expected.loss) < 1e-5
        assert abs(metrics["moe_aux_loss"] - expected.aux) < 1e-6
        assert abs(metrics["moe_load_imbalance"] - sum(expected.imbalance) / len(expected.imbalance)) < 1e-9
        assert abs(metrics["moe_load_imbalance_max"] - max(expected.imbalance)) < 1e-9
        if isinstance(layout, layouts.Layout):
            layouts.release()
