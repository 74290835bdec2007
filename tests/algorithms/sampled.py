"""Random packed batches of sampled tokens in float64, and the properties that every loss has on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pipeline.algorithms.loss import policy_loss
from pipeline.config import LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch
from tests.algorithms import reference
from tests.algorithms.packed import Packed, differences, piece_of, random_packed

LENGTHS = (7, 4, 9, 3, 6, 12)
CUTS = ([[0], [1, 2], [3, 4, 5]], [[5, 3, 1], [4, 0, 2]], [[2], [0, 5], [], [4, 3, 1]])

Loss = Callable[[Outputs, PackedBatch, GlobalCounts], LossOutput]


def random_sampled(
    seed: int = 0, old: bool = True, reference: bool = False, lengths: Sequence[int] = LENGTHS, noise: float = 0.4
) -> Packed:
    """Return log-probs of four policies that differ by `noise`, and advantages of every token.

    Long sequences have uncounted tokens in the middle, like a tool's output. Uncounted entries are infinite in all of these.
    """
    packed = random_packed(lengths, seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    total, mask = len(packed.leaf), packed.batch.loss_mask.clone()
    for start, length in zip(packed.batch.cu_seqlens.tolist(), lengths, strict=False):
        if length > 6:
            mask[start + length - 3] = False

    def near() -> torch.Tensor:
        found = packed.leaf.detach() + noise * torch.randn(total, generator=draw, dtype=torch.float64)
        return torch.where(mask, found.clamp(max=-1e-3), -torch.inf)

    def normal() -> torch.Tensor:
        return torch.randn(total, generator=draw, dtype=torch.float64)

    batch = replace(
        packed.batch,
        loss_mask=mask,
        generate_logprobs=near(),
        old_logprobs=near() if old else None,
        reference_logprobs=near() if reference else None,
        advantages=torch.where(mask, normal(), 0.0),
        old_values=normal(),
        returns=torch.where(mask, normal(), 0.0),
    )
    return replace(packed, batch=batch)


def outputs_of(piece: Packed, entropy: bool = False) -> Outputs:
    """Return outputs with the leaf as log-probs, as values, and as entropies, so that its gradient has a part of each."""
    return Outputs(logprobs=piece.logprobs, entropy=piece.logprobs.square() if entropy else None, values=piece.logprobs)


def largest_difference(config: LossConfig, seeds: int = 8, **batch: float | bool) -> tuple[int, float, float]:
    """Return (cases, difference of loss, of gradient) from the padded reference. Even seeds have log-probs of an old policy."""

    def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_sampled(seed, old=seed % 2 == 0, reference=config.reference_policy_kl_penalty != 0, **batch)
        one, other = (outputs_of(packed, entropy=config.entropy_coeff != 0) for _ in range(2))
        loss = policy_loss(config, one, packed.batch, packed.counts).loss
        return loss, reference.policy_loss(config, packed, other.entropy), packed.leaf

    return differences(map(case, range(seeds)))


def assert_split_invariant(loss: Loss, packed: Packed, entropy: bool = False) -> None:
    """Assert that loss, gradient and metrics do not depend on microbatches, the order of sequences, or an empty microbatch."""
    whole = _total(loss, packed, [range(len(packed.batch.lengths))], entropy)
    for cut in CUTS:
        pieces = _total(loss, packed, cut, entropy)
        assert pieces.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(pieces[name], value, rtol=0, atol=1e-13, msg=f"{name} in {cut}")


def assert_gradcheck(loss: Loss, packed: Packed, entropy: bool = False) -> None:
    """Compare the gradient with finite differences. Not for losses with a stopped gradient."""

    def of(leaf: torch.Tensor) -> torch.Tensor:
        return loss(outputs_of(replace(packed, leaf=leaf, logprobs=leaf), entropy), packed.batch, packed.counts).loss

    assert torch.autograd.gradcheck(of, (packed.leaf,))


def gradient_of(loss: torch.Tensor, packed: Packed) -> torch.Tensor:
    return torch.autograd.grad(loss, packed.leaf)[0]


def _total(loss: Loss, packed: Packed, cut: Sequence[Sequence[int]], entropy: bool) -> dict[str, torch.Tensor]:
    packed.leaf.grad = None
    found: dict[str, list[torch.Tensor]] = {}
    for members in cut:
        piece = piece_of(packed, members)
        out = loss(outputs_of(piece, entropy), piece.batch, packed.counts)
        out.loss.backward()
        for name, value in {"loss": out.loss.detach(), **out.metrics}.items():
            assert not value.requires_grad, name
            found.setdefault(name, []).append(value)
    combined = {name: _combined(name, torch.stack(values)) for name, values in found.items()}
    return combined | {"gradient": packed.leaf.grad.clone()}


def _combined(name: str, values: torch.Tensor) -> torch.Tensor:
    if name.endswith("_max"):
        return values.amax(0)
    return values.amin(0) if name.endswith("_min") else values.sum(0)
