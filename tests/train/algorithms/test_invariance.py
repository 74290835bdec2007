"""Check that losses, gradients and weights of every algorithm do not depend on microbatches, packing order or layout.

`python -m tests.train.algorithms` prints the differences.
"""

from pathlib import Path

import pytest

from tests.models.cases import write_models
from tests.train.algorithms.cases import CASES, FROM_ITSELF
from tests.train.algorithms.invariance import (
    FOUR_RANKS,
    OF_EXPERTS,
    OF_LLAMA,
    ONE_RANK,
    WITH_EXPERTS,
    Difference,
    Setup,
    difference,
    differences,
    initial,
    measured,
    result,
)
from tests.train.megatron.layouts import CP2, DP2, EP2, PP2, TP2_SP

# Float32 leaves about 1e-6 in a step, a little more after four; what a layout gets wrong is off by far more.
BOUND = 5e-5
# By default every algorithm runs on both backends, in the layout of Megatron-Core that cuts what its loss sums over.
QUICK = {
    Setup("fsdp", DP2, "single"): (
        "sft",
        "dpo",
        "kto",
        "rm",
        "grpo, by sequences, KL, TIS",
        "grpo, high entropy",
        "grpo, two tokenizers",
        "ppo",
        "distillation",
    ),
    Setup("megatron", TP2_SP, "reversed"): ("sft", "dpo", "kto", "rm", "distillation"),
    Setup("megatron", CP2, "single"): ("grpo, by sequences, KL, TIS", "grpo, high entropy", "grpo, two tokenizers", "ppo"),
}
# Marked `full`, every case of every algorithm runs in one setup of each kind.
FULL = (*QUICK, Setup("megatron", PP2))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    write_models(folder)
    return folder


def check(found: dict[str, dict[str, Difference]]) -> None:
    far = {(case, name): d for case, row in found.items() for name, d in row.items() if max(d.loss, d.norm, d.weights) > BOUND}
    assert not far


def test_every_algorithm(models):
    every = set(QUICK[Setup("fsdp", DP2, "single")])
    assert {CASES[case]["algorithm"] for case in every} == {case["algorithm"] for case in CASES.values()}
    assert {case for setup, cases in QUICK.items() if setup.backend == "megatron" for case in cases} == every
    measured(ONE_RANK, tuple(every), models)
    for setup, cases in QUICK.items():
        measured(setup, cases, models)
        check({case: {setup.name: difference(setup, case, models)} for case in cases})


def test_a_teacher_that_is_the_policy_teaches_nothing(models):
    """Also at the ends of chunks of several tokens."""
    measured(ONE_RANK, (FROM_ITSELF,), models)
    first = result(ONE_RANK, FROM_ITSELF, models).metrics[0]
    assert 0 <= first["loss"] < 1e-5 and first["matched_divergence"] == pytest.approx(0, abs=1e-5)


@pytest.mark.full
def test_every_case_of_every_algorithm(models):
    check(differences(FULL, tuple(CASES), models))
    check_that_cases_are_meaningful(models)


def check_that_cases_are_meaningful(models: Path) -> None:
    """Check that every model learns, every part of a loss is nonzero, and bounds affect some tokens but not all."""
    found = {case: result(ONE_RANK, case, models) for case in CASES}
    for case, of_case in found.items():
        assert all(change > 1e-3 for change in of_case.changes(initial("llama", models)).values()), case
        assert min(metrics["grad_norm"] for metrics in of_case.metrics) > 1e-3, case
    assert found["ppo"].weights.keys() == {"policy", "critic"}

    def most(case: str, name: str) -> float:
        return max(metrics[name] for metrics in found[case].metrics if name in metrics)

    for case in ("grpo, entropy bonus", "gspo", "cispo"):
        assert 0 < most(case, "clip_fraction") < 1, case
    assert 0 < most("ppo", "value_clip_fraction") < 1
    assert 0 < most("grpo, by sequences, KL, TIS", "is_oob_ratio") < 1
    assert most("kto", "kl") > 1e-3
    for case in ("grpo, by sequences, KL, TIS", "reinforce++, KL in the reward"):
        assert most(case, "reference_kl") > 1e-4, case
    of_cases = dict.fromkeys(("grpo, two teachers", "grpo, two tokenizers"), "teacher_kl")
    of_cases |= {"distillation, two teachers": "forward_kl", "distillation, two tokenizers": "matched_divergence"}
    for case, name in of_cases.items():
        of_teachers = most(case, f"{name}/any"), most(case, f"{name}/other")  # an estimate by tokens may be negative
        assert min(map(abs, of_teachers)) > 1e-3 and abs(of_teachers[0] / of_teachers[1] - 1) > 1e-2, case


@pytest.mark.long
def test_every_algorithm_in_every_setup(models):
    check(differences((*OF_LLAMA, *FOUR_RANKS), tuple(CASES), models))


@pytest.mark.full  # by default: tests/train/megatron/test_parity.py
def test_experts(models):
    check(differences([setup for setup in OF_EXPERTS if setup.layout == EP2], WITH_EXPERTS, models))


@pytest.mark.long
def test_experts_in_every_setup(models):
    check(differences(OF_EXPERTS, WITH_EXPERTS, models))
