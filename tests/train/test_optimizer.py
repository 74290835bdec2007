"""Build optimizers and schedules by name, with NeMo-RL's list form; errors name the key."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from launch.preflight import libraries
from pipeline.boxes import Piece, whole
from pipeline.config import OptimizerConfig, RecipeError
from pipeline.train.checkpoint_state import optimizer_entries
from pipeline.train.optimizer import LRSchedule, build_optimizer
from tests.problems import named, refused
from tests.train import cases, ranks

WARMUP = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 4}}
COSINE = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 6, "eta_min": 0.1}}


def parameters():
    return [torch.nn.Parameter(torch.ones(3))]


def rates(config, steps=10, skip=0):
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 1.0}), parameters())
    schedule = LRSchedule(optimizer, config)
    schedule.advance(skip)
    found = []
    for _ in range(steps - skip):
        found.append(schedule.lr)
        optimizer.step()
        schedule.step()
    return found


def test_kwargs_reach_the_optimizer():
    kwargs = {"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.3, "foreach": True}
    optimizer = build_optimizer(OptimizerConfig(name="torch.optim.AdamW", kwargs=kwargs), parameters())
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in kwargs} == {**kwargs, "betas": (0.8, 0.9)}
    assert group["fused"] is None
    optimizer = build_optimizer(OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5}), parameters())
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["fused"]


def test_fused_is_the_same_optimizer():
    outcomes = []
    for fused in (True, False):
        parameter = parameters()
        kwargs = {"lr": 0.1, "weight_decay": 0.2, "fused": fused}
        optimizer = build_optimizer(OptimizerConfig(kwargs=kwargs), parameter)
        for step in range(3):
            parameter[0].grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
            optimizer.step()
        outcomes.append(parameter[0].detach())
    assert (outcomes[0] - outcomes[1]).abs().max() < 1e-6


OPTIMIZERS = sorted(
    name for name in torch.optim.__all__ if name != "lr_scheduler" and isinstance(getattr(torch.optim, name), type)
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_or_is_refused_before_submission(name, realm):
    """It steps a matrix and a vector that FSDP2 holds as DTensors, and a checkpoint stores its state."""
    dotted = f"torch.optim.{name}"
    refused_why = list(libraries._torch_class("policy.optimizer", dotted, {"lr": 0.1}, "params", "torch.optim.AdamW"))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    weights = [torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in ((4, 3), (3,))]
    pieces = {weight: [Piece(f"w{i}", whole(weight.shape), whole(weight.shape))] for i, weight in enumerate(weights)}
    shapes = {f"w{i}": tuple(weight.shape) for i, weight in enumerate(weights)}

    def train() -> None:
        optimizer = build_optimizer(OptimizerConfig(name=dotted, kwargs={"lr": 0.1}), weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        list(optimizer_entries(optimizer, pieces, shapes))

    if refused_why:
        assert named(refused_why) == {("policy.optimizer.name", "unsupported")}
        with pytest.raises((RecipeError, RuntimeError, TypeError, NotImplementedError)):
            train()
        return
    before = [weight.detach().clone() for weight in weights]
    train()
    assert all(not torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(before, weights, strict=True))


def test_no_scheduler_is_constant():
    assert rates(None) == [1.0] * 10


def test_one_scheduler():
    assert rates(WARMUP, 6) == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 1.0])


def test_list_with_milestones():
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10**9}}
    assert rates([WARMUP, constant, {"milestones": [4]}], 7) == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 1.0, 1.0])
    found = rates([WARMUP, COSINE, {"milestones": [4]}], 11)
    assert found[:4] == pytest.approx([0.1, 0.325, 0.55, 0.775])
    cosine = [0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * t / 6)).item()) / 2 for t in range(7)]
    assert found[4:] == pytest.approx(cosine)


STEPPED = {"name": "torch.optim.lr_scheduler.MultiStepLR", "kwargs": {"milestones": [2, 5], "gamma": 0.3}}


@pytest.mark.parametrize("config", [None, COSINE, STEPPED, [WARMUP, COSINE, {"milestones": [4]}]])
def test_advancing_equals_taking_the_steps(config):
    assert rates(config, skip=6) == rates(config)[6:]  # to the last bit


@pytest.mark.parametrize(
    "name, kwargs, key, code",
    [
        ("torch.optim.AdamWW", {}, "policy.optimizer.name", "not-importable"),
        ("AdamW", {}, "policy.optimizer.name", "not-importable"),
        ("torch.nn.Linear", {}, "policy.optimizer.name", "wrong-type"),
        ("torch.optim.AdamW", {"learning_rat": 1}, "policy.optimizer.kwargs.learning_rat", "unknown-key"),
        ("torch.optim.AdamW", {"lr": -1.0}, "policy.optimizer.kwargs.lr", "unsupported"),
        ("torch.optim.AdamW", {"lr": 1.0, "betas": 0.9}, "policy.optimizer.kwargs.betas", "unsupported"),
        ("torch.optim.AdamW", {"lr": -1.0, "eps": -1.0}, "policy.optimizer.kwargs", "unsupported"),
        ("torch.optim.Muon", {"lr": 1.0, "adjust_lr_fn": "spectral"}, "policy.optimizer.kwargs.adjust_lr_fn", "unsupported"),
        ("torch.optim.Muon", {"betas": [0.9, 0.95]}, "policy.optimizer.kwargs.betas", "unknown-key"),
        ("torch.optim.Muon", {"adamw": {"betas": 0.9}}, "policy.optimizer.kwargs.adamw.betas", "unsupported"),
        ("torch.optim.Muon", {"adamw": {"momentum": 0.9}}, "policy.optimizer.kwargs.adamw.momentum", "unknown-key"),
        ("torch.optim.Muon", {"adamw": 0.9}, "policy.optimizer.kwargs.adamw", "wrong-type"),
    ],
)
def test_wrong_optimizers_are_named(name, kwargs, key, code):
    with refused((key, code)):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), parameters())


@pytest.mark.parametrize(
    "config, key, code",
    [
        ({"name": "torch.optim.lr_scheduler.LinearRL"}, "policy.scheduler.name", "not-importable"),
        ({"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"gamma": 1}}, "policy.scheduler.kwargs", "unsupported"),
        ({"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "policy.scheduler.name", "unsupported"),
        ({"kwargs": {}}, "policy.scheduler", "bad-format"),
        ([WARMUP], "policy.scheduler", "bad-format"),
        ([], "policy.scheduler", "bad-format"),
        ([WARMUP, COSINE, {"milestones": [4, 8]}], "policy.scheduler", "bad-format"),
        ([WARMUP, {"name": "torch.optim.Adam"}, {"milestones": [4]}], "policy.scheduler[1].name", "wrong-type"),
        ("cosine", "policy.scheduler", "bad-format"),
    ],
)
def test_wrong_schedules_are_named(config, key, code):
    optimizer = build_optimizer(OptimizerConfig(kwargs={"lr": 1.0}), parameters())
    with refused((key, code)):
        LRSchedule(optimizer, config)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return closure()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])  # on one rank, plain and sharded parameters
def test_a_rank_tries_the_optimizer_before_it_looks_for_weights(precision, realm, tmp_path):
    cases.configs()["qwen3_moe"].save_pretrained(tmp_path)
    with refused(("policy.model_name", "unavailable-model")):
        ranks.backend(cases.policy(tmp_path, precision=precision))
    optimizer = OptimizerConfig(name=f"{__name__}.NeedsClosure", kwargs={"lr": 0.1})
    with refused(("policy.optimizer.name", "unsupported")) as error:
        ranks.backend(cases.policy(tmp_path, precision=precision, optimizer=optimizer))
    assert "closure" in str(error.value)
