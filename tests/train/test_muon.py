"""Muon with AdamW equals torch's optimizers on whole tensors, at every layout, and resumes at another one."""

import copy
import functools
import shutil

import pytest
import torch
from transformers import GptOssConfig, Lfm2Config

from pipeline.boxes import Box
from pipeline.models.hugging_face import layout as layout_of
from pipeline.models.hugging_face import meta_model
from pipeline.train import muon as product
from pipeline.train.matrices import find_matrices
from tests.problems import refused
from tests.train import cases, experts, muon, ranks
from tests.train.ranks import Layout

ONE = Layout(1, 1)


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """Return a folder with dense models and mixtures, in which checkpoints are written."""
    folder = tmp_path_factory.mktemp("muon")
    for family in ("llama", "qwen2", "qwen3_tied"):
        shutil.copytree(models / family, folder / family)
    experts.write_mixtures(folder)
    return folder


LAYOUTS = [
    pytest.param(ONE, ("qwen3_tied",), id="one"),
    pytest.param(Layout(1, 2), ("qwen3_tied",), id="tp2"),
    pytest.param(Layout(2, 1, expert=2), ("qwen3_moe",), id="dp2ep2"),
    pytest.param(Layout(2, 1), ("qwen3_tied", "qwen3_moe", "deepseek_v3"), id="dp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2), ("qwen3_tied", "mixtral"), id="cp2", marks=pytest.mark.full),
    pytest.param(Layout(2, 1, replicas=2), ("qwen3_tied",), id="hsdp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True), ("qwen2",), id="tp2-sp", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, expert=2), ("qwen3_moe", "deepseek_v3"), id="tp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2, expert=2), ("mixtral",), id="cp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(2, 2, replicas=2), ("llama",), id="hsdp2tp2", marks=pytest.mark.full),
    pytest.param(Layout(4, 1, replicas=2, expert=2), ("qwen3_moe",), id="hsdp2ep2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "families"), LAYOUTS)
def test_layout(layout, families, folder, realm):
    work = functools.partial(muon.everything, families)
    work(layout, folder) if layout == ONE else ranks.run(work, layout, folder)
    muon.check_resumes(ranks.backend(muon.policy(folder / families[0], max_grad_norm=None)), layout, folder, families[0])


def found(config) -> dict[str, list[product.Matrix]]:
    hf = meta_model(config, "logprobs", dtype=torch.float32)
    parameters = dict(hf.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {names[id(p)]: matrices for p, matrices in find_matrices(hf, parameters, layout_of(hf)).items()}


def test_experts_that_are_stored_transposed_have_the_rate_of_out_by_in():
    """gpt_oss keeps [in, out] of all experts in one tensor on disk, and biases [E, out], which are no matrices."""
    config = GptOssConfig(**cases.SHAPE, num_local_experts=4, head_dim=16)
    matrices = found(config)
    experts = matrices["model.layers.0.mlp.experts.gate_up_proj"]
    hidden, width = config.hidden_size, config.intermediate_size
    assert [matrix.box for matrix in experts] == [Box((e, 0, 0), (1, hidden, 2 * width)) for e in range(4)]
    assert {matrix.shape for matrix in experts} == {(2 * width, hidden)}
    assert "model.layers.0.mlp.router.weight" in matrices
    assert not [name for name in matrices if "bias" in name or "norm" in name or "embed" in name or "lm_head" in name]


def test_convolutions_are_no_matrices():
    matrices = found(Lfm2Config(**cases.SHAPE, full_attn_idxs=[1]))
    assert "model.layers.0.conv.in_proj.weight" in matrices and "model.layers.0.conv.conv.weight" not in matrices


def test_owners_have_equal_work(monkeypatch):
    """Sixteen equal matrices of two ranks, in rounds of two."""
    parameters = [torch.nn.Parameter(torch.empty(8, 4)) for _ in range(16)]
    halves = {rank: Box((4 * rank, 0), (4, 4)) for rank in range(2)}
    monkeypatch.setattr(product, "_holders", lambda parameter, rank: halves)
    monkeypatch.setattr(product, "ROUND", 64)
    matrices = {parameter: [product.Matrix(Box((0, 0), (8, 4)))] for parameter in parameters}
    alone, *rounds = product.plan_rounds(matrices, 0)
    assert not alone
    assert [sorted(task.owner for task in tasks) for tasks in rounds] == [[0, 0, 1, 1]] * 4


def test_a_checkpoint_of_another_optimizer_is_refused(models, tmp_path, realm):
    ranks.backend(cases.policy(models / "llama")).shards().write(tmp_path, 0)
    with refused(("policy.optimizer", "contradiction")):
        ranks.backend(muon.policy(models / "llama")).load(tmp_path)


def test_other_rates_of_both_parts_equal_a_resume_with_them(models, tmp_path, realm):
    trained, batch = ranks.backend(muon.policy(models / "llama")), [cases.pack([1, 2])]
    cases.learn(trained, batch)
    other = muon.policy(models / "llama", optimizer=copy.deepcopy(muon.OPTIMIZER))
    other.optimizer.kwargs["lr"], other.optimizer.kwargs["adamw"]["lr"] = 1e-2, 3e-4
    trained.new_rates(other)()
    trained.shards().write(tmp_path, 0)
    found = [cases.learn(trained, batch) for _ in range(2)]
    assert found[0]["lr"] == pytest.approx(1e-2 * (1 / 3 + 2 / 3 / 10))  # of a LinearLR over 10 steps
    assert trained._optimizer.param_groups[1]["lr"] == pytest.approx(3e-4 * (1 / 3 + 2 / 3 * 3 / 10))
    resumed = ranks.backend(other)
    resumed.load(tmp_path)
    assert [cases.learn(resumed, batch) for _ in range(2)] == found
    expected = muon.whole_state(trained)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in muon.whole_state(resumed).items())
