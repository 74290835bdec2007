"""Every layout gives Hugging Face's eager log-probs and gradients, and resumes to the last bit."""

import json

import pytest

from tests.train import cases, ranks
from tests.train.ranks import Layout

LAYOUTS = [Layout(2, 1), Layout(1, 2), pytest.param(Layout(2, 2), marks=pytest.mark.long)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp2", "tp2", "dp2tp2"])
def test_layout(layout, models, realm):
    ranks.run(ranks.all_families, layout, models)

    # What those ranks saved goes on at another layout as it did at theirs: here, on one rank.
    for family in {"qwen3_tied", "qwen3_moe"} & set(ranks.families(layout)):
        folder = models / ranks.saved_by(layout, family)
        trained = ranks.backend(cases.policy(models / family, scheduler=ranks.SCHEDULER))
        trained.load(folder)
        batches = [cases.pack(chosen) for chosen in ranks.shares(Layout(1, 1))[0]]
        metrics = [trained.step(batches, cases.loss).metrics for _ in range(2)]
        for ours, theirs in zip(metrics, json.loads((folder / "after.json").read_text()), strict=True):
            assert ours["lr"] == theirs["lr"]
            assert abs(ours["loss"] - theirs["loss"]) < 1e-6
            assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) < 1e-5
