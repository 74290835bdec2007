"""Run 200 steps of distillation from a student equal or near to its teacher.

A tiny Llama samples, and learns by the loss of each kind from the outputs that the train backends' head computes. Measured are
the student's mass in the teacher's top k, and its divergence from the teacher over the whole vocabulary, both on sequences that
the teacher has drawn. A student that starts at its teacher stays there, and one that starts near it comes nearer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.algorithms.divergence import distillation_loss
from pipeline.config import LossConfig
from pipeline.train.heads import packed_outputs
from pipeline.types import GlobalCounts, Outputs, PackedBatch, TopK
from tests.train.cases import localized

STEPS, SEQUENCES, PROMPT, LENGTH = 200, 16, 2, 12
VOCABULARY, TOP_K = 61, 8
LEARNING_RATE = 1e-3
KINDS = {
    "forward": LossConfig(kl_type="forward"),
    "reverse": LossConfig(kl_type="reverse"),
    "mixed, 0.3": LossConfig(kl_type="mixed", mixed_kl_weight=0.3),
    "mixed, 0.5": LossConfig(kl_type="mixed", mixed_kl_weight=0.5),
}


@dataclass(frozen=True)
class Distance:
    """Mean distances over the sampled tokens of sequences from the teacher."""

    mass: float  # of the student in the teacher's top k
    kl: float  # of the student from the teacher, over the whole vocabulary, in nats


def a_teacher() -> LlamaForCausalLM:
    """Return a teacher with about 5/6 of its mass in the top k tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.35)
        model.model.embed_tokens.weight.normal_()
    return model.requires_grad_(False)


def near(teacher: LlamaForCausalLM, noise: float) -> LlamaForCausalLM:
    """Return a copy in which every matrix differs by `noise`, relative to its norm."""
    student, draw = copy.deepcopy(teacher).requires_grad_(True), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in student.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=draw) if weight.dim() > 1 else 0
    return student


@torch.no_grad()
def sampled(model: LlamaForCausalLM, draw: torch.Generator) -> torch.Tensor:
    """Return [SEQUENCES, LENGTH] int64: random prompts of PROMPT tokens, each with a completion of the model."""
    rows = torch.randint(0, VOCABULARY, (SEQUENCES, PROMPT), generator=draw)
    while rows.shape[1] < LENGTH:
        probabilities = model(rows).logits[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(probabilities, 1, generator=draw)], 1)
    return rows


def outputs_of(model: LlamaForCausalLM, rows: torch.Tensor, candidates: torch.Tensor | None = None) -> Outputs:
    """Return outputs at the most likely tokens, or of the candidates `[T, K]`."""
    hidden = model.model(rows).last_hidden_state.flatten(0, 1)
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    batch = localized(rows.flatten(), positions, candidates)
    return packed_outputs(hidden, model.lm_head.weight, batch, 1.0, None, top_k=0 if batch.candidates is not None else TOP_K)


def packed(rows: torch.Tensor, teacher: TopK) -> PackedBatch:
    positions, zeros = torch.arange(LENGTH).repeat(SEQUENCES), torch.zeros(rows.numel())
    return PackedBatch(
        tokens=rows.flatten(),
        positions=positions,
        cu_seqlens=torch.arange(0, rows.numel() + 1, LENGTH, dtype=torch.int32),
        lengths=(LENGTH,) * SEQUENCES,
        loss_mask=positions >= PROMPT,
        generate_logprobs=zeros,
        advantages=zeros,
        rewards=torch.zeros(SEQUENCES),
        teacher=teacher,
    )


@torch.no_grad()
def distance(student: LlamaForCausalLM, teacher: LlamaForCausalLM) -> Distance:
    rows = sampled(teacher, torch.Generator().manual_seed(2))
    ours, theirs = (model(rows).logits[:, PROMPT - 1 : -1].double().log_softmax(-1) for model in (student, teacher))
    mass = ours.gather(-1, theirs.topk(TOP_K).indices).exp().sum(-1)
    return Distance(mass.mean().item(), (theirs.exp() * (theirs - ours)).sum(-1).mean().item())


def distilled(config: LossConfig, student: LlamaForCausalLM, teacher: LlamaForCausalLM, steps: int = STEPS) -> None:
    """Train the student in place."""
    optimizer = torch.optim.AdamW(student.parameters(), LEARNING_RATE, weight_decay=0.0)
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        rows = sampled(student, draw)
        with torch.no_grad():
            best = outputs_of(teacher, rows).top_k
        batch = packed(rows, best)
        counts = GlobalCounts(int(batch.loss_mask.sum()), SEQUENCES)
        optimizer.zero_grad()
        distillation_loss(config, outputs_of(student, rows, best.tokens), batch, counts).loss.backward()
        optimizer.step()
