"""float16: losses are scaled, a step that overflows is computed again, and a resumed run continues with the same scale."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config import LoRAConfig
from pipeline.train import gradients as loss_scale
from pipeline.train.gradients import INITIAL, LossScale
from pipeline.train.shards import local
from pipeline.types import LossOutput
from tests.train import cases, ranks

TINY = 1e-5
"""A factor of the loss with which most gradients in float16 are below its smallest number, 6e-8."""


def gradients(trained) -> dict[str, torch.Tensor]:
    return {name: local(p.grad).clone() for name, p in trained._trained.items()}


def small(outputs, batch) -> LossOutput:
    output = cases.loss(outputs, batch)
    return replace(output, loss=output.loss * TINY)


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest distance of a tensor from what is expected, relative to that."""
    return max(((found[name] / TINY - value).norm() / value.norm()).item() for name, value in expected.items())


@pytest.mark.usefixtures("realm")
def test_small_gradients_survive(models, monkeypatch):
    batches = [cases.pack([0, 1, 2, 3])]
    exact = ranks.backend(cases.policy(models / "qwen3_tied"))
    exact.step(batches, cases.loss)

    def half() -> float:
        trained = ranks.backend(cases.policy(models / "qwen3_tied", precision="float16"))
        trained.step(batches, small)
        return far(gradients(trained), gradients(exact))

    assert half() < 0.02
    monkeypatch.setattr(loss_scale, "INITIAL", 1.0)
    assert half() > 0.3  # without a scale


@pytest.mark.usefixtures("realm")
def test_a_step_that_overflows_is_computed_again(models):
    batches, policy = [cases.pack([0, 1]), cases.pack([2, 3])], cases.policy(models / "qwen3_tied", precision="float16")
    first, again = (ranks.backend(policy) for _ in range(2))
    again._scale.factor = 2.0**40
    expected, found = first.step(batches, cases.loss).metrics, again.step(batches, cases.loss).metrics
    assert INITIAL <= again._scale.factor < 2.0**40
    assert found.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=0.01)
    assert found == expected
    for name, parameter in first._parameters.items():  # Adam's first step is as long as the learning rate
        assert (local(parameter) - local(again._parameters[name])).abs().mean() < 1e-4


@pytest.mark.usefixtures("realm")
def test_a_step_that_is_computed_again_draws_the_same_dropout(models):
    batches, found = [cases.pack([0, 1]), cases.pack([2, 3])], []
    for factor in (INITIAL, 2.0**40):
        torch.manual_seed(0)
        policy, adapters = cases.policy(models / "qwen3_tied", precision="float16"), LoRAConfig(True, dim=4, dropout=0.5)
        trained = ranks.backend(policy, lora_cfg=adapters)
        trained._scale.factor = factor
        norm = trained.step(batches, cases.loss).metrics["grad_norm"]
        found.append((norm, torch.get_rng_state().tolist()))
    assert found[0][0] == pytest.approx(found[1][0], rel=0.01)
    assert found[0][1] == found[1][1]  # the next step draws what it would have drawn


@pytest.mark.usefixtures("realm")
def test_a_gradient_that_is_never_finite_ends_the_step(models):
    trained = ranks.backend(cases.policy(models / "qwen3_tied", precision="float16"))
    before = [local(p).clone() for p in trained._parameters.values()]
    calls = []

    def broken(outputs, batch) -> LossOutput:
        calls.append(trained._scale.factor)
        output = cases.loss(outputs, batch)
        return replace(output, loss=output.loss * torch.nan)

    with pytest.raises(FloatingPointError, match="the step was not taken"):
        trained.step([cases.pack([0])], broken)
    assert calls == [2.0**16, 2.0**15, 1.0] and trained._scale.factor == 2.0**16
    assert all(torch.equal(old, local(p)) for old, p in zip(before, trained._parameters.values(), strict=True))


@pytest.mark.usefixtures("realm")
def test_a_resumed_run_has_the_same_scale(models, tmp_path):
    batches, policy = [cases.pack([0, 1, 2])], cases.policy(models / "qwen3_tied", precision="float16")
    first, again = (ranks.backend(policy) for _ in range(2))
    first._scale.factor = 2.0**7
    first.step(batches, cases.loss)
    first.shards().write(tmp_path, 0)
    again.load(tmp_path)
    assert again._scale.record() == [2.0**7, 1]
    assert again.step(batches, cases.loss).metrics == first.step(batches, cases.loss).metrics


def test_the_scale_doubles_after_many_steps_and_is_1_in_other_precisions():
    scale = LossScale("float16")
    passes: list[float] = []

    def norm(largest: float) -> float:
        passes.append(scale.factor)
        return math.nan if scale.factor > largest else 2.0

    assert scale.finite_norm(lambda: norm(INITIAL / 2), torch.device("cpu")) == 2.0
    assert passes == [INITIAL, INITIAL / 2] and scale.factor == INITIAL / 2
    scale.factor, passes[:] = INITIAL * 4, []
    assert scale.finite_norm(lambda: norm(INITIAL / 2), torch.device("cpu")) == 2.0
    assert passes == [INITIAL * 4, INITIAL * 2, 1.0, INITIAL, INITIAL / 2] and scale.factor == INITIAL / 2
    for _ in range(loss_scale.GROWTH_STEPS):
        scale.count_step()
    assert scale.record() == [INITIAL, 0]
    scale.restore(LossScale("bfloat16").record())
    assert scale.record() == [INITIAL, 0]  # a checkpoint in bfloat16 has no scale for float16
    plain = LossScale("bfloat16")
    plain.restore([2.0**7, 3])
    for _ in range(loss_scale.GROWTH_STEPS):
        plain.count_step()
    with pytest.raises(FloatingPointError):
        plain.finite_norm(lambda: math.nan, torch.device("cpu"))
    assert plain.factor == 1
