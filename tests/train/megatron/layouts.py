"""Layouts of Megatron-Core, train ranks in them, and what a backend in any of them says against Hugging Face eager."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pipeline.boxes import whole
from pipeline.config import MegatronConfig, MegatronDDPConfig, PolicyConfig
from pipeline.models.layout import restrict
from pipeline.train.megatron.backend import MegatronBackend, _boxes
from tests.train import cases, ranks


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    dp: int = 1

    @property
    def data(self) -> int:
        return self.dp

    @property
    def tensor(self) -> int:
        return self.tp

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def name(self) -> str:
        sizes = [
            f"{key}{getattr(self, key)}" for key in ("tp", "pp", "cp", "ep", "etp", "dp") if getattr(self, key) not in (1, None)
        ]
        return "-".join([*sizes, *(["sp"] if self.sp else [])]) or "one"

    def megatron(self, **changes) -> MegatronConfig:
        settings = {
            "enabled": True,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
            "freeze_moe_router": False,
            "pipeline_dtype": "float32",
            "distributed_data_parallel_config": MegatronDDPConfig(),
        }
        return MegatronConfig(**{**settings, **changes})


def backend(policy: PolicyConfig, layout: Layout, reference: bool = False, **changes) -> MegatronBackend:
    """Megatron-Core's groups are made anew, so that one process can build several."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    policy.megatron_cfg = layout.megatron(**changes)
    return MegatronBackend(policy, dist.group.WORLD, seed=7, reference=reference)


def gradients(trained: MegatronBackend) -> dict[str, torch.Tensor]:
    """In full, float32, by Hugging Face name; of parameters that the optimizer updates. They stay until the next step."""
    found: dict[str, torch.Tensor] = {}
    for part in trained._optimizer.ranges():
        grad = part.parameter.main_grad.detach().float().flatten()[part.start : part.stop]
        for box, view in _boxes(part, grad):
            for piece in restrict(trained._of[id(part.parameter)].hugging_face, box):
                shape = trained._shapes[piece.name]
                full = found.setdefault(piece.name, torch.full(shape, torch.nan))
                full[piece.source.within(whole(shape))] = view[piece.target.within(whole(tuple(view.shape)))].view(
                    piece.source.size
                )
    merged = {}
    for name, shape in trained._shapes.items():
        mine = found.get(name, torch.full(shape, torch.nan))
        every = torch.stack([torch.empty_like(mine) for _ in range(dist.get_world_size())])
        dist.all_gather(list(every), mine)
        if every.isnan().all():
            continue
        merged[name] = every.nanmean(0)
        assert not merged[name].isnan().any(), f"no rank has all of the gradient of {name}"
        spread = (every - merged[name])[~every.isnan()].abs().max()
        assert spread < 1e-6, f"replicas of the gradient of {name} differ by {spread}"
    return merged


def shares(layout: Layout, batches: int = 2) -> list[list[list[int]]]:
    """Which sequences are in which batch of which data rank."""
    order = list(range(len(cases.LENGTHS)))
    parts = [order[i :: layout.dp * batches] for i in range(layout.dp * batches)]
    return [parts[rank :: layout.dp] for rank in range(layout.dp)]


def eager(model: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """As `cases.eager`, with gradients by the names that a checkpoint on disk has."""
    logprobs, found, total = cases.eager(model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return logprobs, revert_weight_conversion(empty, found), total


def check_against_eager(
    trained: MegatronBackend, layout: Layout, model: Path, tolerance: float = 3e-6, logprob_tolerance: float = 1e-5
) -> None:
    """Log-probs, loss, metrics, every gradient and their norm of one step, against HF eager."""
    logprobs, expected, total = eager(model)
    batches = [cases.pack(chosen) for chosen in shares(layout)[trained.data_rank]]
    for chosen, ours in zip(shares(layout)[trained.data_rank], trained.forward(batches), strict=True):
        theirs = torch.cat([logprobs[i] for i in chosen])
        assert ours.dtype == torch.float32
        worst = (ours - theirs).abs().max()
        assert worst < logprob_tolerance, f"log-probs differ by {worst:.1e}"
    result = trained.step(batches, cases.loss)
    ranks.assert_near(gradients(trained), expected, tolerance)
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert abs(result.metrics["grad_norm"] / norm - 1) < 1e-6
    assert abs(result.metrics["loss"] - total.item()) < 1e-6
    every = torch.cat(logprobs)
    assert abs(result.metrics["logprob"] - every.mean().item()) < 1e-5
    assert abs(result.metrics["logprob_min"] - every.min().item()) < 1e-5
    assert result.metrics["logprob_max"] == max(weights.max().item() for _, weights in cases.sequences())
    assert result.metrics["lr"] == 1e-3
