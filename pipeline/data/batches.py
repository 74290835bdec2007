"""Split a step's samples over data-parallel ranks and into microbatches. Pure and deterministic."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config import PolicyConfig
from pipeline.data.packing import plan_microbatches
from pipeline.types import DataParallelRank, GlobalCounts, Sample, Update


def split_batch(
    samples: list[Sample], policy: PolicyConfig, ranks: list[DataParallelRank], update_size: int, sequences_per_item: int = 1
) -> list[list[Update]]:
    """Return a list of updates for each of `ranks`. An update has `update_size` items over all data-parallel ranks.

    Entries of `ranks` with the same data-parallel rank get the same list. An item is `sequences_per_item` consecutive samples
    (2: the answers of a pair), which stay together in one microbatch. policy.train_micro_batch_size and logprob_batch_size
    count items too. The branches of a sample are in its update, as items of their own. Raise ValueError if the samples do not
    divide into updates.
    """
    if len(samples) % (update_size * sequences_per_item):
        detail = f" of {sequences_per_item} samples" if sequences_per_item > 1 else ""
        raise ValueError(f"{len(samples)} samples do not divide into updates of {update_size} items{detail}")
    items = [samples[i : i + sequences_per_item] for i in range(0, len(samples), sequences_per_item)]
    updates = [
        _split_update(_with_branches(items[i : i + update_size]), sequences_per_item, policy, ranks[0].size)
        for i in range(0, len(items), update_size)
    ]
    shares = [[update[data_rank] for update in updates] for data_rank in range(ranks[0].size)]
    return [shares[data_parallel.rank] for data_parallel in ranks]


def _with_branches(items: list[list[Sample]]) -> list[list[Sample]]:
    """Return the items of an update, each followed by an item for each branch of its sample."""
    return [
        part
        for item in items
        for part in (
            [replace(sample, branches=()) if sample.branches else sample for sample in item],
            *([replace(branch, teacher=item[0].teacher)] for branch in item[0].branches),
        )
    ]


def _split_update(items: list[list[Sample]], sequences_per_item: int, policy: PolicyConfig, data_ranks: int) -> list[Update]:
    """Split the items of one optimizer update; return the Update of each data-parallel rank."""
    lengths = [sum(len(sample.tokens) for sample in item) for item in items]
    counts = GlobalCounts(
        tokens=int(sum(sample.loss_mask.sum() for item in items for sample in item)),
        sequences=int(sum(sample.loss_mask.any() for item in items for sample in item)),
        good=int(sum(sample.loss_mask.any() and sample.reward > 0 for item in items for sample in item)),
    )
    packed = policy.sequence_packing.enabled
    train_bounds = _bounds(packed, policy.sequence_packing.train_tokens, policy.train_micro_batch_size)
    forward_bounds = _bounds(packed, policy.sequence_packing.logprob_mb_tokens, policy.logprob_batch_size)
    train = plan_microbatches(lengths, data_ranks, *train_bounds)
    owned = [sorted(i for microbatch in plan for i in microbatch) for plan in train]
    forward = _plan_forward(owned, lengths, forward_bounds)
    taught = {}
    for teacher in sorted({item[0].teacher for item in items if item[0].teacher or item[0].in_teacher}):
        of_teacher = [[i for i in members if items[i][0].teacher == teacher] for members in owned]
        read = [sum(len(sample.tokens_of_teacher) for sample in item) for item in items]
        tokens, sequences = forward_bounds
        taught[teacher] = _plan_forward(of_teacher, read, (max([*read, tokens]) if tokens else None, sequences))
    updates = []
    for rank, members in enumerate(owned):
        position_of = {member: position for position, member in enumerate(members)}

        def to_positions(plan: list[list[int]], position_of: dict[int, int] = position_of) -> list[list[int]]:
            return [_positions([position_of[i] for i in microbatch], sequences_per_item) for microbatch in plan]

        updates.append(
            Update(
                [sample for i in members for sample in items[i]],
                to_positions(train[rank]),
                to_positions(forward[rank]),
                counts,
                {teacher: to_positions(plans[rank]) for teacher, plans in taught.items()},
            )
        )
    return updates


def _plan_forward(owned: list[list[int]], lengths: list[int], bounds: tuple[int | None, int | None]) -> list[list[list[int]]]:
    """Return `plan[rank][microbatch]`, lists of item numbers, for forward passes without gradients.

    owned: the items of each data-parallel rank. Every rank gets equally many microbatches; some may be empty.
    """
    plans = []
    for members in owned:
        plan = plan_microbatches([lengths[i] for i in members], 1, *bounds)[0] if members else []
        plans.append([[members[i] for i in microbatch] for microbatch in plan])
    most = max(map(len, plans))  # FSDP's ranks gather weights together, so all run equally many; empty ones fill up
    return [plan + [[]] * (most - len(plan)) for plan in plans]


def _positions(items: list[int], sequences_per_item: int) -> list[int]:
    """Return the positions of the samples that belong to the items at positions `items`."""
    return [item * sequences_per_item + i for item in items for i in range(sequences_per_item)]


def _bounds(packed: bool, tokens: int, sequences: int) -> tuple[int | None, int | None]:
    """Return the maximum (tokens, items) of a microbatch."""
    return (tokens, None) if packed else (None, sequences)
