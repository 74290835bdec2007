"""Share a step's samples among data-parallel ranks, and cut them into microbatches. Pure and deterministic."""

from __future__ import annotations

from pipeline.config import PolicyConfig
from pipeline.data.packing import plan_microbatches
from pipeline.types import DataParallelRank, GlobalCounts, Sample, Update


def split_batch(
    samples: list[Sample], policy: PolicyConfig, places: list[DataParallelRank], update_size: int, sequences_per_item: int = 1
) -> list[list[Update]]:
    """Return the updates of each train rank, of `update_size` units over all ranks; those who share a place share one list. A
    unit is `sequences_per_item` successive samples (2: the answers of a pair), which stay side by side in one microbatch;
    policy.train_micro_batch_size and logprob_batch_size count units too. Raises ValueError if the samples cannot be cut so.
    """
    if len(samples) % (update_size * sequences_per_item):
        what = f" of {sequences_per_item} samples each" if sequences_per_item > 1 else ""
        raise ValueError(f"{len(samples)} samples cannot be cut into updates of {update_size}{what}")
    units = [samples[i : i + sequences_per_item] for i in range(0, len(samples), sequences_per_item)]
    updates = [
        _share_one(units[i : i + update_size], sequences_per_item, policy, places[0].size)
        for i in range(0, len(units), update_size)
    ]
    shares = [[update[data_rank] for update in updates] for data_rank in range(places[0].size)]
    return [shares[place.rank] for place in places]


def _share_one(units: list[list[Sample]], sequences_per_item: int, policy: PolicyConfig, data_ranks: int) -> list[Update]:
    """Return one optimizer step's samples, by data rank."""
    lengths = [sum(len(sample.tokens) for sample in unit) for unit in units]
    counts = GlobalCounts(
        tokens=int(sum(sample.loss_mask.sum() for unit in units for sample in unit)),
        sequences=int(sum(sample.loss_mask.any() for unit in units for sample in unit)),
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
                [sample for i in members for sample in units[i]],
                [_positions([place[i] for i in microbatch], sequences_per_item) for microbatch in plan],
                [_positions(microbatch, sequences_per_item) for microbatch in forward_plan + [[]] * (most - len(forward_plan))],
                counts,
            )
        )
    return updates


def _positions(units: list[int], sequences_per_item: int) -> list[int]:
    """Return the positions of the samples of these units."""
    return [unit * sequences_per_item + i for unit in units for i in range(sequences_per_item)]


def _bounds(packed: bool, tokens: int, sequences: int) -> tuple[int | None, int | None]:
    """Return the (tokens, units) that a microbatch may have."""
    return (tokens, None) if packed else (None, sequences)
