"""Compare top-k and top-p truncation with a sort in float64 with autograd, with the engines' filters, and over ranks.

tests/generate/test_truncation.py checks what engines return.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.config import GenerationConfig
from pipeline.generate.sampling import keep_top
from pipeline.train.heads import packed_outputs
from pipeline.train.logprobs import LINEAR, HeadFunction, Truncation, VocabularyShard
from pipeline.train.train_backend import ModelRole, TrainBackend
from pipeline.types import LossOutput, Outputs, PackedBatch
from tests.train import cases, ranks
from tests.train.test_logprobs import TOKENS, VOCABULARY, Inputs, applied, inputs

TEMPERATURE = 0.6
TRUNCATIONS = [
    Truncation(None, 0.9),
    Truncation(None, 0.4),
    Truncation(5, 1.0),
    Truncation(8, 0.7),
    Truncation(1, 0.5),
    Truncation(1000, 1.0),  # more than there are tokens
]


def kept(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return [rows, V] bool by a sort, as in the papers. Of equal logits at the boundary, all or none are included."""
    ordered = logits.sort(-1, descending=True).values
    if truncation.top_k is not None:
        ordered = ordered.masked_fill(ordered < ordered[:, min(truncation.top_k, ordered.size(1)) - 1, None], -torch.inf)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    outside = ordered.isneginf() | (before >= truncation.top_p if truncation.top_p < 1 else False)
    return logits >= ordered.masked_fill(outside, torch.inf).amin(-1, keepdim=True)


def plain(given: Inputs, truncation: Truncation, function: HeadFunction = LINEAR) -> Outputs:
    """Compute the outputs by autograd through the whole table of log-probs."""
    logits = applied(function, given.hidden @ given.weight.T) / TEMPERATURE
    full = logits.log_softmax(-1).roll(1, 0)
    mask = kept(logits.detach(), truncation)
    table = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
    summed = -torch.where(mask, table.exp() * table.masked_fill(~mask, 0.0), 0.0).sum(1).roll(1)
    begins, targets = given.positions == 0, given.tokens[:, None]
    return Outputs(
        logprobs=table.roll(1, 0).gather(1, targets)[:, 0].masked_fill(begins, 0.0),
        entropy=summed.masked_fill(begins, 0.0),
        full_logprobs=full.gather(1, targets)[:, 0].masked_fill(begins, 0.0),
    )


def ours(given: Inputs, truncation: Truncation, chunk: int | None, shard=None, weight=None, candidates=None, **more) -> Outputs:
    weight = given.weight if weight is None else weight
    batch = cases.localized(given.tokens, given.positions, candidates)
    options = {"entropy": True, "truncation": truncation} | more
    return packed_outputs(given.hidden, weight, batch, TEMPERATURE, chunk, shard, **options)


def total(given: Inputs, outputs: Outputs) -> torch.Tensor:
    """Return the sum of all outputs; of log-probs only the finite ones, as losses use them."""
    inside = outputs.logprobs.isfinite()
    logprobs = torch.where(inside, outputs.logprobs, 0.0)
    weights = given.of_logprobs
    return (logprobs * weights + outputs.entropy * given.of_entropy + outputs.full_logprobs * weights.cos()).sum()


def drawable(truncation: Truncation) -> Inputs:
    """Return tokens, most of them kept and some cut."""
    given = inputs(torch.float32)
    logits = (given.hidden @ given.weight.T / TEMPERATURE).detach()
    drawn = torch.multinomial(
        torch.where(kept(logits, truncation), logits, -torch.inf).softmax(-1), 1, generator=torch.Generator().manual_seed(0)
    )[:, 0].roll(1)
    return dataclasses.replace(given, tokens=torch.where(torch.arange(TOKENS) % 4 == 1, given.tokens, drawn))


def exactly(given: Inputs) -> Inputs:
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (given.hidden, given.weight))
    return dataclasses.replace(given, hidden=hidden, weight=weight)


def check(found: Outputs, given: Inputs, gradients: tuple[torch.Tensor, ...], truncation: Truncation, function=LINEAR) -> None:
    exact = exactly(given)
    expected = plain(exact, truncation, function)
    assert torch.equal(found.logprobs.isneginf(), expected.logprobs.isneginf())
    for name in ("logprobs", "entropy", "full_logprobs"):
        value, theirs = getattr(found, name), getattr(expected, name)
        assert value.dtype == torch.float32
        inside = theirs.isfinite()
        assert (value - theirs)[inside].abs().max() < 2e-5, name
    for gradient, theirs in zip(
        gradients, torch.autograd.grad(total(exact, expected), (exact.hidden, exact.weight)), strict=True
    ):
        assert (gradient - theirs).abs().max() < 3e-6 * theirs.abs().max()


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_values_and_gradients(truncation, chunk):
    given = drawable(truncation)
    found = ours(given, truncation, chunk)
    outside = found.logprobs.isneginf().sum()
    assert outside == 0 if truncation.top_k == 1000 else outside > 0
    for _ in range(2):  # the graph may be used twice
        gradients = torch.autograd.grad(total(given, found), (given.hidden, given.weight), retain_graph=True)
        check(found, given, gradients, truncation)


