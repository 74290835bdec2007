"""A recipe's algorithm and its needs, and the metrics of a step from the shares of ranks."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline import algorithms, config
from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.distillation import Distillation
from pipeline.algorithms.dpo import DPO
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.kto import KTO
from pipeline.algorithms.loss import policy_loss, value_loss
from pipeline.algorithms.ppo import PPO
from pipeline.algorithms.rm import RM
from pipeline.algorithms.sft import SFT
from pipeline.config import LossConfig, ValueLossConfig
from pipeline.train.outputs import reduce_outputs
from pipeline.types import BINS, LossOutput
from tests.algorithms.packed import piece_of
from tests.algorithms.sampled import CUTS, outputs_of, random_sampled


@pytest.mark.parametrize(
    ("name", "kind", "needs"),
    [
        ("grpo", GRPO, Needs(truncated=True, old=True, old_of_first=False)),
        ("ppo", PPO, Needs(truncated=True, old=True, critic=True, estimates=True, standardized="unbiased", epochs=2)),
        ("distillation", Distillation, Needs(teacher_top_k=64)),
        ("sft", SFT, Needs()),
        ("dpo", DPO, Needs(reference=True)),
        ("kto", KTO, Needs(reference=True, mismatched=True)),
        ("rm", RM, Needs(head="values")),
    ],
)
def test_a_recipe_makes_its_algorithm(name, kind, needs):
    samples = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
    recipe = {
        "name": "small",
        "algorithm": name,
        "run_dir": "runs/small",
        "policy": {"model_name": "x", "train_global_batch_size": 16},
        "teacher": {"model_name": "t"},
        "data": {"train": {"env_name": "e"}},
        "env": {"e": {"kind": "math"}},
        "grpo": samples,
        "ppo": {**samples, "ppo_epochs": 2},
        "distillation": samples,
    }
    found = algorithms.build(config.complete(recipe))
    assert isinstance(found, kind) and found.needs == needs
    assert found.sequences_per_item == (2 if name in ("dpo", "rm") else 1)
    assert set(found.losses) == ({"policy", "critic"} if name == "ppo" else {"policy"})


@pytest.fixture
def alone():
    """Return a world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_shares_of_ranks_become_metrics(alone):
    """Metrics are those of the whole step, however the batch is split."""
    packed = random_sampled(0)
    for loss in (partial(policy_loss, LossConfig()), partial(value_loss, ValueLossConfig())):
        logged = []
        for cut in ([range(6)], *CUTS):
            pieces = [piece_of(packed, members) for members in cut]
            outputs = [loss(outputs_of(piece), piece.batch, packed.counts) for piece in pieces]
            logged.append(reduce_outputs(outputs, counts=True, group=alone, device=torch.device("cpu")))
        assert not [name for name in logged[0] if name.endswith(("_histogram", "_moments"))]
        for other in logged[1:]:
            assert other == pytest.approx(logged[0])
    mask, batch = packed.batch.loss_mask, packed.batch
    residuals = batch.returns - torch.roll(packed.leaf.detach(), 1)
    variance = 1 - residuals[mask].var(correction=0) / batch.returns[mask].var(correction=0)
    assert logged[0]["explained_variance"] == pytest.approx(variance.item())


def test_each_kind_of_metric_by_its_name(alone):
    half, moments = np.eye(BINS) / 2, np.array([1.0, 3.0, 0.0, 0.5])
    shares = [
        {"x": 1.0, "x_max": 2.0, "x_min": 2.0, "w_histogram": half[BINS // 2], "v_moments": moments},
        {"x": 3.0, "x_max": 5.0, "x_min": 5.0, "w_histogram": half[-1], "v_moments": moments},
    ]
    outputs = [LossOutput(torch.tensor(0.5), {name: torch.tensor(v) for name, v in share.items()}) for share in shares]
    found = reduce_outputs(outputs, counts=True, group=alone, device=torch.device("cpu"))
    quantiles = {"w_p01": 1.0, "w_p50": 1.0, "w_p99": pytest.approx(np.exp(10))}
    assert found == {"loss": 1.0, "x": 4.0, "x_max": 5.0, "x_min": 2.0, **quantiles, "v": 1 - 1 / 2}
    assert reduce_outputs(outputs, counts=False, group=alone, device=torch.device("cpu"))["x"] == 0
    scalars = [replace(output, metrics={}) for output in outputs]
    assert reduce_outputs(scalars, counts=True, group=alone, device=torch.device("cpu")) == {"loss": 1.0}
