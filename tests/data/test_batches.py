"""Splitting a step's samples over data-parallel ranks: each appears once, and pairs stay together."""

import random

import numpy as np
import pytest

from pipeline.config import PolicyConfig, SequencePackingConfig
from pipeline.data.batches import split_batch
from pipeline.types import DataParallelRank, Sample, Update


def sample(number: int, length: int, counted: bool = True) -> Sample:
    """Return a sample whose tokens are all its number."""
    mask = np.zeros(length, bool)
    mask[1:] = counted
    zeros = np.zeros(length, np.float32)
    return Sample(np.full(length, number, np.int32), mask, zeros, zeros)


def policy(packed: bool, tokens: int = 64, units: int = 3) -> PolicyConfig:
    return PolicyConfig(
        train_micro_batch_size=units,
        logprob_batch_size=units + 1,
        sequence_packing=SequencePackingConfig(enabled=packed, train_mb_tokens=tokens, logprob_mb_tokens=2 * tokens),
    )


def numbers(update: Update, microbatch: list[int]) -> list[int]:
    return [int(update.samples[i].tokens[0]) for i in microbatch]


@pytest.mark.parametrize("sequences_per_item", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_each_unit_appears_once_and_complete(sequences_per_item: int, packed: bool):
    draw = random.Random(sequences_per_item)
    for _ in range(100):
        units, ranks = draw.choice([8, 12, 24]), draw.choice([1, 2, 4])
        samples = [sample(i, draw.randint(2, 64 // sequences_per_item)) for i in range(units * sequences_per_item)]
        places = [DataParallelRank(rank, ranks) for rank in range(ranks) for _ in range(2)]  # two tensor-parallel peers each
        updates = split_batch(samples, policy(packed), places, units // 2, sequences_per_item)
        assert [len(of_rank) for of_rank in updates] == [2] * len(places)
        assert all(updates[2 * rank] is updates[2 * rank + 1] for rank in range(ranks))  # so it is sent once
        for k in range(2):
            for field in ("train", "forward"):
                seen = []
                for update in (updates[2 * rank][k] for rank in range(ranks)):
                    for microbatch in getattr(update, field):
                        found = numbers(update, microbatch)
                        seen += found
                        members = [found[i : i + sequences_per_item] for i in range(0, len(found), sequences_per_item)]
                        assert all(unit == list(range(unit[0], unit[0] + sequences_per_item)) for unit in members)
                        assert all(unit[0] % sequences_per_item == 0 for unit in members)
                        tokens = sum(len(update.samples[i].tokens) for i in microbatch)
                        bounds = (64, 3) if field == "train" else (128, 4)
                        assert tokens <= bounds[0] if packed else len(members) <= bounds[1]
                first = k * units // 2 * sequences_per_item
                assert sorted(seen) == list(range(first, first + units // 2 * sequences_per_item))
            assert (
                len({len(of_rank[k].train) for of_rank in updates})
                == len({len(of_rank[k].forward) for of_rank in updates})
                == 1
            )
        assert all(
            numbers(a, range(len(a.samples))) == numbers(b, range(len(b.samples))) for a, b in zip(*updates[:2], strict=True)
        )


def test_counts_are_of_the_whole_update():
    samples = [sample(0, 5), sample(1, 4), sample(2, 3), sample(3, 9, counted=False)]
    ranks = [DataParallelRank(0, 2), DataParallelRank(1, 2)]
    split = split_batch(samples, policy(True), ranks, 2, sequences_per_item=2)
    assert len(split) == 2
    for of_rank in split:
        (update,) = of_rank
        assert (update.counts.tokens, update.counts.sequences) == (4 + 3 + 2, 3)


def test_a_batch_that_does_not_divide_is_refused():
    samples = [sample(i, 40) for i in range(6)]
    with pytest.raises(ValueError, match="6 samples do not divide into updates of 2 items of 2 samples"):
        split_batch(samples, policy(True), [DataParallelRank(0, 1)], 2, sequences_per_item=2)
    with pytest.raises(ValueError, match="6 samples do not divide into updates of 4 items"):
        split_batch(samples, policy(True), [DataParallelRank(0, 1)], 4)
    with pytest.raises(ValueError, match="has 80 tokens; expected at most"):
        split_batch(samples, policy(True), [DataParallelRank(0, 1)], 3, sequences_per_item=2)
