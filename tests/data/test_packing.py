import random

import numpy as np
import pytest
import torch

from pipeline.data.packing import pack, plan_microbatches
from pipeline.types import Sample


def cases() -> list[tuple[list[int], int, int | None, int | None]]:
    draw = random.Random(0)
    found = []
    for _ in range(400):
        ranks = draw.randint(1, 6)
        lengths = [draw.randint(1, draw.choice([3, 40, 500])) for _ in range(draw.randint(1, draw.choice([5, 80])))]
        tokens = draw.choice([None, max(lengths), max(lengths) + draw.randint(0, 1000)])
        found.append((lengths, ranks, tokens, draw.choice([None, 1, 2, 7])))
    return found


def test_packing_of_any_lengths():
    assert len(cases()) == 400
    for lengths, ranks, tokens, sequences in cases():
        plan = plan_microbatches(lengths, ranks, tokens, sequences)
        assert plan == plan_microbatches(lengths, ranks, tokens, sequences)
        assert len(plan) == ranks
        assert len({len(microbatches) for microbatches in plan}) == 1
        flat = [members for microbatches in plan for members in microbatches]
        assert sorted(i for members in flat for i in members) == list(range(len(lengths)))
        for members in flat:
            assert tokens is None or sum(lengths[i] for i in members) <= tokens
            assert sequences is None or len(members) <= sequences
            held = [lengths[i] for i in members]
            assert held == sorted(held, reverse=True)
        if len(flat) <= len(lengths):
            assert all(flat)
        else:  # only when even one sequence to each leaves a rank short, and then no more rounds than that
            assert (len(plan[0]) - 1) * ranks < len(lengths)


def test_ranks_are_balanced_and_microbatches_few():
    draw = random.Random(1)
    for _ in range(50):
        lengths = [draw.randint(20, 200) for _ in range(256)]
        plan = plan_microbatches(lengths, 4, 2048, None)
        loads = [sum(lengths[i] for members in microbatches for i in members) for microbatches in plan]
        assert max(loads) - min(loads) <= 0.01 * sum(loads)
        assert len(plan[0]) <= -(-sum(lengths) // (4 * 2048)) + 1


def test_no_limits_make_one_microbatch_for_each_rank():
    assert plan_microbatches([5, 9, 7, 3], 2, None, None) == [[[1, 3]], [[2, 0]]]


def test_three_that_do_not_fit_together_on_two_ranks_leave_one_empty():
    plan = plan_microbatches([10, 10, 10], 2, 10, None)
    assert sorted(len(members) for microbatches in plan for members in microbatches) == [0, 1, 1, 1]


@pytest.mark.parametrize("bounds", [(None, None), (10, None), (None, 1)])
def test_fewer_sequences_than_ranks_leave_some_without_any(bounds: tuple[int | None, int | None]):
    assert plan_microbatches([3, 10], 4, *bounds) == [[[1]], [[0]], [[]], [[]]]


def test_impossible_packings_are_refused():
    with pytest.raises(ValueError, match="sample 1 has 11 tokens; expected at most 10 in a microbatch"):
        plan_microbatches([3, 11], 1, 10, None)


def sample(tokens: list[int], mask: list[int]) -> Sample:
    counted = np.array(mask, dtype=bool)
    numbers = np.array(tokens, dtype=np.float32) * counted
    return Sample(np.array(tokens, dtype=np.int32), counted, logprobs=-numbers, advantages=numbers / 2)


def test_pack_concatenates_sequences():
    batch = pack([sample([5, 6, 7], [0, 1, 1]), sample([8], [0]), sample([9, 4], [0, 1])], "cpu")
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.lengths == (3, 1, 2)
    assert batch.loss_mask.tolist() == [False, True, True, False, False, True]
    assert batch.generate_logprobs.tolist() == [0, -6, -7, 0, 0, -4]
    assert batch.advantages.tolist() == [0, 3, 3.5, 0, 0, 2]
    dtypes = (batch.tokens.dtype, batch.positions.dtype, batch.cu_seqlens.dtype, batch.loss_mask.dtype, batch.advantages.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int32, torch.bool, torch.float32)
    assert batch.old_logprobs is None


def test_an_empty_batch_packs_to_one_uncounted_token():
    batch = pack([], "cpu")
    assert batch.lengths == (1,)
    assert batch.cu_seqlens.tolist() == [0, 1]
    assert not batch.loss_mask.any()
