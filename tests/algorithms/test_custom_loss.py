"""A user's loss in place of an algorithm's, and the call on a tiny batch that a submission makes."""

import functools
from dataclasses import replace

import pytest
import torch

from pipeline.algorithms import custom_loss
from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.reductions import masked_share
from pipeline.config import LossConfig
from pipeline.types import LossOutput, Outputs
from tests.algorithms.made import grpo
from tests.algorithms.packed import assert_split_invariant, random_packed

LENGTHS = (4, 9, 2, 7)


def truncated(outputs, batch, counts, most=2.0):
    """Return the loss of the page pipeline/algorithms/README.md."""
    weights = (outputs.logprobs.detach() - batch.generate_logprobs).exp()
    loss = masked_share(-weights.clamp(max=most) * batch.advantages * outputs.logprobs, batch, counts)
    return LossOutput(loss, {"weights_truncated": masked_share((weights > most).float(), batch, counts)})


def likelihood(outputs, batch, counts):
    return masked_share(-outputs.logprobs, batch, counts)


def test_a_function_replaces_the_loss_of_an_algorithm():
    packed = random_packed(LENGTHS)
    path = f"{__name__}.truncated"
    algorithm = grpo(LossConfig(custom=path, custom_kwargs={"most": 0.3}), num_prompts_per_step=4)
    output = algorithm.losses["policy"](Outputs(packed.logprobs), packed.batch, packed.counts)
    torch.testing.assert_close(output.loss, truncated(Outputs(packed.logprobs), packed.batch, packed.counts, 0.3).loss)
    assert output.metrics.keys() == {"weights_truncated"} and output.metrics["weights_truncated"] > 0
    plain = custom_loss.of_recipe(LossConfig(custom=f"{__name__}.likelihood"))
    scalar = plain(Outputs(packed.logprobs), packed.batch, packed.counts)
    assert scalar.metrics == {} and scalar.loss.requires_grad
    assert grpo(num_prompts_per_step=4).losses["policy"].__name__ == "loss"


@pytest.mark.parametrize("function", [truncated, likelihood])
def test_the_example_keeps_its_promise(function):
    """Its gradient is the same in one batch and in microbatches of any packing."""
    assert custom_loss.dry_call("x", function, {}, Needs()) is None
    packed = random_packed(LENGTHS)
    packed = replace(packed, batch=replace(packed.batch, advantages=torch.linspace(-1, 1, sum(LENGTHS), dtype=torch.float64)))

    def share(piece):
        return custom_loss.checked("x", function(Outputs(piece.logprobs), piece.batch, packed.counts))

    assert_split_invariant(packed, ([[3, 0], [2, 1]], [[1], [3], [0], [2], []]), share)


def bad(kind, outputs, batch, counts):
    logprobs = outputs.logprobs
    return {
        "a mean": lambda: -(logprobs * batch.loss_mask).mean(),
        "nothing": lambda: None,
        "a number": lambda: 1.0,
        "per token": lambda: -logprobs,
        "no graph": lambda: torch.ones(()),
        "nan": lambda: (-logprobs - 0.1).sqrt().sum(),
        "an absent input": lambda: (logprobs - batch.reference_logprobs).sum(),
        "a metric with a graph": lambda: LossOutput(likelihood(outputs, batch, counts), {"x": logprobs.sum()}),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a mean", "its gradient depends on the microbatches; expected a sum over tokens, divided by counts.tokens"),
        ("nothing", "my.loss returned None; expected a LossOutput, or a scalar tensor"),
        ("a number", "my.loss returned a float; expected a LossOutput, or a scalar tensor"),
        ("per token", "my.loss returned a loss of shape (14,); expected a scalar"),
        ("no graph", "its loss has no gradient: it does not depend on `outputs`"),
        ("nan", "its gradient is not finite on log-probs from -2 to -0.1"),
        ("an absent input", "raised TypeError: unsupported operand"),
        ("a metric with a graph", "metric x: expected a tensor without a graph. Try .detach()"),
    ],
)
def test_a_loss_with_a_mistake_is_refused(kind, says):
    assert says in str(custom_loss.dry_call("my.loss", functools.partial(bad, kind), {}, Needs()))


def test_a_call_has_the_inputs_that_the_algorithm_needs():
    def reads(outputs, batch, counts):
        of_models = batch.old_logprobs + batch.reference_logprobs + batch.teacher_logprobs + batch.teacher.logprobs.sum(-1)
        return masked_share(outputs.entropy + of_models + outputs.top_k.logprobs.sum(-1), batch, counts)

    needs = Needs(entropy=True, old=True, reference=True, teacher_top_k=2, teacher_logprobs=True)
    assert custom_loss.dry_call("my.loss", reads, {}, needs) is None
    assert custom_loss.dry_call("my.loss", lambda outputs, *rest: outputs.values.sum(), {}, Needs(head="values")) is None
    assert "NoneType" in str(custom_loss.dry_call("my.loss", reads, {}, Needs()))
