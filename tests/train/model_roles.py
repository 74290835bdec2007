"""Checks of train ranks with models other than a trained policy: value models, frozen ones, several at once.

Each function is called SPMD with (layout, folder), as those of `ranks`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from pipeline.types import LossOutput, Outputs, PackedBatch, TopK
from tests.train import cases, ranks
from tests.train.ranks import Layout

CANDIDATES = 3
VALUES = ModelRole("values")


def all_roles(layout: Layout, folder: Path) -> None:
    for family in set(cases.VALUED) & set(ranks.families(layout)):
        check_values(layout, folder, family)
        check_value_head_on_a_language_model(layout, folder, family)
    ranks.check_save_and_load(layout, folder, "qwen3_values", VALUES, cases.value_loss)
    check_random_values(layout, folder)
    check_frozen(layout, folder)
    check_entropy_and_tokens(layout, folder)
    check_several_at_once(layout, folder)
    save_values(layout, folder)


def batches(trained: FSDPBackend, layout: Layout) -> tuple[list[list[int]], list[PackedBatch]]:
    """Return this rank's sequences, and the batches made of them."""
    mine = ranks.shares(layout)[trained.data_rank]
    return mine, [cases.pack(chosen) for chosen in mine]


def check_values(layout: Layout, folder: Path, family: str) -> None:
    """Compare values, loss and every gradient with transformers' classifier."""
    model = folder / f"{family}_values"
    trained = ranks.backend(cases.policy(model), layout, VALUES)
    ranks.check_weights_are_the_files(trained, model)
    values, gradients, total = cases.eager_values(model)
    scores = cases.eager_scores(model)
    mine, packed = batches(trained, layout)
    for chosen, found in zip(mine, trained.forward(packed), strict=True):
        assert (found.logprobs, found.entropy, found.top_k) == (None, None, None)
        assert found.values.dtype == torch.float32 and not found.values.requires_grad
        for i, ours in zip(chosen, found.values.split([cases.LENGTHS[i] for i in chosen]), strict=True):
            assert (ours - values[i]).abs().max() < 1e-5
            assert abs(ours[-1] - scores[i]) < 1e-5
    metrics = trained.step(packed, cases.value_loss).metrics
    ranks.assert_near(ranks.gradients(trained), gradients, 3e-6)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert abs(metrics["grad_norm"] / norm - 1) < 2e-6
    assert abs(metrics["loss"] - total.item()) < 1e-6


def check_value_head_on_a_language_model(layout: Layout, folder: Path, family: str) -> None:
    """Check that the body is the checkpoint's, and that the head follows from the seed, the same on every layout."""
    ours = ranks.weights(ranks.backend(cases.policy(folder / family), layout, VALUES))
    files = load_file(folder / family / "model.safetensors")
    assert ours.keys() == files.keys() - {"lm_head.weight"} | {"score.weight"}
    if dist.get_rank() == 0:
        assert all(torch.equal(tensor, files[name]) for name, tensor in ours.items() if name != "score.weight")
        expected = torch.empty(1, 32).normal_(std=0.02, generator=torch.Generator().manual_seed(7))
        assert torch.equal(ours["score.weight"], expected)


def check_random_values(layout: Layout, folder: Path) -> None:
    """Check that random weights are the same on every layout: the first one saves its weights, the others compare with them."""
    ours = ranks.weights(ranks.backend(cases.policy(folder / "qwen3", random_init=True), layout, VALUES))
    if dist.get_rank() == 0:
        assert 0.01 < ours["score.weight"].std() < 0.03
        if (folder / "random.safetensors").exists():
            expected = load_file(folder / "random.safetensors")
            assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())
        else:
            save_file(ours, folder / "random.safetensors")


def check_frozen(layout: Layout, folder: Path) -> None:
    """Check that a frozen model's outputs equal a trained one's to the last bit, at half the memory or less."""
    for precision in ("float32", "bfloat16"):
        for head, model in (("logprobs", "qwen3_tied"), ("values", "qwen3_values")):
            trained = ranks.backend(cases.policy(folder / model, precision=precision), layout, ModelRole(head))
            frozen = ranks.backend(
                cases.policy(folder / model, precision=precision), layout, ModelRole(head, trained=False, offload=True)
            )
            parameters = list(frozen._model.parameters())
            assert {p.dtype for p in parameters} == {getattr(torch, precision)}
            assert not any(p.requires_grad for p in parameters)
            _, packed = batches(trained, layout)
            field = "logprobs" if head == "logprobs" else "values"
            for ours, theirs in zip(frozen.forward(packed), trained.forward(packed), strict=True):
                assert torch.equal(getattr(ours, field), getattr(theirs, field))


