"""Layouts of Megatron-Core, train ranks in them, and comparisons of a backend with Hugging Face eager.

`python -m tests.train.parity megatron` prints the largest differences of every family.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipeline.boxes import whole
from pipeline.config import MegatronConfig, MegatronDDPConfig, PolicyConfig
from pipeline.models.hugging_face import meta_model, on_disk
from pipeline.models.recorded_layout import restrict
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.megatron.saved_state import boxes
from pipeline.train.train_backend import ModelRole
from tests.models.cases import FAMILIES, write_models
from tests.train import cases, ranks

MIXTURES = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "deepseek_v3_plain",
    "nemotron_h_moe",
    "gpt_oss",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minimax_m2",
    "qwen3_5_moe_text",
)
WHOLE_EXPERTS = ("gpt_oss",)  # tensor parallelism cannot split the experts
UNEVEN = (
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3_plain",
    "nemotron_h_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
)  # an odd number of layers


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
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def name(self) -> str:
        sizes = {k: getattr(self, k) for k in ("tp", "pp", "cp", "ep", "dp")}
        parts = [f"{k}{size}" for k, size in sizes.items() if size > 1]
        return "-".join([*parts, *(["sp"] if self.sp else []), *([f"etp{self.etp}"] if self.etp else [])]) or "one"

    @property
    def families(self) -> tuple[str, ...]:
        """Return the families that the layout affects.

        Megatron-Core needs sequence parallelism for experts split by tensor parallelism, and a dense model has no experts.
        """
        left_out = ()
        if self.ep > 1:
            return MIXTURES
        if self.tp > 1 and not self.sp:
            left_out += MIXTURES
        elif self.tp > 1:
            left_out += WHOLE_EXPERTS
        return tuple(f for f in FAMILIES if f not in left_out)

    @property
    def data(self) -> int:
        return self.dp

    def backend(self, policy: PolicyConfig, role: ModelRole | None = None, **changes) -> MegatronBackend:
        """Return this rank's backend. changes: of `policy.megatron_cfg`."""
        return backend(policy, self, role or TRAINED, **changes)

    def gradients(self, trained: MegatronBackend) -> dict[str, torch.Tensor]:
        """Return the full gradients by Hugging Face name, which are equal on replicas."""
        found, replicas = gradients(trained)
        largest = max(gradient.abs().max().item() for gradient in found.values())
        assert replicas <= 1e-6 * largest, f"gradients of replicas differ by {replicas}"
        return found

    def eager(self, model: Path) -> ranks.Expected:
        theirs = expected(model)
        return theirs.logprobs, theirs.gradients, torch.tensor(theirs.loss)

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
            "distributed_data_parallel_config": MegatronDDPConfig(),
        }
        return MegatronConfig(**{**settings, **changes})


ONE = Layout()
TP2, TP2_SP, PP2, CP2, DP2 = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2)
EP2 = Layout(ep=2, dp=2)
# Experts are cut as all else is, where they are not spread (TP2_SP), or whole in each of the ranks that they are spread over.
TP2_EP2_SP, CP2_EP2 = Layout(tp=2, ep=2, sp=True), Layout(cp=2, ep=2)
OF_TWO_RANKS = (TP2, TP2_SP, PP2, CP2, DP2, EP2, TP2_EP2_SP, CP2_EP2)
# Not here: experts that are both spread and cut (ep 2, etp 2), for which gloo has no uneven all_gather.
TP2_PP2_SP, TP2_CP2_SP = Layout(tp=2, pp=2, sp=True), Layout(tp=2, cp=2, sp=True)
OF_FOUR_RANKS = (TP2_PP2_SP, TP2_CP2_SP, Layout(pp=2, ep=2, dp=2))
TRAINED = ModelRole()
LAYOUTS = (ONE, *OF_TWO_RANKS, *OF_FOUR_RANKS)


# ---- train ranks --------------------------------------------------------------------------------------------------------


def backend(policy: PolicyConfig, layout: Layout = ONE, role: ModelRole = TRAINED, **changes) -> MegatronBackend:
    """Return a backend.

    changes: of `policy.megatron_cfg`. Megatron-Core's groups are made anew, so that one process can have several layouts.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return another(policy, layout, role, **changes)


def release() -> None:
    """Destroy the process groups of this process's backends, none of which can be used any more.

    Each gloo group has three threads, one of which polls a hundred times a second. A process that builds many backends would
    end with more than a thousand of them, and they would take a processor of their own.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    for group in parallel_state._global_process_group_list:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    gc.collect()
    for wrapper in [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]:
        vars(wrapper).clear()  # hooks that autograd holds refer to it, so that it would never be freed


