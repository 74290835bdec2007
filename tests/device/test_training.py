"""Train ranks on a GPU mix no host tensor with the GPU's, and compute the same as on the host."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.algorithms import token_advantages
from pipeline.algorithms.divergence import distillation_loss
from pipeline.algorithms.grpo import AdvantageConfig
from pipeline.algorithms.loss import policy_loss, sft_loss, value_loss
from pipeline.algorithms.pairs import reward_model_loss
from pipeline.config import (
    DPOConfig,
    GRPOConfig,
    LossConfig,
    PPOConfig,
    ValueLossConfig,
)
from pipeline.data.packing import pack
from pipeline.train.context_parallel import localize
from pipeline.train.heads import OutputHead, packed_outputs
from pipeline.train.logprobs import LINEAR, Truncation, _Head
from pipeline.train.megatron.model import PipelineStage
from pipeline.train.sequence_bounds import check_batch
from pipeline.train.train_backend import ModelRole
from pipeline.types import GlobalCounts, Outputs, Sample, TopK
from tests.algorithms.made import made
from tests.algorithms.packed import random_packed
from tests.algorithms.sampled import random_sampled
from tests.device.pretended import MixedDevices, assert_same, moved, pretended
from tests.train import cases
from tests.train.test_logprobs import VOCABULARY, inputs

TRUNCATION = Truncation(top_k=7, top_p=0.9)
COUNTS = GlobalCounts(tokens=17, sequences=6)


def test_a_host_tensor_is_detected():
    with pretended() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        for meet in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: there[torch.tensor([0])],
            lambda: torch.where(here > 0, there, 0.0),
            lambda: torch.sum(there[None], 0, out=here),
        ):
            with pytest.raises(MixedDevices, match="meets the host's"):
                meet()
        with pytest.raises(RuntimeError, match="numpy"):
            np.asarray(there)
        there.copy_(here.mul_(2))
        assert (there + torch.tensor(1.0)).tolist() == [3.0, 3.0, 3.0]


def samples() -> list[Sample]:
    drawn = np.random.default_rng(0)
    return [
        Sample(drawn.integers(0, 9, n, np.int32), drawn.random(n) < 0.5, *drawn.random((2, n), np.float32), reward=n / 8)
        for n in (5, 1, 8)
    ]


@pytest.mark.parametrize("packed", [samples(), []], ids=["samples", "none"])
def test_packing(packed):
    with pretended() as device:
        found = pack(packed, device)
        check_batch(found, 9)
        assert_same(found, pack(packed, "cpu"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_part_of_a_batch(ranks):
    batch = random_packed((5, 3, 8), top_k=2).batch
    with pretended() as device:
        found, expected = (localize(one, ranks, ranks - 1, 2) for one in (moved(batch, device), batch))
        for name in ("tokens", "positions", "targets", "candidates", "token_rows", "predicting_rows", "begins", "packing"):
            assert_same(getattr(found, name), getattr(expected, name))


# ---- heads ------------------------------------------------------------------------------------------------------------------

HEADS = pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.full), 5], ids=["whole", "in chunks"])
CUTS = pytest.mark.parametrize("truncation", [None, TRUNCATION, Truncation(None, 0.5)], ids=["all", "top-k and p", "top-p"])


@HEADS
@CUTS
@pytest.mark.parametrize("top_k", [pytest.param(0, marks=pytest.mark.full), 4])
def test_the_head(chunk, truncation, top_k):
    given = inputs(torch.float32)
    rows = (given.hidden.detach(), given.weight.detach())
    places = (given.tokens, given.positions, None if top_k else given.candidates)
    with pretended() as device:
        found, expected = (
            packed_outputs(*moved(rows, on), cases.localized(*moved(places, on)), 0.7, chunk, None, True, top_k, truncation)
            for on in (device, "cpu")
        )
        assert_same(found, expected)


class Context:
    """Stands in for torch's context between the two passes."""

    needs_input_grad = (True,) * 9

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@HEADS
@CUTS
def test_the_heads_gradients(chunk, truncation):
    given = inputs(torch.float32)

    def gradients(on) -> tuple[torch.Tensor, ...]:
        context, hidden, weight, tokens, candidates = (
            Context(),
            *moved((given.hidden, given.weight, given.tokens, given.candidates), on),
        )
        options = (0.7, chunk or len(tokens), None, True, candidates)
        outputs = _Head.forward(context, hidden, weight, tokens, *options, truncation, LINEAR)
        of_tokens, of_entropy, of_candidates = moved((given.of_logprobs, given.of_entropy, given.of_candidates), on)
        full = None if outputs[3] is None else of_tokens
        return _Head.backward(context, of_tokens, of_entropy, of_candidates, full)[:2]

    with torch.no_grad(), pretended() as device:
        assert_same(gradients(device), gradients("cpu"))


