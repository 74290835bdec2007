"""The gradient norm counts each element once, whatever flags modules set, and a first step names what is counted wrongly."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline.train.megatron import gradient_norm
from pipeline.train.megatron import megatron_backend as backend_module
from pipeline.train.megatron.groups import tensor_group
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import TP2, TP2_EP2_SP, Layout

NORM, WEIGHT = "decoder.layers.1.input_layernorm.weight", "decoder.layers.1.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"


def check_wrong_flags(layout: Layout, folder: Path, family: str, parameter: str, counted: bool) -> None:
    """Check that a step is refused, with the parameter's name, if Megatron-Core counts it twice or not at all."""

    def plant(local):
        gradient_norm.set_flags(local)
        for name, one in local.items():
            if name == parameter:
                one.tensor.tensor_model_parallel, one.tensor.shared = counted, not counted

    backend_module.set_flags = plant
    trained = layouts.backend(cases.policy(folder / family), layout)
    with pytest.raises(RuntimeError, match=f"counts {parameter} twice or never"):
        trained.step(ranks.batches(trained, layout), cases.loss)


@pytest.mark.parametrize(
    ("layout", "family", "parameter", "counted"),
    [
        (TP2, "qwen3", NORM, True),  # whole on both ranks: counted twice
        (TP2, "qwen3", WEIGHT, False),
        (TP2_EP2_SP, "qwen3_moe", EXPERT, False),
    ],
    ids=["a replica counted twice", "a part left out", "an expert left out"],
)
def test_a_wrong_flag_is_named(models, layout, family, parameter, counted):
    ranks.run(functools.partial(check_wrong_flags, family=family, parameter=parameter, counted=counted), layout, models)


def check_flags_of_modules(layout: Layout, folder: Path, family: str) -> None:
    """Check that the norm is right whatever the modules' flags are."""
    expected = layouts.expected(folder / family).norm
    for value in (True, False):

        def set_flags(local, value=value):
            for one in local.values():
                one.tensor.tensor_model_parallel, one.tensor.shared = value, False

        backend_module.set_flags = set_flags
        trained = layouts.backend(cases.policy(folder / family), layout)
        trained._optimizer._checked = True
        assert trained.step(ranks.batches(trained, layout), cases.loss).metrics["grad_norm"] == pytest.approx(
            expected, rel=1e-5
        )


def test_the_norm_does_not_depend_on_the_flags(models):
    ranks.run(functools.partial(check_flags_of_modules, family="gpt_oss"), TP2_EP2_SP, models)


def check_replicas(layout: Layout, folder: Path, family: str) -> None:
    """Check that a step is refused if tensor-parallel ranks have different gradients of a parameter that both hold."""
    trained = layouts.backend(cases.policy(folder / family), layout)
    finalize = trained._stage.config.finalize_model_grads_func

    def differ(*args, **kwargs):
        finalize(*args, **kwargs)
        for name, one in trained._local.items():
            if name == NORM:
                one.tensor.main_grad.mul_(1 + tensor_group().rank())

    trained._stage.config.finalize_model_grads_func = differ
    with pytest.raises(RuntimeError, match=f"different gradients of {NORM}, although all of them hold copies"):
        trained.step(ranks.batches(trained, layout), cases.loss)


def test_replicas_that_differ_are_named(models):
    ranks.run(functools.partial(check_replicas, family="qwen3"), TP2, models)


def check_groups(layout: Layout, folder: Path, family: str) -> None:
    """Check that a step is refused if Megatron-Core sums its norm over other ranks."""
    trained = layouts.backend(cases.policy(folder / family), layout)
    measure = trained._optimizer._core.get_grad_norm
    trained._optimizer._core.get_grad_norm = lambda: 1.1 * measure()
    before = [part.main.clone() for part in trained._optimizer.ranges()]
    with pytest.raises(RuntimeError, match=r"Megatron-Core's gradient norm is .*; the layout of the parameters gives"):
        trained.step(ranks.batches(trained, layout), cases.loss)
    assert all(torch.equal(part.main, old) for part, old in zip(trained._optimizer.ranges(), before, strict=True))


def test_another_norm_of_megatron_is_refused(models):
    ranks.run(functools.partial(check_groups, family="qwen3"), TP2, models)


def test_megatrons_float32_norm_of_a_large_embedding_is_accepted_on_cpus(monkeypatch):
    for group in ("tensor_group", "expert_tensor_group"):
        monkeypatch.setattr(gradient_norm, group, lambda: dist.group.WORLD)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each thread adds a part
    try:
        parameter = torch.nn.Parameter(torch.zeros(1))
        local = {"embedding": SimpleNamespace(tensor=parameter, first=True, cut=True, expert=False)}
        gradient_norm.set_flags(local)
        gradients = [(parameter, parameter, torch.randn(1 << 27, generator=torch.Generator().manual_seed(0)))]
        subject = gradient_norm.GradientNorm(local, dist.group.WORLD, torch.device("cpu"))
        norm, of_megatron = subject.norm(gradients), torch.norm(gradients[0][2]).item()
        assert abs(of_megatron / norm - 1) > gradient_norm.SAME
        subject.check(gradients, norm, lambda: of_megatron)
        with pytest.raises(RuntimeError, match="Megatron-Core's gradient norm is"):
            subject.check(gradients, norm, lambda: 1.1 * of_megatron)
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
