"""Distillation: by hand, against its definition in float64, at the teacher, and for every split into microbatches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.divergence import LOG_INFINITESIMAL, distillation_loss
from pipeline.config import DistillationConfig, LossConfig
from pipeline.types import Completion, Outputs, Prompt, Rollout, RolloutGroup, TopK, Turn, VersionSpan
from tests.algorithms import distillation
from tests.algorithms.made import made
from tests.algorithms.packed import Packed, assert_split_invariant, differences, random_packed

LENGTHS, VOCABULARY = (6, 3, 8, 2), 11
CONFIGS = {
    "forward": LossConfig(kl_type="forward"),
    "reverse": LossConfig(kl_type="reverse"),
    "mixed": LossConfig(kl_type="mixed", mixed_kl_weight=0.3),
    "forward, zero outside": LossConfig(kl_type="forward", zero_outside_topk=True),
    "reverse, zero outside": LossConfig(kl_type="reverse", zero_outside_topk=True),
    "mixed, zero outside": LossConfig(kl_type="mixed", mixed_kl_weight=0.3, zero_outside_topk=True),
}


def logits_of(packed: Packed, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[T, V]` of the policy, with a graph, and of the teacher."""
    draw = torch.Generator().manual_seed(1000 + seed)
    policy, teacher = torch.randn(2, len(packed.leaf), VOCABULARY, generator=draw, dtype=torch.float64)
    return policy.requires_grad_(), teacher


def told(logits: torch.Tensor, teacher: torch.Tensor, top_k: int) -> tuple[Outputs, TopK]:
    """Return outputs as backends give them for these distributions."""
    best = teacher.log_softmax(-1).topk(top_k)
    policy = logits.log_softmax(-1)
    outputs = Outputs(entropy=-(policy.exp() * policy).sum(-1), top_k=TopK(best.indices, policy.gather(-1, best.indices)))
    return outputs, TopK(best.indices, best.values)


def loss_of(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor, packed: Packed, top_k: int):
    outputs, best = told(logits, teacher, top_k)
    return distillation_loss(config, outputs, replace(packed.batch, teacher=best), packed.counts)


def reference_loss(
    config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Compute the loss from the definitions, token by token over the whole vocabulary; `[T, V]` logits."""
    total = 0.0
    for student_row, teacher_row in zip(logits[mask], teacher[mask], strict=True):
        inside = teacher_row >= teacher_row.sort(descending=True).values[top_k - 1]
        p = teacher_row[inside].exp() / teacher_row[inside].exp().sum()
        q = student_row.exp() / (student_row if config.zero_outside_topk else student_row[inside]).exp().sum()
        forward = (p * (p / q[inside]).log()).sum()
        reverse = (q[inside] * (q[inside] / p).log()).sum()
        if config.zero_outside_topk:
            reverse = reverse + (q * (q.log() + 100.0))[~inside].sum()
        weight = {"forward": 1, "reverse": 0, "mixed": config.mixed_kl_weight}[config.kl_type]
        total = total + weight * forward + (1 - weight) * reverse
    return total / int(mask.sum())


def largest_differences() -> dict[str, tuple[int, float, float]]:
    def case(config: LossConfig, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_packed(LENGTHS, seed)
        logits, teacher = logits_of(packed, seed)
        expected = reference_loss(config, logits, teacher, packed.batch.loss_mask, 1 + seed)
        return loss_of(config, logits, teacher, packed, 1 + seed).loss, expected, logits

    return {f"distillation, {name}": differences(case(config, seed) for seed in range(10)) for name, config in CONFIGS.items()}


def test_against_the_reference():
    differences = largest_differences()
    assert len(differences) == 6
    for name, (cases, loss, gradient) in differences.items():
        assert cases == 10 and loss < 1e-12 and gradient < 1e-12, name


# ---- by hand ----------------------------------------------------------------------------------------------------------


def one_token(policy: list[float], teacher: list[float], entropy: float = 0.0) -> tuple[Outputs, Packed]:
    """Return a prompt token and one sampled token, with these probabilities of the teacher's top tokens."""
    packed = random_packed((2,))
    tokens = torch.arange(len(policy)).expand(2, -1)
    probabilities = [torch.tensor([[1.0] * len(p), p], dtype=torch.float64).log() for p in (policy, teacher)]
    outputs = Outputs(top_k=TopK(tokens, probabilities[0]), entropy=torch.tensor([0, entropy], dtype=torch.float64))
    return outputs, Packed(packed.leaf, packed.logprobs, replace(packed.batch, teacher=TopK(tokens, probabilities[1])))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LossConfig(kl_type="forward"), 2 / 3 * math.log(2) + 1 / 3 * math.log(0.5)),
        (LossConfig(kl_type="reverse"), 1 / 3 * math.log(0.5) + 2 / 3 * math.log(2)),
        (LossConfig(kl_type="mixed", mixed_kl_weight=0.5), 1 / 3 * math.log(2)),
        (LossConfig(kl_type="forward", zero_outside_topk=True), 2 / 3 * math.log(8 / 3) + 1 / 3 * math.log(2 / 3)),
    ],
)
def test_one_token_by_hand(config: LossConfig, expected: float):
    """After renormalization, the teacher gives the two tokens 2/3 and 1/3, and the policy 1/3 and 2/3."""
    outputs, packed = one_token([0.25, 0.5], [0.5, 0.25])
    out = distillation_loss(config, outputs, packed.batch, packed.counts)
    assert out.loss.item() == pytest.approx(expected, abs=1e-15)
    assert out.metrics["teacher_top_k_mass"].item() == out.metrics["policy_top_k_mass"].item() == 0.75
    assert ("reverse_kl" in out.metrics) == (not config.zero_outside_topk)