def check_entropy_and_tokens(layout: Layout, folder: Path) -> None:
    """Check entropy and most likely tokens in a forward pass; entropy and a teacher's tokens, with gradients, in a step."""
    model = folder / "qwen3"
    trained = ranks.backend(cases.policy(model), layout, ModelRole(entropy=True))
    tables, gradients = tables_and_gradients(model)
    mine, packed = batches(trained, layout)
    for chosen, found in zip(mine, trained.forward(packed, top_k=4), strict=True):
        table = torch.cat([tables[i] for i in chosen])  # [T, V], 0 where a sequence begins
        expected = table.topk(4)
        begins = table.eq(0).all(1)
        assert (found.entropy - entropies(table)).abs().max() < 1e-5
        assert (found.top_k.logprobs - expected.values).abs().max() < 1e-5
        assert torch.equal(found.top_k.tokens, expected.indices.masked_fill(begins[:, None], 0))
    assert all(found.top_k is None for found in trained.forward(packed))
    taught = [dataclasses.replace(batch, teacher=teacher(batch)) for batch in packed]
    trained.step(taught, loss_of_all)
    ranks.assert_near(ranks.gradients(trained), gradients, 2e-6)


def teacher(batch: PackedBatch) -> TopK:
    tokens = torch.stack([(batch.tokens * factor + 1) % cases.VOCABULARY for factor in range(CANDIDATES)], 1)
    return TopK(tokens, torch.zeros(tokens.shape))


def loss_of_all(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    begins = (batch.positions == 0)[:, None]
    assert torch.equal(outputs.top_k.tokens, batch.teacher.tokens.masked_fill(begins, 0))
    of_tokens = (outputs.top_k.logprobs * torch.arange(1, CANDIDATES + 1)).sum(1)
    share = ((outputs.entropy + of_tokens) * batch.advantages).sum() / sum(cases.LENGTHS)
    return LossOutput(share, {})


def entropies(table: torch.Tensor) -> torch.Tensor:
    return -(table.exp() * table).sum(1)


def tables_and_gradients(model: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return, by HF eager in float64, each sequence's log-probs of all tokens [L, V], and the gradients of `loss_of_all`."""
    eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    tables, total = [], 0.0
    for i, (tokens, weights) in enumerate(cases.sequences()):
        table = (eager(tokens[None]).logits[0, :-1] / cases.TEMPERATURE).log_softmax(-1)
        tables.append(torch.cat([torch.zeros(1, cases.VOCABULARY), table.detach()]))
        of_tokens = table.gather(1, teacher(cases.pack([i])).tokens[1:]) * torch.arange(1, CANDIDATES + 1)
        total = total + ((entropies(table) + of_tokens.sum(1)) * weights[1:]).sum() / sum(cases.LENGTHS)
    total.backward()
    return tables, {name: parameter.grad for name, parameter in eager.named_parameters()}


def check_several_at_once(
    layout: Layout, folder: Path, family: str = "qwen3", teacher: str = "llama", critic_too: bool = True
) -> None:
    """Check that a policy with its reference, its critic and a teacher in one process each behave as they do alone."""
    policy = ranks.backend(cases.policy(folder / family), layout, ModelRole(reference=True, entropy=True))
    critic = ranks.backend(cases.policy(folder / family), layout, VALUES if critic_too else ModelRole())
    frozen = ranks.backend(cases.policy(folder / teacher, precision="bfloat16"), layout, ModelRole(trained=False, offload=True))
    alone = ranks.backend(cases.policy(folder / family), layout)
    _, packed = batches(policy, layout)
    initial = [out.logprobs for out in alone.forward(packed)]
    for _ in range(2):
        taught = [
            dataclasses.replace(batch, teacher=found.top_k)
            for batch, found in zip(packed, frozen.forward(packed, top_k=CANDIDATES), strict=True)
        ]
        reference = policy.forward(packed, "reference")
        assert all(torch.equal(out.logprobs, first) for out, first in zip(reference, initial, strict=True))
        outputs = critic.forward(packed)
        critic.step(taught, cases.value_loss if critic_too else cases.loss)
        metrics = policy.step(taught, cases.loss).metrics
        assert metrics == alone.step(packed, cases.loss).metrics
    pairs = zip(policy._model.parameters(), alone._model.parameters(), strict=True)
    assert all(torch.equal(ranks.full(a), ranks.full(b)) for a, b in pairs)
    field = "values" if critic_too else "logprobs"
    changed = zip(outputs, critic.forward(packed), strict=True)
    assert any((getattr(a, field) - getattr(b, field)).abs().max() > 1e-4 for a, b in changed)
    again = zip(reference, policy.forward(packed, "reference"), strict=True)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in again)


def save_values(layout: Layout, folder: Path) -> None:
    """Write `values/<layout>`: a checkpoint of a value model after one step, and its outputs then."""
    trained = ranks.backend(cases.policy(folder / "qwen3_moe" if layout.tensor == 1 else folder / "qwen3"), layout, VALUES)
    _, packed = batches(trained, layout)
    trained.step(packed, cases.value_loss)
    place = folder / "values" / layout.name
    trained.shards().write(place, dist.get_rank())
    values = trained.forward([cases.pack(list(range(len(cases.LENGTHS))))])[0].values
    if dist.get_rank() == 0:
        save_file({"values": values}, place / "values.safetensors")
