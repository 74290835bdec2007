"""The FSDP2/DTensor training backend, on Hugging Face models.

Ranks form a mesh of data x tensor parallelism. Parameters are float32 and cut over both; the compute precision is the
recipe's. One rank in float32 without offloading runs the plain module, with no sharding machinery around it.

Mixtures of experts train too: transformers keeps a layer's experts in one tensor, which `fully_shard` cuts like any other.

Left out: pipeline, context, expert and sequence parallelism, dropout, frozen parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.boxes import Piece, Region, region, whole
from pipeline.config import PolicyConfig
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.models.layout import Shape, restrict
from pipeline.train import state
from pipeline.train.attention import Packing, check_batch
from pipeline.train.base import Loss
from pipeline.train.model import build
from pipeline.train.optimizer import Schedule, build_optimizer
from pipeline.train.outputs import reduce_outputs
from pipeline.train.shards import Entry, Shards, collect, local, local_box, read_shards
from pipeline.types import LossOutput, PackedBatch, StepResult


class FSDPBackend:
    """See `pipeline.train.base.TrainBackend`."""

    def __init__(self, policy: PolicyConfig, group: dist.ProcessGroup, seed: int, reference: bool):
        """group: the train realm, which must be the default group by now, with a CUDA device chosen where there are any.

        seed: of random weights, if the recipe wants those. reference: keep the initial weights for `forward(..., "reference")`.
        Raises ValueError, naming the key of the recipe, if the model or the layout is not supported.
        """
        if group.size() != dist.get_world_size():
            raise ValueError(f"the train realm has {group.size()} ranks but the default group {dist.get_world_size()}")
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        tensor_size = policy.dtensor_cfg.tensor_parallel_size
        if group.size() % tensor_size:
            raise ValueError(
                f"policy.dtensor_cfg.tensor_parallel_size: {tensor_size} does not divide the {group.size()} train ranks"
            )
        self.data_size = group.size() // tensor_size
        self.data_rank, self._tensor_rank = divmod(group.rank(), tensor_size)
        self._group = group
        self._policy = policy
        offload = policy.dtensor_cfg.cpu_offload and self.device.type == "cuda"
        mesh = None
        if group.size() > 1 or policy.precision != "float32" or offload:
            mesh = init_device_mesh(self.device.type, (self.data_size, tensor_size), mesh_dim_names=("data", "tensor"))
        self._model = build(policy, self.device, mesh, seed)
        self._parameters = dict(self._model.hf.named_parameters())
        self._shapes, _ = checkpoint_shapes(self._model.hf.config)  # of the tensors on disk, in a checkpoint's order
        self._tensor_group = mesh.get_group("tensor") if mesh is not None else None
        self._vocabulary = self._model.hf.get_input_embeddings().weight.shape[0]
        self._reference = [local(p).to("cpu", copy=True) for p in self._parameters.values()] if reference else None
        self._optimizer, self._schedule = self._new_optimizer()

    def _new_optimizer(self) -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = build_optimizer(self._policy.optimizer, self._parameters.values())
        return optimizer, Schedule(optimizer, self._policy.scheduler)

    # ---- forward and step -----------------------------------------------------------------------------------------------

    def forward(self, batches: Sequence[PackedBatch], model: str = "policy") -> list[torch.Tensor]:
        """Raises ValueError for another `model`, or for "reference" when none was kept."""
        if model not in ("policy", "reference"):
            raise ValueError(f"model '{model}' is not one of: policy, reference")
        self._check(batches)
        with torch.no_grad(), self._reference_weights() if model == "reference" else contextlib.nullcontext():
            logprobs = [self._logprobs(batch) for batch in batches]
            self._reshard()
        return logprobs

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        self._check(batches)
        if not batches:
            raise ValueError("a step needs at least one batch")
        self._optimizer.zero_grad(set_to_none=True)
        outputs = []
        for batch in batches:
            output = loss(self._logprobs(batch), batch)
            output.loss.backward()
            outputs.append(LossOutput(output.loss.detach(), output.metrics))
        self._sum_partial_gradients()
        # Tensor-parallel peers hold the same batches; one of them speaks for all.
        metrics = reduce_outputs(outputs, counts=self._tensor_rank == 0, group=self._group, device=self.device)
        norm = self._norm()
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
        self._clip(norm)
        metrics |= {"grad_norm": norm, "lr": self._schedule.lr}
        self._optimizer.step()
        self._schedule.step()
        return StepResult(metrics)

    def _check(self, batches: Sequence[PackedBatch]) -> None:
        # All at once and before any work, since on a GPU each look at a batch waits for the device.
        for batch in batches:
            check_batch(batch, self._vocabulary)

    def _logprobs(self, batch: PackedBatch) -> torch.Tensor:
        return self._model(batch.tokens, batch.positions, Packing.of(batch))

    def _reshard(self) -> None:
        # The root keeps its weights gathered after a forward pass, for a backward pass that does not come here.
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise ValueError("no reference weights were kept; construct the backend with reference=True")
        ours = [local(parameter) for parameter in self._parameters.values()]
        kept = [tensor.to("cpu", copy=True) for tensor in ours]
        try:
            for tensor, reference in zip(ours, self._reference, strict=True):
                tensor.copy_(reference)
            yield
        finally:
            for tensor, policy in zip(ours, kept, strict=True):
                tensor.copy_(policy)

    # ---- gradients ------------------------------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of each gradient, by name."""
        return {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def _sum_partial_gradients(self) -> None:
        """Of whole parameters that act on a rank's own heads only. Sums commute, so once a step is enough."""
        if not self._model.partial:
            return
        gradients = self._gradients()
        gradients = [gradients[name] for name in self._model.partial]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self.device)
        dist.all_reduce(flat, group=self._tensor_group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _norm(self) -> float:
        """Of the whole gradient, added up in float64."""
        squared = self._squared_norm()
        dist.all_reduce(squared, group=self._group)
        return math.sqrt(squared.item())

    def _squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm, [] float64: what several ranks hold counts on the first of them."""
        counted = [g for name, g in self._gradients().items() if g.numel() and (not self._tensor_rank or self._cut(name))]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(counted)).double().square().sum().to(self.device)

    def _cut(self, name: str) -> bool:
        """Whether tensor-parallel ranks hold different parts of the parameter."""
        parameter = self._parameters[name]
        return isinstance(parameter, DTensor) and "tensor" in parameter.device_mesh.mesh_dim_names

    def _clip(self, norm: float) -> None:
        limit = self._policy.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(list(self._gradients().values()), limit / norm)

    # ---- weights and checkpoints ----------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = getattr(torch, self._policy.precision)
        for name, parameter in self._parameters.items():
            # Cast before gathering: half the traffic in half precision.
            tensor = local(parameter).to(self.device, dtype)
            if isinstance(parameter, DTensor):
                tensor = DTensor.from_local(
                    tensor,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                ).full_tensor()
            outer = whole(tuple(tensor.shape))
            for piece in self._model.layout[name]:
                part = tensor[piece.target.within(outer)].reshape(piece.source.size).contiguous()
                yield piece.name, part if self._group.rank() == 0 else tensor.new_empty(0)

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def layout(self) -> list[Region]:
        return [
            region(piece, name, local(parameter).stride())
            for name, parameter in self._parameters.items()
            for piece in restrict(self._model.layout[name], local_box(parameter))
        ]

    def local(self, tensor: str) -> torch.Tensor:
        return local(self._parameters[tensor])

    def shards(self, copy: bool = False) -> Shards:
        record = {
            "ranks": self._group.size(),
            "steps": self._schedule.steps,
            "param_group": state.options(self._optimizer),
            "random": state.random_record(),
        }
        return collect(self._entries(), record, copy)

    def _entries(self) -> Iterator[Entry]:
        """All that a checkpoint holds of this rank."""
        for name, parameter in self._parameters.items():
            yield from state.entries("model", parameter, self._model.layout[name], self._shapes)
        yield from state.optimizer_entries(self._optimizer, self._pieces(), self._shapes)
        for name, tensor in state.random_tensors(self.device, self._group.rank()).items():
            yield name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor

    def load(self, folder: Path) -> None:
        """The layout may be another than that of saving; with another number of ranks, the random states stay as they are.

        Raises ValueError if the weights are of another model, or if optimizer or schedule are set otherwise than they were.
        """
        reader, records = read_shards(folder)
        rank, record = self._group.rank(), records[0]
        expected = {f"model.{name}": shape for name, shape in self._shapes.items()}
        stored = {name: shape for name, shape in reader.shapes.items() if name.startswith("model.")}
        if stored != expected:
            odd = sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
            raise ValueError(f"{folder}: the checkpoint is of another model; these differ: {odd[:4]} ({len(odd)})")
        if "param_group" not in record:
            raise ValueError(
                f"{folder}: another train backend wrote this; go on with policy.megatron_cfg.enabled=true, or begin anew from"
                " its weights (python launch/export.py)"
            )
        optimizer, schedule = self._new_optimizer()
        schedule.advance(record["steps"])
        ours, theirs = state.options(optimizer), record["param_group"]
        if ours != theirs:
            odd = [f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in ours | theirs if ours.get(k) != theirs.get(k)]
            raise ValueError(f"{folder}: policy.optimizer or policy.scheduler has changed since: {', '.join(odd)}")
        self._optimizer, self._schedule = optimizer, schedule
        for name, parameter in self._parameters.items():
            state.load_entries("model", parameter, self._model.layout[name], reader)
        state.load_optimizer(self._optimizer, self._pieces(), self._shapes, reader)
        if record["ranks"] == self._group.size():
            state.load_random(self.device, rank, reader, records[rank]["random"])

    def _pieces(self) -> dict[torch.nn.Parameter, list[Piece]]:
        return {parameter: self._model.layout[name] for name, parameter in self._parameters.items()}
