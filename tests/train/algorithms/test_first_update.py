"""The first update's forward pass gives the old log-probs of its samples, so a separate pass covers the other updates alone."""

import dataclasses

import pytest

from pipeline import algorithms
from pipeline.train.fsdp import FSDPBackend
from tests.models.cases import write_models
from tests.train.algorithms import cases
from tests.train.algorithms.invariance import ONE_RANK, learn
from tests.train.conftest import realm  # noqa: F401

ENGINES = {"use_generation_logprobs": True}
BOUND = 1e-6  # of float32, over four updates


def counted_passes(monkeypatch) -> list[str]:
    """Return a list that receives the weights of each forward pass outside of updates."""
    forward, passes = FSDPBackend.forward, []

    def counted(self, batches, model="policy", top_k=0):
        passes.append(model)
        return forward(self, batches, model, top_k)

    monkeypatch.setattr(FSDPBackend, "forward", counted)
    return passes


@pytest.mark.parametrize("case", ["grpo", "grpo, by sequences, KL, TIS"])
def test_updates_are_equal_with_and_without_the_separate_pass(case, realm, tmp_path, monkeypatch):  # noqa: F811
    write_models(tmp_path, ["llama"])
    build, passes = algorithms.build, counted_passes(monkeypatch)

    def of_all(recipe):
        algorithm = build(recipe)
        algorithm.needs = dataclasses.replace(algorithm.needs, old_of_first=True)
        return algorithm

    role, steps = learn(case, ONE_RANK, tmp_path)
    ours = {name: tensor.clone() for name, tensor in role._models["policy"].weights()}
    once = passes.count("policy")
    passes.clear()
    monkeypatch.setattr(algorithms, "build", of_all)
    other, theirs = learn(case, ONE_RANK, tmp_path)
    assert passes.count("policy") == 2 * once > 0  # of two updates
    for name, tensor in other._models["policy"].weights():
        assert (ours[name] - tensor).abs().max() < BOUND, name
    first, same = steps[0]["policy"][0], theirs[0]["policy"][0]
    assert first["ratio_max"] == first["ratio_min"] == 1.0
    for name in ("loss", "grad_norm", "gen_kl_error", "sampling_importance_ratio"):
        assert first[name] == pytest.approx(same[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("case", ["grpo", "ppo"])
def test_with_the_engines_log_probs_there_is_no_separate_pass(case, realm, tmp_path, monkeypatch):  # noqa: F811
    write_models(tmp_path, ["llama", "qwen3"])
    passes = counted_passes(monkeypatch)
    learn(case, ONE_RANK, tmp_path)
    with_pass = passes.count("policy")
    passes.clear()
    monkeypatch.setitem(cases.CASES, case, {**cases.CASES[case], "loss_fn": ENGINES})
    _, steps = learn(case, ONE_RANK, tmp_path)
    values = cases.STEPS * cases.UPDATES if case == "ppo" else 0  # passes of the critic, whose weights have the same name
    assert with_pass > values and passes.count("policy") == values
    first = steps[0]["policy"][0]
    assert first["ratio_max"] != 1.0 and first["sampling_importance_ratio"] == pytest.approx(1.0)
    assert first["token_mult_prob_error"] > 1
