"""Random packed batches in float64 for tests of losses, and their microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from pipeline.types import GlobalCounts, LossOutput, PackedBatch, TopK

CUTS_OF_PAIRS = (
    [[0, 1], [2, 3, 4, 5, 6, 7]],
    [[6, 7, 2, 3], [4, 5, 0, 1]],
    [[2, 3], [0, 1], [6, 7], [4, 5], []],
)


@dataclass(frozen=True)
class Packed:
    """A batch with a model's outputs. `logprobs` and `values` are views of the leaf that receives gradients."""

    leaf: torch.Tensor  # [T] float64: log-probs below 0; a test may take them for values just as well
    logprobs: torch.Tensor  # [T]
    batch: PackedBatch

    FIELDS = ("logprobs", "reference_logprobs", "loss_mask")

    @property
    def counts(self) -> GlobalCounts:
        return GlobalCounts(int(self.batch.loss_mask.sum()), len(self.batch.lengths))

    def sequences(self, name: str) -> tuple[torch.Tensor, ...]:
        return (self.logprobs if name == "logprobs" else getattr(self.batch, name)).split(self.batch.lengths)


def random_packed(lengths: Sequence[int], seed: int = 0, reference_is_policy: bool = False, top_k: int = 0) -> Packed:
    """Return a random batch.

    Every sequence has at least one counted token, and its first never counts. Entries outside the mask are infinite.
    """
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    leaf = (-1.5 + 0.4 * torch.randn(total, generator=draw, dtype=torch.float64)).clamp(max=-1e-3)
    positions = torch.cat([torch.arange(n) for n in lengths])
    prompts = torch.cat([torch.full((n,), 1 + int(torch.randint(0, n - 1, (), generator=draw))) for n in lengths])
    mask = positions >= prompts
    reference = leaf + 0 if reference_is_policy else leaf + 0.4 * torch.randn(total, generator=draw, dtype=torch.float64)
    zeros = torch.zeros(total, dtype=torch.float64)
    teacher = TopK(
        torch.randint(0, 50, (total, top_k), generator=draw),
        torch.randn(total, top_k + 3, generator=draw, dtype=torch.float64).log_softmax(-1)[:, :top_k],
    )
    batch = PackedBatch(
        tokens=torch.randint(0, 11, (total,), generator=draw),
        positions=positions,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        lengths=tuple(lengths),
        loss_mask=mask,
        generate_logprobs=zeros,
        advantages=zeros,
        rewards=torch.rand(len(lengths), generator=draw, dtype=torch.float64),
        reference_logprobs=torch.where(mask, reference, -torch.inf),
        teacher=teacher if top_k else None,
    )
    leaf = leaf.requires_grad_()
    return Packed(leaf, leaf, batch)


def piece_of(packed: Packed, members: Sequence[int]) -> Packed:
    """Return the microbatch of these sequences, in order; for none, one token that does not count."""
    spans = [slice(int(packed.batch.cu_seqlens[i]), int(packed.batch.cu_seqlens[i + 1])) for i in members] or [slice(0, 1)]
    lengths = tuple(span.stop - span.start for span in spans)
    places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    total = len(packed.batch.tokens)
    parts = {}
    for field in fields(packed.batch):
        value = getattr(packed.batch, field.name)
        if isinstance(value, torch.Tensor) and len(value) == total:
            parts[field.name] = value[places]
    teacher = packed.batch.teacher
    batch = replace(
        packed.batch,
        **parts,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        lengths=lengths,
        rewards=packed.batch.rewards[list(members) or [0]],
        teacher=TopK(teacher.tokens[places], teacher.logprobs[places]) if teacher else None,
    )
    if not members:
        batch = replace(batch, loss_mask=torch.zeros(1, dtype=torch.bool))
    return Packed(packed.leaf, packed.logprobs[places], batch)


def in_pieces(
    packed: Packed, pieces: Iterable[Sequence[int]], share: Callable[[Packed], LossOutput]
) -> dict[str, torch.Tensor]:
    """Return loss, gradient and metrics, each summed over the microbatches of these sequences."""
    packed.leaf.grad = None
    total: dict[str, torch.Tensor] = {}
    for members in pieces:
        out = share(piece_of(packed, members))
        out.loss.backward()
        for name, value in {"loss": out.loss.detach(), **out.metrics}.items():
            assert not value.requires_grad
            total[name] = total.get(name, 0) + value
    return total | {"gradient": packed.leaf.grad.clone()}


def assert_split_invariant(
    packed: Packed, cuts: Iterable[Sequence[Sequence[int]]], share: Callable[[Packed], LossOutput], atol: float = 1e-14
) -> None:
    """Assert that loss, gradient and metrics do not depend on the split into microbatches."""
    whole = in_pieces(packed, [range(len(packed.batch.lengths))], share)
    for cut in cuts:
        pieces = in_pieces(packed, cut, share)
        assert pieces.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(pieces[name], value, rtol=0, atol=atol, msg=f"{name} in {cut}")


def differences(cases: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[int, float, float]:
    """Return the number of (loss, expected, leaf), and the largest differences of losses and of gradients."""
    found = [(abs(loss - expected).item(), gradient_error(loss, expected, leaf)) for loss, expected, leaf in cases]
    return len(found), max(loss for loss, _ in found), max(gradient for _, gradient in found)


def gradient_error(loss: torch.Tensor, expected: torch.Tensor, leaf: torch.Tensor) -> float:
    """Return the largest difference of two losses' gradients."""
    (one,), (other,) = (torch.autograd.grad(value, leaf) for value in (loss, expected))
    return (one - other).abs().max().item()
