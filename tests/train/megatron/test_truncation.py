"""Truncated log-probs in Megatron-Core's layouts, against Hugging Face's eager models in float64."""

from pathlib import Path

import pytest
import torch

from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, ONE, PP2, TP2_SP, Layout
from tests.train.test_truncation import GENERATION, USE, eager, loss


def check(layout: Layout, folder: Path) -> None:
    """Log-probs, entropy, the reference's and gradients, however the data are cut."""
    for family in ("llama", "qwen3_tied"):
        expected, gradients = eager(folder / family)
        for count in (1, 2):
            trained = layouts.backend(cases.policy(folder / family, generation=GENERATION), layout, USE)
            mine = layouts.shares(layout, count)[trained.data_rank]
            packed = [cases.pack(chosen) for chosen in mine]
            outputs = zip(trained.forward(packed), trained.forward(packed, "reference"), strict=True)
            for chosen, (found, reference) in zip(mine, outputs, strict=True):
                for name in ("logprobs", "entropy", "full_logprobs"):
                    theirs = torch.cat([getattr(expected[i], name).detach() for i in chosen])
                    inside = theirs.isfinite()
                    assert torch.equal(getattr(found, name).isfinite(), inside)
                    assert (getattr(found, name) - theirs)[inside].abs().max() < 1e-5, name
                assert torch.equal(reference.logprobs, found.full_logprobs) and reference.full_logprobs is None
            trained.step(packed, loss)
            ours, _ = layouts.gradients(trained)
            ranks.assert_near(ours, gradients, 5e-6)


@pytest.mark.parametrize("layout", [TP2_SP, CP2, PP2], ids=lambda layout: layout.name)
def test_layouts(models, layout):
    layouts.run(check, layout, models)


def test_one_rank(models, realm):
    check(ONE, models)