@pytest.mark.parametrize("chunk", [5, None])
def test_values_and_gradients_with_a_soft_cap(chunk):
    truncation, function = Truncation(8, 0.7), HeadFunction(0.5, 9.0)
    given = inputs(torch.float32)
    found = ours(given, truncation, chunk, function=function)
    gradients = torch.autograd.grad(total(given, found), (given.hidden, given.weight))
    check(found, given, gradients, truncation, function)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_a_cut_token_has_no_gradient_in_any_loss(truncation):
    given = drawable(truncation)
    found = ours(given, truncation, 5, entropy=False)
    outside = found.logprobs.isneginf()
    assert outside.any() or truncation.top_k == 1000
    for weights in (torch.where(outside, torch.nan, 0.0), torch.where(outside, 1.0, 0.0)):
        for gradient in torch.autograd.grad(found.logprobs, (given.hidden, given.weight), weights, retain_graph=True):
            assert gradient.eq(0).all()


@pytest.mark.parametrize("chunk", [5, None])
def test_candidates_are_of_the_whole_distribution(chunk):
    given, truncation = drawable(TRUNCATIONS[0]), TRUNCATIONS[0]
    cut = ours(given, truncation, chunk, candidates=given.candidates)
    full = ours(given, None, chunk, candidates=given.candidates)
    assert torch.equal(cut.top_k.logprobs, full.top_k.logprobs)
    assert torch.equal(cut.full_logprobs, full.logprobs) and full.full_logprobs is None
    of_cut, of_full = (
        torch.autograd.grad((outputs.top_k.logprobs * given.of_candidates).sum(), (given.hidden, given.weight))
        for outputs in (cut, full)
    )
    for gradient, theirs in zip(of_cut, of_full, strict=True):
        assert (gradient - theirs).abs().max() < 1e-6 * theirs.abs().max()


# ---- the same filter as the engines' ----------------------------------------------------------------------------------------


def floors(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    return truncation.floor(logits, logits.logsumexp(1), None)[:, None]


@pytest.mark.parametrize("truncation", TRUNCATIONS[:-1], ids=str)
def test_equals_vllm_s_filter_and_the_reference_engine_s(truncation):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = 3 * torch.randn(300, 500, generator=torch.Generator().manual_seed(1))
    k = torch.full((300,), truncation.top_k or 500)
    p = torch.full((300,), truncation.top_p)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), k, p) > -torch.inf
    assert torch.equal(logits >= floors(logits, truncation), theirs)
    assert torch.equal(keep_top(logits, k, p) > -torch.inf, theirs)
    counts = theirs.sum(1)
    assert counts.min() >= 1 and counts.max() < 500


def test_equal_logits_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -torch.inf], [-0.0, 0.0, -1.0, -1.0, -1e9, 3e38]])
    assert (logits >= floors(logits, Truncation(2, 1.0))).tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1]]
    # The first has 0.447 of the mass; 0.6 takes one of the next three, so all.
    assert (logits[:1] >= floors(logits[:1], Truncation(None, 0.4))).tolist() == [[1, 0, 0, 0, 0, 0]]
    assert (logits[:1] >= floors(logits[:1], Truncation(None, 0.6))).tolist() == [[1, 1, 1, 1, 0, 0]]
    kept_by_engine = keep_top(logits[:1], torch.tensor([6]), torch.tensor([0.6])) > -torch.inf
    assert kept_by_engine.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert (floors(logits, Truncation(6, 1.0)) == logits.amin(1, keepdim=True)).all()


def test_settings_that_cut_nothing_are_no_truncation():
    assert Truncation.of(GenerationConfig()) is None
    assert Truncation.of(GenerationConfig(top_p=0.9)) == Truncation(None, 0.9)
    assert Truncation.of(GenerationConfig(top_k=50)) == Truncation(50, 1.0)


# ---- over ranks -------------------------------------------------------------------------------------------------------------


