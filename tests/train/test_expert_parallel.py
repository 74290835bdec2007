"""Check expert parallelism: every layout gives Hugging Face's eager log-probs and gradients."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import TokenizerConfig
from pipeline.train.hf_export import export_checkpoint
from tests.end_to_end.runs import ROOT
from tests.train import cases, experts, ranks
from tests.train.ranks import Layout

ALL = tuple(experts.configs())
CUT = ("qwen3_moe", "mixtral")  # whose attention tensor parallelism cuts


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family."""
    folder = tmp_path_factory.mktemp("mixtures")
    experts.write_mixtures(folder)
    return folder


LAYOUTS = [
    pytest.param(Layout(2, 1, expert=2), ALL, id="ep2"),
    pytest.param(Layout(4, 1, expert=2), ALL, id="dp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(4, 1, expert=4), ALL, id="ep4", marks=pytest.mark.long),
    pytest.param(Layout(1, 2), ALL, id="tp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, expert=2), ALL, id="tp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True, expert=2), CUT, id="sp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True), CUT, id="sp2", marks=pytest.mark.full),
    pytest.param(Layout(2, 2, expert=2), ALL, id="dp2tp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2, expert=2), ALL, id="cp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, context=2, expert=4), ALL, id="cp2tp2ep4", marks=pytest.mark.long),
    pytest.param(Layout(4, 1, replicas=2, expert=2), ALL, id="hsdp2ep2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "families"), LAYOUTS)
def test_agrees_with_eager(layout, families, mixtures):
    ranks.run(functools.partial(experts.against_eager, families), layout, mixtures)


ONE, EP2 = Layout(1, 1), Layout(2, 1, expert=2)
# (layout of the first ranks, families, layouts at which others go on from what those saved)
RUNS = [
    pytest.param(EP2, ("qwen3_moe",), (ONE,), id="ep2", marks=pytest.mark.full),
    pytest.param(EP2, ("mixtral", "deepseek_v3"), (ONE, Layout(1, 2)), id="ep2, others", marks=pytest.mark.long),
    pytest.param(EP2, ("qwen3_moe",), (Layout(4, 1, expert=4), Layout(1, 2)), id="ep2 on", marks=pytest.mark.long),
    pytest.param(Layout(2, 1), ("qwen3_moe",), (EP2,), id="dp2", marks=pytest.mark.long),
    pytest.param(Layout(4, 1, expert=4), ("qwen3_moe",), (EP2,), id="ep4", marks=pytest.mark.long),
    pytest.param(Layout(1, 2), ("qwen3_moe",), (EP2,), id="tp2", marks=pytest.mark.long),
    pytest.param(Layout(1, 2, sequence=True, expert=2), ("qwen3_moe",), (EP2,), id="tp2-sp-ep2", marks=pytest.mark.long),
    pytest.param(Layout(1, 1, context=2, expert=2), ("qwen3_moe",), (EP2,), id="cp2-ep2", marks=pytest.mark.long),
    pytest.param(Layout(4, 1, replicas=2, expert=2), ("qwen3_moe",), (EP2,), id="hsdp2-ep2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "families", "others"), RUNS)
def test_everything_else_that_a_run_does(layout, families, others, mixtures, tmp_path):
    ranks.run(functools.partial(experts.whole_runs, families), layout, mixtures)
    for other in others:
        ranks.run(functools.partial(experts.go_on, families, layout), other, mixtures)
    for family in families:
        saved, out = experts.exported_by(mixtures, layout, family), tmp_path / family
        tokenizer = TokenizerConfig(str(ROOT / "recipes/tiny"))
        export_checkpoint(saved / "checkpoint", cases.policy(mixtures / family, tokenizer=tokenizer), out)
        files, expected = load_file(out / "model.safetensors"), load_file(saved / "weights.safetensors")
        assert files.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in files.items())
        theirs = torch.cat(cases.eager(out)[0])
        assert (load_file(saved / "logprobs.safetensors")["logprobs"] - theirs).abs().max() < 1e-5
