"""How a step's samples are shared among data-parallel ranks and cut into microbatches. Pure and deterministic."""

from __future__ import annotations

from pipeline.config import PolicyConfig
from pipeline.data.packing import plan_microbatches
from pipeline.types import DataPlace, GlobalCounts, Sample, Update


def share(samples: list[Sample], policy: PolicyConfig, places: list[DataPlace], update_size: int) -> list[list[Update]]:
    """For each train rank its updates, of `update_size` samples over all ranks. Raises ValueError if that does not divide."""
    if len(samples) % update_size:
        raise ValueError(f"{len(samples)} samples cannot be cut into updates of {update_size}")
    updates = [_share_one(samples[i : i + update_size], policy, places[0].size) for i in range(0, len(samples), update_size)]
    return [[update[place.rank] for update in updates] for place in places]


def _share_one(samples: list[Sample], policy: PolicyConfig, data_ranks: int) -> list[Update]:
    """One optimizer step's samples, by data rank."""
    lengths = [len(sample.tokens) for sample in samples]
    counts = GlobalCounts(
        tokens=int(sum(sample.loss_mask.sum() for sample in samples)),
        sequences=int(sum(sample.loss_mask.any() for sample in samples)),
    )
    packed = policy.sequence_packing.enabled
    train_bounds = _bounds(packed, policy.sequence_packing.train_mb_tokens, policy.train_micro_batch_size)
    forward_bounds = _bounds(packed, policy.sequence_packing.logprob_mb_tokens, policy.logprob_batch_size)
    train = plan_microbatches(lengths, data_ranks, *train_bounds)
    owned = [sorted(i for microbatch in plan for i in microbatch) for plan in train]
    forward = [plan_microbatches([lengths[i] for i in members], 1, *forward_bounds)[0] if members else [] for members in owned]
    most = max(map(len, forward))  # FSDP's ranks gather weights together, so all run as many; empty ones fill up
    updates = []
    for plan, members, forward_plan in zip(train, owned, forward, strict=True):
        place = {member: position for position, member in enumerate(members)}
        updates.append(
            Update(
                [samples[i] for i in members],
                [[place[i] for i in microbatch] for microbatch in plan],
                forward_plan + [[]] * (most - len(forward_plan)),
                counts,
            )
        )
    return updates


def _bounds(packed: bool, tokens: int, sequences: int) -> tuple[int | None, int | None]:
    """(tokens, sequences) that a microbatch may have."""
    return (tokens, None) if packed else (None, sequences)
