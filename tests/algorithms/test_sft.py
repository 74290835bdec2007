"""SFT: the mean negative log-likelihood of counted tokens."""

import torch

from pipeline.algorithms.sft import SFT
from pipeline.types import GlobalCounts
from tests.algorithms.test_grpo import batch_of


def test_loss_by_hand():
    logprobs, batch = batch_of((3, 2), old=False, reference=False)
    out = SFT().loss(logprobs, batch, GlobalCounts(tokens=3, sequences=2))
    assert torch.isclose(out.loss, -(logprobs[1] + logprobs[2] + logprobs[4]) / 3)
