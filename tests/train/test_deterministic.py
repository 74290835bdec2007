"""policy.deterministic in processes that train: the switches are on, and on a CPU the bits stay as they are.

test_cuda.py, megatron/test_cuda.py and test_compiled_cuda.py compare bits on a GPU.
"""

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist

from pipeline import train
from pipeline.config import DTensorConfig, MegatronConfig
from pipeline.config.determinism import KEY, named_operators
from pipeline.train.train_backend import ModelRole
from pipeline.types import LossOutput
from tests.problems import refused
from tests.train import cases

pytestmark = pytest.mark.usefixtures("switches_restored")


def switches() -> dict[str, bool]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "inductor": torch._inductor.config.deterministic,
    }


ON = {"deterministic": True, "warns": False, "fills": False, "inductor": True}
BATCHES = [[0, 3, 5], [1, 2, 4]]


def steps(trained) -> list:
    """Return metrics and weights of two steps."""
    batches = [cases.pack(chosen) for chosen in BATCHES]
    logprobs = [out.logprobs for out in trained.forward(batches)]
    metrics = [trained.step(batches, cases.loss).metrics for _ in range(2)]
    return [*logprobs, metrics, *(tensor.clone() for _, tensor in trained.weights())]


def equal(ours: list, theirs: list) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def built(model, backend: str, deterministic: bool):
    megatron = MegatronConfig(enabled=True) if backend == "megatron" else MegatronConfig()
    fsdp = DTensorConfig(enabled=backend == "dtensor")
    policy = cases.policy(model, deterministic=deterministic, megatron_cfg=megatron, dtensor_cfg=fsdp)
    return train.build(policy, dist.group.WORLD, 7, ModelRole())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fsdp2_switches_it_on_and_computes_the_same_bits(models, realm, family):
    expected = steps(built(models / family, "dtensor", False))
    assert switches() != ON and not torch.are_deterministic_algorithms_enabled()
    trained = built(models / family, "dtensor", True)
    assert switches() == ON
    assert equal(steps(trained), expected)


def test_an_operator_of_a_users_loss_is_named(models, realm):
    trained = built(models / "qwen3", "dtensor", True)

    def loss(outputs, batch) -> LossOutput:
        changed = outputs.logprobs.clone().put_(torch.tensor([0]), torch.zeros(1))
        return LossOutput(changed.sum(), {})

    with refused((KEY, "unsupported")) as raised, named_operators():
        trained.step([cases.pack([0, 3])], loss)
    assert " put_," in str(raised.value)


def test_a_role_names_operators():
    """The verbs of train ranks that compute, and scoring, wherever it is."""
    from pipeline.roles.reward import Scorer
    from pipeline.roles.train import TrainRole

    assert all(hasattr(TrainRole.__dict__[name], "__wrapped__") for name in ("forward", "step", "evaluate"))
    assert hasattr(Scorer.score, "__wrapped__")
