"""Muon of the FSDP2 backend, compared with torch.optim.Muon and torch.optim.AdamW on whole tensors, rank by rank."""

from __future__ import annotations

import json
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.config import LoRAConfig, OptimizerConfig, PolicyConfig
from pipeline.train import muon
from pipeline.train.fsdp import FSDPBackend
from tests.train import cases, ranks
from tests.train.ranks import Layout

MUON = {"lr": 2e-2, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.05}
OPTIMIZER = OptimizerConfig(name="torch.optim.Muon", kwargs={**MUON, "adamw": ADAMW})
NEAR = 5e-2
"""Norm of the difference of two runs, as a share of the norm of the updates, if rounding alone makes their gradients differ."""
LIMIT = 0.05
"""The maximum norm of gradients, which all steps exceed."""


def policy(model: Path, **changes) -> PolicyConfig:
    return cases.policy(model, **{"optimizer": OPTIMIZER, "scheduler": ranks.SCHEDULER, "max_grad_norm": LIMIT, **changes})


def matrices(name: str, tensor: torch.Tensor) -> list[tuple]:
    """Return the index of each matrix of a parameter; [] of one that AdamW trains. Written by hand for `cases.FAMILIES`."""
    if tensor.dim() == 3 and "lora" not in name:
        half = tensor.shape[1] // 2
        rows = [slice(half), slice(half, None)] if name.endswith("gate_up_proj") else [slice(None)]
        return [(expert, part) for expert in range(len(tensor)) for part in rows]
    if tensor.dim() == 3:
        return [(expert,) for expert in range(len(tensor))]
    return [()] if tensor.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name else []


class PlainLoop:
    """torch.optim.Muon and torch.optim.AdamW on whole parameters."""

    def __init__(self, parameters: dict[str, torch.Tensor]):
        self.parameters = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        self._views = [
            (name, index, nn.Parameter(tensor[index]))
            for name, tensor in self.parameters.items()
            for index in matrices(name, tensor)
        ]
        self._rest = {name: nn.Parameter(t) for name, t in self.parameters.items() if not matrices(name, t)}
        adamw = {**ADAMW, "betas": tuple(ADAMW["betas"])}
        self._optimizers = [torch.optim.Muon([view for _, _, view in self._views], **MUON)]
        self._optimizers += [torch.optim.AdamW(self._rest.values(), **adamw, fused=True)] if self._rest else []
        self._schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10) for optimizer in self._optimizers]

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, index, view in self._views:
            view.grad = gradients[name][index].contiguous()
        for name, parameter in self._rest.items():
            parameter.grad = gradients[name]
        for optimizer in (*self._optimizers, *self._schedules):
            optimizer.step()


def trained_parameters(trained: FSDPBackend) -> dict[str, torch.Tensor]:
    return {name: ranks.full(parameter).clone() for name, parameter in trained._trained.items()}


def check_equals_torch(trained: FSDPBackend, layout: Layout, steps: int = 3) -> None:
    """Check that steps equal torch's optimizers on the whole gradients: matrices to the last bit, the rest to rounding."""
    before = trained_parameters(trained)
    expected = PlainLoop(before)
    for _ in range(steps):
        cases.learn(trained, ranks.batches(trained, layout))
        expected.step(ranks.gradients(trained))
    after = trained_parameters(trained)
    assert after.keys() == expected.parameters.keys()
    for name, tensor in after.items():
        difference = (tensor - expected.parameters[name]).abs().max().item()
        assert difference <= (0.0 if matrices(name, tensor) else 1e-7), (name, difference)
        assert not torch.equal(tensor, before[name]), name


def check_near_eager_loop(trained: FSDPBackend, layout: Layout, model: Path, steps: int = 3) -> None:
    """Check that steps are near those of a plain loop with Hugging Face eager's gradients.

    The iterations amplify rounding, as their cast to bfloat16 then rounds some entries in the other direction. Of a plain loop
    alone, noise of 1e-7 in the gradients changes the updates by 0.02.
    """
    hf = cases.eager_model(AutoModelForCausalLM, model, torch.float32)
    expected = PlainLoop(dict(hf.named_parameters()))
    for name, parameter in hf.named_parameters():
        parameter.data = expected.parameters[name]
    before = {name: tensor.clone() for name, tensor in expected.parameters.items()}
    for _ in range(steps):
        hf.zero_grad()
        cases.logprobs_and_loss(hf)[1].backward()
        nn.utils.clip_grad_norm_(hf.parameters(), LIMIT)
        expected.step({name: parameter.grad for name, parameter in hf.named_parameters()})
        cases.learn(trained, ranks.batches(trained, layout))
    moved = torch.cat([(tensor - before[name]).flatten() for name, tensor in expected.parameters.items()])
    after = trained_parameters(trained)
    off = torch.cat([(after[name] - tensor).flatten() for name, tensor in expected.parameters.items()])
    share = (off.norm() / moved.norm()).item()
    assert share < NEAR, share


def everything(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Check each family in float32, in bfloat16 in rounds of few matrices, and with adapters; then resume to the last bit."""
    for family in families:
        model = folder / family
        check_near_eager_loop(ranks.backend(policy(model), layout), layout, model)
        check_equals_torch(ranks.backend(policy(model), layout), layout)
        with unittest.mock.patch.object(muon, "ROUND", 1500):
            check_equals_torch(ranks.backend(policy(model, precision="bfloat16"), layout), layout)
        check_equals_torch(ranks.backend(policy(model), layout, lora_cfg=LoRAConfig(enabled=True, dim=4)), layout)
    ranks.check_save_and_load(layout, folder, families[0], changes={"optimizer": OPTIMIZER})
    trained = ranks.backend(policy(folder / families[0]), layout)
    trained.load(folder / ranks.saved_by(layout, families[0]))
    expected = whole_state(trained)
    if dist.get_rank() == 0:
        save_file(expected, state_file(layout, folder, families[0]))


def state_file(layout: Layout, folder: Path, family: str) -> Path:
    """Return the file of the `whole_state` after the steps that `ranks.check_save_and_load` saves."""
    return folder / f"{ranks.saved_by(layout, family)}.safetensors"


def whole_state(trained: FSDPBackend) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state in full, by name. Collective."""
    found = trained_parameters(trained)
    for name, parameter in trained._trained.items():
        for kind, value in trained._optimizer.state[parameter].items():
            found[f"{kind}.{name}"] = ranks.full(value).clone()
    return found


def check_resumes(trained: FSDPBackend, layout: Layout, folder: Path, family: str) -> None:
    """Check that what ranks of another layout saved is the same to the last bit here, and goes on."""
    saved = folder / ranks.saved_by(layout, family)
    trained.load(saved)
    expected = load_file(state_file(layout, folder, family))
    state = whole_state(trained)
    assert state.keys() == expected.keys() and any(name.startswith("momentum_buffer.") for name in state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    theirs = json.loads((saved / "after.json").read_text())[0]
    ours = cases.learn(trained, ranks.batches(trained, Layout(1, 1)))
    assert ours["lr"] == theirs["lr"]
    assert abs(ours["loss"] - theirs["loss"]) < 1e-6
    assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) < 1e-5
