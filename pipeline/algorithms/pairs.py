"""What the losses on pairs share. Sequence 2i of a batch is a chosen answer, sequence 2i + 1 the rejected one.

A mean is over all pairs of the optimizer step, so each pair's share is divided by half of `GlobalCounts.sequences`.
"""

from __future__ import annotations

import torch

from pipeline.types import GlobalCounts


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[S]` -> those of the chosen and of the rejected answers, `[S/2]` each. An empty microbatch, which is packed as one
    token, has no pairs. Raises ValueError for an odd number of sequences else."""
    if len(values) == 1:
        values = values[:0]  # with its graph: a backward pass will be asked of it
    if len(values) % 2:
        raise ValueError(f"{len(values)} sequences are no pairs; the microbatch has lost one")
    return values[0::2], values[1::2]


def pair_share(values: torch.Tensor, counts: GlobalCounts) -> torch.Tensor:
    """`[S/2]` -> `[]`: this batch's share of the mean over all pairs of the optimizer step."""
    return values.sum() / max(1.0, counts.sequences / 2)


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor, counts: GlobalCounts) -> dict[str, torch.Tensor]:
    """Of the rewards of the chosen and the rejected answers, `[S/2]` each."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": pair_share((chosen > rejected).to(chosen.dtype), counts),
        "rewards_chosen_mean": pair_share(chosen, counts),
        "rewards_rejected_mean": pair_share(rejected, counts),
        "rewards_margin": pair_share(chosen - rejected, counts),
    }
