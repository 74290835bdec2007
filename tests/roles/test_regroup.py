"""Outputs of forward microbatches are regrouped for training microbatches with other boundaries."""

import numpy as np
import torch

from pipeline.roles.regroup import regroup
from pipeline.types import GlobalCounts, Outputs, Sample, TopK, Update

LENGTHS = (3, 1, 4, 2)


def update(train, forward) -> Update:
    samples = [Sample(np.zeros(n, np.int32), np.ones(n, bool), *(np.zeros(n, np.float32),) * 2) for n in LENGTHS]
    return Update(samples, train, forward, GlobalCounts(10, 4))


def of(members) -> torch.Tensor:
    """Return a model's fake output for a microbatch: entry t of sample i is 10 i + t."""
    return torch.tensor([10.0 * i + t for i in members for t in range(LENGTHS[i])] or [99.0])


def test_entries_follow_their_samples_into_other_microbatches():
    train, forward = [[2, 0], [1, 3]], [[0, 1, 2, 3]]
    found = regroup([Outputs(logprobs=of(members)) for members in forward], forward, update(train, forward))
    for members, outputs in zip(train, found, strict=True):
        assert outputs.logprobs.tolist() == of(members).tolist()
        assert outputs.values is None and outputs.top_k is None


def test_every_field_is_regrouped():
    train, forward = [[3], [0, 2, 1]], [[2, 1], [0, 3]]
    outputs = [
        Outputs(
            of(m),
            of(m) + 0.1,
            TopK((of(m)[:, None] + torch.arange(2)).long(), of(m)[:, None] * torch.ones(2)),
            of(m) + 0.2,
            of(m) + 0.3,
        )
        for m in forward
    ]
    for members, out in zip(train, regroup(outputs, forward, update(train, forward)), strict=True):
        torch.testing.assert_close(out.logprobs, of(members))
        torch.testing.assert_close(out.entropy, of(members) + 0.1)
        torch.testing.assert_close(out.values, of(members) + 0.2)
        torch.testing.assert_close(out.full_logprobs, of(members) + 0.3)
        assert out.top_k.tokens.tolist() == [[int(x), int(x) + 1] for x in of(members)]
        assert out.top_k.logprobs.shape == (len(of(members)), 2)


def test_an_empty_microbatch_is_one_token_of_zeros():
    train, forward = [[0, 1, 2, 3], []], [[0, 1], [2, 3], []]
    found = regroup([Outputs(values=of(members)) for members in forward], forward, update(train, forward))
    assert found[1].values.tolist() == [0.0]