@pytest.mark.parametrize("top_k", [0, 3])
def test_megatrons_heads(monkeypatch, top_k):
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    for kind in ("tensor_model", "context"):
        monkeypatch.setattr(f"megatron.core.parallel_state.get_{kind}_parallel_group", lambda: alone)
    batch = random_packed((5, 3, 8), top_k=2).batch
    batch = replace(batch, teacher=TopK(batch.teacher.tokens % VOCABULARY, batch.teacher.logprobs))
    hidden = torch.randn(16, 1, 8)
    head = OutputHead(ModelRole(entropy=True), 0.7, 5, TRUNCATION)
    values_head = OutputHead(ModelRole("values"), 0.7, None, None)

    def outputs(on) -> tuple[Outputs, ...]:
        weight, values, rows, there = moved((inputs(torch.float32).weight, torch.ones(1, 8), hidden, batch), on)
        stage = SimpleNamespace(share_embeddings_and_output_weights=False, output_layer=SimpleNamespace(weight=weight))
        valued, local = SimpleNamespace(value_head=SimpleNamespace(weight=values)), localize(there, 1, 0, 1)
        (weight, shard), (values, _) = (PipelineStage.head(each, VOCABULARY) for each in (stage, valued))
        return (
            head.outputs(rows[:, 0], weight, local, shard, top_k),
            values_head.outputs(rows[:, 0], values, local, None, 0),
            head.empty(there, top_k),
            values_head.empty(there, 0),
        )

    with pretended() as device:
        assert_same(outputs(device), outputs("cpu"))


# ---- losses and estimates ---------------------------------------------------------------------------------------------------

IS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
KL = {"reference_policy_kl_penalty": 0.1}
POLICIES = {
    "plain": {},
    "kl, entropy": {**KL, "entropy_coeff": 0.1, "ratio_clip_c": 3.0},
    "kl of another policy": {**KL, "use_on_policy_kl_approximation": True},
    "cispo": {"use_cispo": True},
    "dppo": {"use_dppo": True, "drift_penalty": 0.1},
    "reinforce": {"disable_ppo_ratio": True},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    **{kind: {**IS, "truncated_importance_sampling_type": kind} for kind in ("tis", "icepop", "seq-mask-tis")},
}


def same_losses(loss, outputs: Outputs, batch) -> None:
    with pretended() as device:
        found = loss(moved(outputs, device), moved(batch, device), COUNTS)
        expected = loss(moved(outputs, "cpu"), batch, COUNTS)
        assert found.metrics.keys() == expected.metrics.keys()
        assert_same(found, expected)


@pytest.mark.parametrize("truncated", [False, True], ids=["all", "truncated"])
@pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)
def test_losses_of_policies(config, truncated):
    sampled = random_sampled(reference="reference_policy_kl_penalty" in config)
    logprobs = sampled.logprobs.detach()
    full = logprobs - 0.1 if truncated else None
    same_losses(
        partial(policy_loss, LossConfig(**config)), Outputs(logprobs, logprobs.square(), full_logprobs=full), sampled.batch
    )


def test_other_losses():
    sampled = random_sampled(reference=True)
    of_pairs = Outputs(sampled.logprobs, values=sampled.logprobs)
    for loss in (made(DPOConfig()).loss, reward_model_loss, sft_loss, partial(value_loss, ValueLossConfig())):
        same_losses(loss, of_pairs, sampled.batch)
    taught = random_packed((5, 3, 8), top_k=4)
    outputs = Outputs(taught.logprobs, -taught.logprobs, TopK(taught.batch.teacher.tokens, taught.batch.teacher.logprobs - 0.5))
    for whole in (False, True):
        config = LossConfig(kl_type="mixed", zero_outside_topk=whole)
        same_losses(partial(distillation_loss, config), outputs, taught.batch)


ESTIMATES = {
    "trusted": made(GRPOConfig(seq_logprob_error_threshold=1.5), LossConfig(), updates=2),
    "reinforce++": made(
        GRPOConfig(adv_estimator=AdvantageConfig(name="reinforce_plus_plus")),
        LossConfig(use_kl_in_reward=True, **KL),
        updates=2,
    ),
    "gae": made(PPOConfig(seq_logprob_error_threshold=1.5), LossConfig(use_kl_in_reward=True, **KL), updates=2),
}


@pytest.mark.parametrize("algorithm", ESTIMATES.values(), ids=ESTIMATES)
def test_estimates(algorithm):
    batch = random_sampled(reference=True).batch
    with pretended() as device:
        found, expected = (algorithm.estimate(moved(batch, on)) for on in (device, "cpu"))
        assert_same(found, expected)
        of_rank = token_advantages.moments([found])
        assert of_rank == token_advantages.moments([expected])
        to = token_advantages.normalization([[of_rank]], "unbiased")
        assert_same(token_advantages.standardize(found, to), token_advantages.standardize(expected, to))
