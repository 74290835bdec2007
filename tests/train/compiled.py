"""Checks of train ranks with compiled layers, called like those of `ranks`."""

from __future__ import annotations

import io
import logging
import os
import unittest.mock
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
from torch._dynamo.utils import counters

from pipeline.config import LoRAConfig, SequencePackingConfig
from pipeline.train import compiled as subject
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.shards import local
from pipeline.train.train_backend import ModelRole
from pipeline.types import LossOutput, Outputs, PackedBatch
from tests.train import cases, ranks
from tests.train.ranks import Layout

NEAR = {"float32": (1e-5, 1e-5), "bfloat16": (0.3, 0.1)}  # of log-probs; of gradients, as a share of the largest
BATCHES = ([0, 3], [1, 2, 4], list(range(len(cases.LENGTHS))), [6], [5, 6, 7])


def backend(
    model: Path, layout: Layout, compiled: bool | None, role: ModelRole | None = None, precision="float32", **dtensor
) -> FSDPBackend:
    policy = cases.policy(model, precision=precision, sequence_packing=SequencePackingConfig(train_mb_tokens=128))
    return ranks.backend(policy, layout, role, compile=compiled, **dtensor)


def graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return counters["stats"]["unique_graphs"]


def pack(chosen: list[int]) -> PackedBatch:
    """Return those sequences on the backend's device."""
    return cases.pack(chosen, "cuda" if torch.cuda.is_available() else "cpu")


def check_agrees(layout: Layout, model: Path, precision: str = "float32", **settings) -> None:
    """Check that compiled layers agree with eager ones for batches of any length, and compile once, when the model is built."""
    near, gradients_near = NEAR[precision]
    before = graphs()
    compiled, eager = (backend(model, layout, on, precision=precision, **settings) for on in (True, False))
    built = graphs()
    assert built > before
    for chosen in BATCHES:
        batches = [pack(chosen)]
        (ours,), (theirs,) = compiled.forward(batches), eager.forward(batches)
        assert (ours.logprobs - theirs.logprobs).abs().max() < near
        assert torch.equal(_step(compiled, batches), ours.logprobs)  # in training, the same to the last bit
        _step(eager, batches)
        ranks.assert_near(_gradients(compiled), _gradients(eager), gradients_near)
        for mine, other in zip(compiled._model.parameters(), eager._model.parameters(), strict=True):
            local(mine).copy_(local(other))  # else an update by the sign of a small gradient sets them apart
    assert graphs() == built


def _step(trained: FSDPBackend, batches: list[PackedBatch]) -> torch.Tensor:
    """Take a step; return the log-probs that its loss gets."""
    seen = []

    def loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
        seen.append(outputs.logprobs.detach())
        return cases.loss(outputs, batch)

    trained.step(batches, loss)
    return torch.cat(seen)


def _gradients(trained: FSDPBackend) -> dict[str, torch.Tensor]:
    parameters = trained._model.hf.named_parameters()
    return {name: ranks.full(parameter.grad) for name, parameter in parameters if parameter.grad is not None}


def check_two_ranks(layout: Layout, folder: Path) -> None:
    check_agrees(layout, folder / "qwen3")


def check_ranks_agree(layout: Layout, folder: Path) -> None:
    """Check that if one rank has no compiler, none compiles and all train."""
    subject.DEVICES = ("cpu",)
    if dist.get_rank() == 1:
        torch._inductor.config.cpp.cxx = ("there-is-no-such-compiler",)
    log = io.StringIO()
    subject.logger.addHandler(logging.StreamHandler(log))
    trained = backend(folder / "qwen3", layout, None, ModelRole(reference=True))
    why = f"{subject.KEY}: layers run eagerly, because rank 1 of this component has no C++ compiler"
    assert log.getvalue().count(why) == (1 if dist.get_rank() == 0 else 0)
    trained.step([pack([0, 3])], cases.loss)
    assert not trained._model.compiled and graphs() == 0


def _of_steps() -> tuple[PackedBatch, PackedBatch]:
    """Return the batches of two steps; on a GPU their sequences have several blocks of keys."""
    if torch.cuda.is_available():
        return cases.pack_long(seed=1), cases.pack_long(seed=2)
    return pack([0, 3]), pack([5, 6, 7])


def train_and_save(layout: Layout, folder: Path, precision: str = "float32") -> None:
    """Take two steps; save after the first in `saved`, and the weights after the second in `expected.pt`."""
    trained, (first, second) = _in_a_cache_of_its_own(layout, folder, "first", precision), _of_steps()
    trained.step([first], cases.loss)
    trained.shards().write(folder / "saved", dist.get_rank())
    trained.step([second], cases.loss)
    torch.save(ranks.weights(trained), folder / "expected.pt")


def resume(layout: Layout, folder: Path, precision: str = "float32") -> None:
    """Check that its checkpoint leads to the weights of `train_and_save` in a process that has compiled nothing yet."""
    trained = _in_a_cache_of_its_own(layout, folder, "second", precision)
    trained.load(folder / "saved")
    trained.step([_of_steps()[1]], cases.loss)
    expected = torch.load(folder / "expected.pt")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ranks.weights(trained).items())


def _in_a_cache_of_its_own(layout: Layout, folder: Path, cache: str, precision: str) -> FSDPBackend:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / cache)
    return backend(folder / "qwen3", layout, compiled=True, precision=precision)


def check_reference(layout: Layout, folder: Path) -> None:
    """Check that the reference runs the policy's graphs: it needs no trial pass, and at first it is equal to the last bit."""
    with unittest.mock.patch.object(FSDPBackend, "_reference_model", side_effect=AssertionError("it is not to be tried out")):
        trained = backend(folder / "qwen3", layout, True, ModelRole(reference=True), precision="bfloat16")
    built = graphs()
    batches = [pack(chosen) for chosen in BATCHES]
    for policy, reference in zip(trained.forward(batches), trained.forward(batches, "reference"), strict=True):
        assert torch.equal(policy.logprobs, reference.logprobs)
    assert graphs() == built


def check_adapters(layout: Layout, folder: Path) -> None:
    settings = {"role": ModelRole(reference=True), "lora_cfg": LoRAConfig(True)}
    compiled, eager = (backend(folder / "qwen3", layout, on, **settings) for on in (True, False))
    batches = [pack(list(range(len(cases.LENGTHS))))]
    for trained in (compiled, eager):
        trained.step(batches, cases.loss)
    near, gradients_near = NEAR["float32"]
    ranks.assert_near(_gradients(compiled), _gradients(eager), gradients_near)
    reference = [trained.forward(batches, "reference")[0].logprobs for trained in (compiled, eager)]
    policy = [trained.forward(batches)[0].logprobs for trained in (compiled, eager)]
    assert (reference[0] - reference[1]).abs().max() < near
    assert (policy[0] - policy[1]).abs().max() < 1e-3  # the first Adam step goes by the signs of gradients
    assert (policy[0] - reference[0]).abs().max() > 2e-3
