"""ULD and GOLD: microbatches, also empty ones, change nothing; what is compared by hand. Golden values: golden/trl_uld.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.universal_logits import candidates, universal_logit_loss
from pipeline.config import LossConfig
from pipeline.data.packing import pack
from pipeline.data.teacher_text import at_chunk_ends
from pipeline.roles.teacher_scores import for_tokens_of, with_candidates
from pipeline.types import GlobalCounts, Outputs, Sample, TeacherTokens, TopK

VOCABULARY, WIDTH = 11, 6
LENGTHS = (7, 5, 9)


def sample_of(length: int, generator: np.random.Generator) -> Sample:
    """Return a prompt of two tokens and an answer in chunks of up to three tokens on both sides."""
    chunks = np.concatenate([[-1, -1], np.sort(generator.integers(0, 3, length - 2))]).astype(np.int32)
    theirs = np.repeat(np.unique(chunks[2:]), generator.integers(1, 4, len(np.unique(chunks[2:]))))
    tokens = [generator.integers(0, VOCABULARY, size).astype(np.int32) for size in (length, 1 + len(theirs))]
    in_teacher = TeacherTokens(tokens[1], np.concatenate([[-1], theirs]).astype(np.int32), chunks)
    zeros = np.zeros(length, np.float32)
    return at_chunk_ends(Sample(tokens[0], chunks >= 0, zeros, zeros, teacher="a", in_teacher=in_teacher))


def top(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = logprobs.topk(WIDTH)
    return best.indices, best.values


@pytest.mark.parametrize("kind", ["uld", "gold"])
def test_microbatches_change_nothing(kind: str) -> None:
    generator, draw = np.random.default_rng(1), torch.Generator().manual_seed(1)
    samples = [sample_of(length, generator) for length in LENGTHS]
    policy = [torch.randn(length, VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_() for length in LENGTHS]
    teacher = [
        torch.randn(len(sample.tokens_of_teacher), VOCABULARY, generator=draw).double().log_softmax(-1) for sample in samples
    ]
    matched = {} if kind == "uld" else {"a": torch.tensor([0, -1, 2, 3, -1, 5, 6, -1, 1, 9, 10])}
    counts = GlobalCounts(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples))

    def share(members: Sequence[int]) -> torch.Tensor:
        batch = pack([samples[i] for i in members], "cpu")
        logprobs = torch.cat([policy[i].log_softmax(-1) for i in members] or [torch.zeros(1, VOCABULARY).double()])
        own = TopK(*top(logprobs.detach()))
        scored = [torch.zeros(1), torch.zeros(1, WIDTH, dtype=torch.int64), torch.zeros(1, WIDTH)]
        if members:
            drawn = [teacher[i].gather(-1, torch.tensor(samples[i].tokens_of_teacher)[:, None].long())[:, 0] for i in members]
            each = [for_tokens_of([drawn[k], *top(teacher[i])], samples[i]) for k, i in enumerate(members)]
            scored = [torch.cat(tensors) for tensors in zip(*each, strict=True)]
        batch = with_candidates(replace(batch, teacher=TopK(scored[1], scored[2])), Outputs(top_k=own), matched)
        assert batch.teacher is not None
        of_candidates = TopK(batch.teacher.tokens, logprobs.gather(-1, batch.teacher.tokens.clamp(min=0)))
        outputs = Outputs(logprobs.gather(-1, batch.tokens[:, None])[:, 0], top_k=of_candidates)
        found = universal_logit_loss(LossConfig(kl_type=kind), outputs, batch, counts, ["a"])
        assert all(value.isfinite().all() for value in found.metrics.values())
        return found.loss

    def gradients(cuts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        loss = sum(share(members) for members in cuts)
        return [torch.as_tensor(loss).detach(), *torch.autograd.grad(loss, policy)]

    whole = gradients([[0, 1, 2]])
    assert whole[0] > 0.1 and all(gradient.abs().max() > 1e-3 for gradient in whole[1:])
    for cuts in ([[2, 0], [1]], [[1], [], [0], [2]]):
        for one, other in zip(whole, gradients(cuts), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_candidates_by_hand() -> None:
    """The teacher's tokens 0 and 3 are the policy's 5 and 1; its token 9 is beyond the vocabulary of its tokenizer."""
    teacher = TopK(torch.tensor([[3, 2, 0, 9]]), torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log())
    own = TopK(torch.tensor([[1, 4, 5, 6]]), torch.zeros(1, 4))
    found = candidates(teacher, own, torch.tensor([5, -1, -1, 1]))
    assert found.tokens.tolist() == [[1, -1, 5, -1, -1, 4, -1, 6]]
    expected = torch.tensor([[0.4, 0.0, 0.2, 0.0, 0.3, 0.1, 0.0, 0.0]])
    torch.testing.assert_close(found.logprobs.exp(), expected)