def over_ranks(layout: ranks.Layout, folder: Path) -> None:
    """Check unequal parts of the vocabulary."""
    start, stop = [(0, 20), (20, 34), (34, VOCABULARY)][dist.get_rank()]
    shard = VocabularyShard(start, dist.group.WORLD)
    for truncation, chunk in ((TRUNCATIONS[0], 12), (TRUNCATIONS[3], 12), (TRUNCATIONS[3], None), (TRUNCATIONS[4], None)):
        given = drawable(truncation)
        rows = given.weight.detach()[start:stop].requires_grad_()
        found = ours(given, truncation, chunk, shard, rows)
        of_hidden, of_rows = torch.autograd.grad(total(given, found), (given.hidden, rows))
        of_weight = torch.zeros_like(given.weight)
        of_weight[start:stop] = of_rows
        dist.all_reduce(of_weight)
        check(found, given, (of_hidden, of_weight), truncation)


def test_the_vocabulary_over_ranks(tmp_path):
    ranks.run(over_ranks, ranks.Layout(1, 3), tmp_path)


# ---- the backend ------------------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "qwen3_tied")
GENERATION = GenerationConfig(temperature=cases.TEMPERATURE, top_k=30, top_p=0.9)
ROLE = ModelRole(reference=True, entropy=True, truncated=True)


def loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    weights = batch.advantages
    logprobs = torch.where(outputs.logprobs.isfinite(), outputs.logprobs, 0.0)
    values = logprobs * weights + outputs.entropy * weights.cos() + outputs.full_logprobs * weights.square()
    return LossOutput(values.sum() / sum(cases.LENGTHS), {})


def eager(model: Path) -> tuple[list[Outputs], dict[str, torch.Tensor]]:
    """Return (outputs of each sequence, gradients of `loss` by name) by transformers' eager attention in float64."""
    network = cases.eager_model(cases.AutoModelForCausalLM, model, torch.float64)
    truncation, found, summed = Truncation.of(GENERATION), [], 0.0
    for tokens, weights in cases.sequences():
        logits = network(tokens[None]).logits[0, :-1] / GENERATION.temperature
        mask = kept(logits.detach(), truncation) if len(logits) else logits > 0
        table = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
        entropy = -torch.where(mask, table.exp() * table.masked_fill(~mask, 0.0), 0.0).sum(1)
        parts = [table.gather(1, tokens[1:, None])[:, 0], entropy, logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]]
        logprobs, entropy, full = (torch.cat([part.new_zeros(1), part]) for part in parts)
        found.append(Outputs(logprobs=logprobs, entropy=entropy, full_logprobs=full))
        summed = summed + loss(found[-1], dataclasses.replace(cases.pack([0]), advantages=weights.double())).loss
    summed.backward()
    return found, {name: parameter.grad for name, parameter in network.named_parameters()}


def check_step(trained: TrainBackend, mine: list[list[int]], expected: list) -> None:
    """Check log-probs, entropy and the reference's of the sequences `mine` by microbatch, and then a step."""
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


def check_backend(families: Sequence[str], counts: Sequence[int], layout, folder: Path) -> None:
    """Check either backend at a layout."""
    for family in families:
        expected, gradients = eager(folder / family)
        for batches in counts:
            trained = layout.backend(cases.policy(folder / family, generation=GENERATION), ROLE)
            check_step(trained, ranks.shares(layout, batches)[trained.data_rank], expected)
            ranks.assert_near(layout.gradients(trained), gradients, 2e-6 if isinstance(layout, ranks.Layout) else 5e-6)
    assert any(outputs.logprobs.isneginf().any() for outputs in expected)


@pytest.mark.parametrize(
    ("layout", "families", "counts"),
    [
        (ranks.Layout(1, 2), ("qwen3_tied",), (1,)),
        pytest.param(ranks.Layout(2, 1), ("llama",), (2,), marks=pytest.mark.full),
        pytest.param(ranks.Layout(1, 2), FAMILIES, (1, 2), marks=pytest.mark.full),
        pytest.param(ranks.Layout(1, 2, context=2, sequence=True), FAMILIES, (1, 2), marks=pytest.mark.full),
        pytest.param(ranks.Layout(2, 1), FAMILIES, (1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_backend_equals_eager(models, layout, families, counts):
    ranks.run(functools.partial(check_backend, families, counts), layout, models)


def test_a_model_without_truncation_ignores_it(models, realm):
    policy = cases.policy(models / "llama", generation=GENERATION)
    (found,) = ranks.backend(policy).forward([cases.pack([3, 6])])
    (expected,) = ranks.backend(cases.policy(models / "llama")).forward([cases.pack([3, 6])])
    assert torch.equal(found.logprobs, expected.logprobs) and found.full_logprobs is None