def another(policy: PolicyConfig, layout: Layout = ONE, role: ModelRole = TRAINED, **changes) -> MegatronBackend:
    """Return a further model for a process that has one."""
    if layout.pp > 1 and Path(policy.model_name).name in UNEVEN:
        changes.setdefault("num_layers_in_first_pipeline_stage", 2)
    policy.megatron_cfg = layout.megatron(**changes)
    return MegatronBackend(policy, dist.group.WORLD, seed=7, role=role)


# ---- full tensors of a backend ------------------------------------------------------------------------------------------


def gradients(trained: MegatronBackend) -> tuple[dict[str, torch.Tensor], float]:
    """Return (full float32 gradients of all updated parameters by Hugging Face name, the largest difference of replicas).

    They stay until the next step.
    """
    mine = {name: torch.full(shape, torch.nan) for name, shape in trained._saved.shapes.items()}
    of = {id(local.tensor): local for local in trained._local.values()}
    for part in trained._optimizer.ranges():
        gradient = part.parameter.main_grad.detach().float().cpu().flatten()[part.start : part.stop]
        for box, view in boxes(part, gradient):
            for piece in restrict(of[id(part.parameter)].hugging_face, box):
                values = view[piece.target.within(whole(tuple(view.shape)))].reshape(piece.source.size)
                mine[piece.name][piece.source.within(whole(tuple(mine[piece.name].shape)))] = values
    flat = torch.cat([tensor.flatten() for tensor in mine.values()]).to(trained.device)
    every = torch.stack([torch.empty_like(flat) for _ in range(dist.get_world_size())])
    dist.all_gather(list(every), flat)
    merged = every.nanmean(0)
    spread = (every - merged).abs().nan_to_num().max().item()
    parts = merged.cpu().split([tensor.numel() for tensor in mine.values()])
    found = {name: part.view_as(mine[name]) for name, part in zip(mine, parts, strict=True)}
    found = {name: tensor for name, tensor in found.items() if not tensor.isnan().all()}
    for name, tensor in found.items():
        assert not tensor.isnan().any(), f"no rank has all of the gradient of {name}"
    return found, spread


# ---- against Hugging Face -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Outputs of Hugging Face's eager model in float64 for all sequences together."""

    logprobs: list[torch.Tensor]  # of each sequence [L]
    gradients: dict[str, torch.Tensor]  # by names on disk
    loss: float

    @property
    def norm(self) -> float:
        return torch.stack([g.norm() for g in self.gradients.values()]).norm().item()

    def of(self, chosen: list[int]) -> torch.Tensor:
        return torch.cat([self.logprobs[i] for i in chosen])


def write_families(folder: Path) -> None:
    """Write a checkpoint of every family, with Hugging Face's outputs."""
    write_models(folder)
    for family in FAMILIES:
        write_expected(folder / family)


def write_expected(model: Path) -> None:
    logprobs, found, total = cases.eager(model)
    found = on_disk(meta_model(AutoConfig.from_pretrained(model)), found)
    largest = {name: tensor.abs().max() for name, tensor in found.items()}
    # All differences are judged by the largest entry, so no tensor may be so small that it could be anything.
    assert min(largest.values()) > 0.01 * max(largest.values()), largest
    tensors = {f"gradient.{name}": tensor.contiguous() for name, tensor in found.items()}
    save_file({"logprobs": torch.cat(logprobs), "loss": total[None], **tensors}, model / "expected.st")


def expected(model: Path) -> Expected:
    tensors = load_file(model / "expected.st")
    logprobs, total = tensors.pop("logprobs"), tensors.pop("loss")
    found = {name.removeprefix("gradient."): tensor for name, tensor in tensors.items()}
    return Expected(list(logprobs.split(cases.LENGTHS)), found, total.item())


def step_with_both_norms(trained: MegatronBackend, batches: list) -> tuple[dict[str, float], float]:
    """Return the metrics of a backend's first step, and Megatron-Core's norm of its gradient."""
    norms = core_norms(trained)
    return trained.step(batches, cases.loss).metrics, norms[0]


def core_norms(trained: MegatronBackend) -> list[float]:
    """Return a list to which the backend's first step adds Megatron-Core's norm of its gradient."""
    norms, measure = [], trained._optimizer._core.get_grad_norm

    def get_grad_norm() -> float:
        norms.append(float(measure()))
        return norms[-1]

    trained._optimizer._core.get_grad_norm = get_grad_norm
    return norms


def check_weights_are_the_files(trained: MegatronBackend, model: Path) -> None:
    assert list(ranks.weights(trained)) == list(trained._shapes)
    ranks.check_weights_are_the_files(trained, model)
