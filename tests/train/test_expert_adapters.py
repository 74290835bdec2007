"""Compare adapters of experts with the merged model in float64 at every layout; save, resume and export them."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.train.saved_weights import checkpoint_weights
from tests.models import cases as megatron_cases
from tests.train import adapters, cases, expert_adapters, experts, ranks
from tests.train.megatron.adapters import check_peft_loads
from tests.train.ranks import Layout

ALL = tuple(experts.configs())
CUT = ("qwen3_moe", "mixtral")
ONE, EP2, TP2 = Layout(1, 1), Layout(2, 1, expert=2), Layout(1, 2)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family."""
    folder = tmp_path_factory.mktemp("mixtures")
    experts.write_mixtures(folder)
    megatron_cases.write_models(folder, ["gpt_oss", "nemotron_h_moe"])
    return folder


KINDS = tuple(expert_adapters.KINDS)
# (layout, families, kinds of adapters, layouts at which others go on from what the first ranks saved)
LAYOUTS = [
    pytest.param(EP2, ("qwen3_moe",), ("dora",), (ONE,), id="ep2", marks=pytest.mark.full),
    pytest.param(EP2, ALL, KINDS, (ONE, TP2), id="ep2, all", marks=pytest.mark.long),
    pytest.param(TP2, CUT, ("all",), (EP2,), id="tp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True, expert=2), ("qwen3_moe",), KINDS, (ONE,), id="sp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2), ("qwen3_moe",), KINDS, (EP2,), id="cp2", marks=pytest.mark.full),
    pytest.param(Layout(4, 1, expert=2), ("qwen3_moe",), ("all",), (EP2,), id="dp2ep2", marks=pytest.mark.full),
    pytest.param(TP2, ("deepseek_v3",), KINDS, (EP2,), id="tp2, latent attention", marks=pytest.mark.long),
    pytest.param(Layout(4, 1, replicas=2, expert=2), CUT, KINDS, (ONE,), id="hsdp2ep2", marks=pytest.mark.long),
    pytest.param(Layout(2, 2, expert=2), ALL, KINDS, (EP2,), id="dp2tp2ep2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "families", "kinds", "others"), LAYOUTS)
def test_agrees_with_the_merged_model(layout, families, kinds, others, mixtures, tmp_path):
    ranks.run(functools.partial(expert_adapters.every_check, families, kinds), layout, mixtures)
    for other in others:
        ranks.run(functools.partial(expert_adapters.go_on, families, layout), other, mixtures)
    for family in families:
        place = expert_adapters.saved_by(mixtures, layout, family)
        expected, found = load_file(place / "weights.st"), dict(checkpoint_weights(place, cases.policy(mixtures / family)))
        assert found.keys() == expected.keys()
        assert max((found[name] - tensor).abs().max() for name, tensor in expected.items()) < 1e-6
        base = load_file(mixtures / family / "model.safetensors")
        changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
        assert changed and all(".experts." in name or ".mlp.gate_up" in name for name in changed)
        check_peft_loads(place, mixtures / family, expected, tmp_path / family)


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h_moe"])
def test_experts_of_other_kinds(realm, mixtures, family):
    """Check experts with biases in transposed parameters, and experts without a gate."""
    expert_adapters.check_against_merged(mixtures / family, ONE, "all" if family == "gpt_oss" else "dora")


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_dropout(realm, mixtures, position, recomputed):
    """Check that training passes drop entries, that recomputation draws the same, and that log-probs are without."""
    found = []
    for dropout in (0.0, 0.4, 0.4):
        dropped = dataclasses.replace(expert_adapters.KINDS["experts"], dropout=dropout, dropout_position=position)
        again = recomputed and len(found) == 2
        trained = ranks.backend(cases.policy(mixtures / "qwen3_moe"), lora_cfg=dropped, activation_checkpointing=again)
        adapters.shake(trained)
        batch = [cases.pack(list(range(len(cases.LENGTHS))))]
        logprobs = trained.forward(batch)[0].logprobs
        torch.manual_seed(5)
        metrics = trained.step(batch, cases.loss).metrics
        found.append((logprobs, metrics["loss"], torch.stack([g.norm() for g in ranks.gradients(trained).values()])))
    without, first, second = found
    assert torch.equal(without[0], first[0])
    assert abs(without[1] - first[1]) > 1e-3
    assert first[1] == second[1] and torch.equal(first[2], second[2])
    assert dist.get_world_size() == 1