def test_the_mass_outside_the_top_k_by_hand():
    """The policy has 1/2 in the top token and 1/4 in each of two others; its entropy is 1.5 log 2."""
    outputs, packed = one_token([0.5], [0.4], entropy=1.5 * math.log(2))
    config = LossConfig(kl_type="reverse", zero_outside_topk=True)
    out = distillation_loss(config, outputs, packed.batch, packed.counts)
    assert LOG_INFINITESIMAL == -100
    assert out.loss.item() == pytest.approx(0.5 * math.log(0.5) + 2 * 0.25 * (math.log(0.25) + 100), abs=1e-12)


def check_minimum(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor, packed: Packed, top_k: int) -> None:
    """Check that the loss and its gradient are 0, and that no step in a direction of the top k lowers the loss."""
    loss = loss_of(config, logits, teacher, packed, top_k).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-13
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-13)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = 0.1 * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
        assert loss_of(config, logits.detach() + step, teacher, packed, top_k).loss > 0


@pytest.mark.parametrize("top_k", [2, 5, VOCABULARY])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_a_policy_equal_to_its_teacher_is_a_minimum(kind: str, top_k: int):
    packed = random_packed(LENGTHS)
    logits, _ = logits_of(packed, 0)
    check_minimum(LossConfig(kl_type=kind, mixed_kl_weight=0.3), logits, logits.detach().clone(), packed, top_k)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_a_policy_equal_to_its_teacher_over_all_tokens_is_a_minimum(kind: str):
    """No token is outside of the top k."""
    packed = random_packed(LENGTHS)
    logits, _ = logits_of(packed, 0)
    config = LossConfig(kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=True)
    check_minimum(config, logits, logits.detach().clone(), packed, VOCABULARY)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_the_mass_of_the_top_k_has_no_gradient(kind: str):
    """Logits outside the top k do not matter, however far the policy is from its teacher."""
    packed = random_packed(LENGTHS)
    logits, teacher = logits_of(packed, 0)
    loss = loss_of(LossConfig(kl_type=kind, mixed_kl_weight=0.3), logits, teacher, packed, 4).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, teacher.topk(4).indices, True)
    assert gradient[~inside].abs().max() < 1e-15
    assert gradient[packed.batch.loss_mask].abs().max() > 1e-3


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradcheck(config: LossConfig):
    packed = random_packed((3, 4))
    logits, teacher = logits_of(packed, 0)
    assert torch.autograd.gradcheck(lambda x: loss_of(config, x, teacher, packed, 4).loss, (logits,))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_split_and_order_of_sequences_do_not_matter(config: LossConfig):
    packed = random_packed(LENGTHS, top_k=5)
    shift = torch.linspace(-1, 0, 5, dtype=torch.float64)

    def share(piece: Packed):
        policy = piece.logprobs[:, None] + shift
        outputs = Outputs(entropy=piece.logprobs.square(), top_k=TopK(piece.batch.teacher.tokens, policy))
        return distillation_loss(config, outputs, piece.batch, packed.counts)

    assert_split_invariant(packed, ([[0], [1, 2, 3]], [[3, 1], [2, 0]], [[2], [0], [3], [1], []]), share, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("kind", distillation.KINDS)
def test_a_student_near_its_teacher_stays_there(kind: str, noise: float):
    teacher = distillation.a_teacher()
    student = distillation.near(teacher, noise)
    before = distillation.distance(student, teacher)
    distillation.distilled(distillation.KINDS[kind], student, teacher)
    after = distillation.distance(student, teacher)
    assert abs(after.mass - before.mass) < 0.01
    assert after.kl < max(1e-4, before.kl / 2)


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_samples_have_no_advantage():
    prompt = Prompt(0, np.array([5, 6], np.int32), "math", {})
    completion = Completion("0/0", np.array([7, 2], np.int32), np.array([-0.1, -0.2], np.float32), (VersionSpan(0, 2),), "stop")
    algorithm = made(DistillationConfig(), LossConfig())
    groups = [RolloutGroup(prompt, (Rollout((Turn(completion),), 1.0),))]
    assert algorithm.select(groups) == groups
    (sample,) = algorithm.compute_advantages(groups)
    assert sample.tokens.tolist() == [5, 6, 7, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.logprobs.tolist() == [0, 0, np.float32(-0.1), np.float32(-0.2)]
    assert sample.advantages.tolist() == [0] * 4 and sample.reward == 1.0
    assert algorithm.trains(0) == ("policy",)


def test_needs():
    def needs(**loss) -> Needs:
        return made(DistillationConfig(topk_logits_k=7), LossConfig(**loss)).needs

    assert needs() == Needs(teacher_top_k=7)
    assert needs(zero_outside_topk=True) == Needs(teacher_top_k=7, entropy=True)
    assert needs(zero_outside_topk=True, kl_type="forward") == Needs(teacher_top_k=7)
