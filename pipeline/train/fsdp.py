"""The FSDP2/DTensor training backend, on Hugging Face models.

Ranks form a mesh of data x tensor parallelism. Parameters that are trained are float32 and cut over both; the compute precision
is the recipe's, and so is that of a model that is not trained. Where one rank needs neither offloading nor two precisions it
runs the plain module, with no sharding machinery around it.

Mixtures of experts train too: transformers keeps a layer's experts in one tensor, which `fully_shard` cuts like any other.
With adapters (lora.py) only those are trained and saved; `weights` and `local` give them merged with what they adapt.

Left out: pipeline, context, expert and sequence parallelism, dropout.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from pipeline.models.recorded_layout import Shape, restrict
from pipeline.train import checkpoint_state, compiled, lora
from pipeline.train.base import Loss, ModelRole
from pipeline.train.fsdp_model import PackedModel, build
from pipeline.train.offload import Offload
from pipeline.train.optimizer import LRSchedule, build_optimizer
from pipeline.train.outputs import reduce_outputs
from pipeline.train.packed_attention import Packing, check_batch
from pipeline.train.shards import Entry, Shards, collect_shards, gather_full, local, local_box, read_shards
from pipeline.types import LossOutput, Outputs, PackedBatch, StepResult, TopK


class FSDPBackend:
    """See `pipeline.train.base.TrainBackend`."""

    def __init__(self, policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole):
        """group: the train component, which must be the default group by now, with a CUDA device chosen where there are any.

        seed: of random weights, if the recipe wants those, and of a value head that the checkpoint lacks.
        Raises ValueError, naming the key of the recipe, if the model or the layout is not supported.
        """
        if group.size() != dist.get_world_size():
            raise ValueError(f"the train component has {group.size()} ranks but the default group {dist.get_world_size()}")
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
        self._role = role
        offload = (policy.dtensor_cfg.cpu_offload or role.offload) and self.device.type == "cuda"
        two_precisions = role.trained and policy.precision != "float32"
        mesh = None
        if group.size() > 1 or two_precisions or offload:
            mesh = init_device_mesh(self.device.type, (self.data_size, tensor_size), mesh_dim_names=("data", "tensor"))
        self._model = build(policy, self.device, mesh, seed, role)
        self._parameters = dict(self._model.hf.named_parameters())
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._shapes, _ = checkpoint_shapes(self._model.hf.config, role.head)  # of the tensors on disk, in a checkpoint's order
        self._tensor_group = mesh.get_group("tensor") if mesh is not None else None
        self._vocabulary = self._model.hf.get_input_embeddings().weight.shape[0]
        self._reference: PackedModel | None = None
        self._offloaded: Offload | None = None  # of the reference, while it does not compute
        if role.reference and not self._model.adapters:
            frozen = dataclasses.replace(role, trained=False, reference=False)
            self._reference = build(policy, self.device, mesh, seed, frozen, like=self._model)
            if policy.dtensor_cfg.reference_cpu_offload and self.device.type == "cuda":
                self._offload_reference(Offload(self.device))
        self._merged: lora.MergedWeights | None = None  # weights with adapters, from when they are first asked for
        self._offload = Offload(self.device, shared=True)
        if role.trained:
            self._optimizer, self._schedule = self._new_optimizer()
            lora_cfg, random_seed = policy.dtensor_cfg.lora_cfg, seed if policy.random_init else None
            self._lora_record = lora.record(lora_cfg, random_seed) if self._model.adapters else None
        if self._model.compiled:
            with role.phase("compile"), compiled.explain_out_of_memory(policy):
                self._try_out()

    def _new_optimizer(self) -> tuple[torch.optim.Optimizer, LRSchedule]:
        optimizer = build_optimizer(self._policy.optimizer, self._trained.values())
        return optimizer, LRSchedule(optimizer, self._policy.scheduler)

    def _try_out(self) -> None:
        """Compile what is compiled at the first call, on batches that are the same in every start. Collective.

        A reference model of its own runs the policy's graphs; the policy without its adapters has other ones.
        """
        for tokens, positions, packing in compiled.trial_batches(self._policy, self.device):
            if self._role.reference and self._model.adapters:
                with torch.no_grad(), self._reference_model() as reference:
                    reference(tokens, positions, packing, truncated=False)
            with torch.set_grad_enabled(self._role.trained):
                outputs = self._model(tokens, positions, packing, truncated=False)
            if self._role.trained:
                (outputs.values if self._role.head == "values" else outputs.logprobs).sum().backward()
                self._optimizer.zero_grad(set_to_none=True)
            self._reshard()

    # ---- forward and step -----------------------------------------------------------------------------------------------

    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        """Raises ValueError for another `model`, for "reference" when none was kept, and for `top_k` of a value head."""
        if model not in ("policy", "reference"):
            raise ValueError(f"model '{model}' is not one of: policy, reference")
        if top_k and self._role.head == "values":
            raise ValueError("a model with a value head has no most likely tokens")
        self._check(batches)
        if model == "policy":
            with torch.no_grad():
                outputs = [self._outputs(batch, self._model, top_k=top_k) for batch in batches]
            self._reshard()
            return outputs
        with torch.no_grad(), self._reference_model() as reference:
            return [self._outputs(batch, reference, top_k=top_k, truncated=False) for batch in batches]

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        """Raises ValueError for a model that is not trained."""
        self._check_trained()
        self._check(batches)
        if not batches:
            raise ValueError("a step needs at least one batch")
        self._optimizer.zero_grad(set_to_none=True)
        shares = []
        for batch in batches:
            output = loss(self._outputs(batch, self._model, teacher=batch.teacher), batch)
            output.loss.backward()
            shares.append(LossOutput(output.loss.detach(), output.metrics))
        self._sum_partial_gradients()
        # Tensor-parallel peers hold the same batches; one of them speaks for all.
        metrics = reduce_outputs(shares, counts=self._tensor_rank == 0, group=self._group, device=self.device)
        norm = self._norm()
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
        self._clip(norm)
        metrics |= {"grad_norm": norm, "lr": self._schedule.lr}
        self._optimizer.step()
        self._refresh_merged()
        return StepResult(metrics)

    def advance_schedule(self) -> None:
        """Raises ValueError for a model that is not trained."""
        self._check_trained()
        self._schedule.step()

    def _check_trained(self) -> None:
        if not self._role.trained:
            raise ValueError(f"the model {self._policy.model_name} was built to be used, not trained")

    def _check(self, batches: Sequence[PackedBatch]) -> None:
        # All at once and before any work, since on a GPU each look at a batch waits for the device.
        for batch in batches:
            check_batch(batch, self._vocabulary)
            if batch.teacher is not None and batch.teacher.tokens.max() >= self._vocabulary:
                raise ValueError(f"a teacher's tokens do not fit a vocabulary of {self._vocabulary}")

    def _outputs(
        self, batch: PackedBatch, model: PackedModel, teacher: TopK | None = None, top_k: int = 0, truncated: bool = True
    ) -> Outputs:
        candidates = teacher.tokens if teacher else None
        return model(batch.tokens, batch.positions, Packing.of(batch), candidates, top_k, truncated)

    def _reshard(self) -> None:
        # The root keeps its weights gathered after a forward pass, for a backward pass that does not come here.
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[PackedModel]:
        """The reference, on the device within the block."""
        if not self._role.reference:
            raise ValueError("no reference weights were kept; construct the backend with ModelRole(reference=True)")
        if self._model.adapters:
            with lora.disabled(self._model.adapters):
                yield self._model
            self._reshard()
            return
        if self._offloaded is not None:
            self._offloaded.reload()
        try:
            yield self._reference
        finally:
            if isinstance(self._reference, FSDPModule):
                self._reference.reshard()
            if self._offloaded is not None:
                self._offloaded.offload(self._reference_weights(), frozen=True)

    def _offload_reference(self, away: Offload) -> None:
        """Keep the reference in host memory while it does not compute. Raise RuntimeError if that cannot be page-locked."""
        weights = self._reference_weights()
        size = sum(tensor.untyped_storage().nbytes() for tensor in weights)
        try:
            away.offload(weights, frozen=True)
        except (torch.cuda.CudaError, OSError) as error:
            raise RuntimeError(
                f"policy.dtensor_cfg.reference_cpu_offload: got true, but {size / 1e9:.1f} GB of host memory cannot be"
                f" page-locked ({error}); expected room for as much from every rank of the node. Try false, which keeps the"
                " reference on the GPU, or a larger cluster.train.mem"
            ) from error
        self._offloaded = away

    def _reference_weights(self) -> list[torch.Tensor]:
        return [local(parameter) for parameter in self._reference.hf.parameters()]

    # ---- turns on the device --------------------------------------------------------------------------------------------

    def offload(self, keep_weights: bool = False) -> None:
        self._reshard()
        read: list[torch.Tensor] = []
        if keep_weights:  # what is merged, but not what it was merged from
            self._merge()
            read = [self.local(name) for name in self._model.layout]
        changing = [local(parameter) for parameter in self._trained.values()]
        changing += self._merged.tensors.values() if self._merged else ()
        if self._role.trained:
            self._optimizer.zero_grad(set_to_none=True)
            states = [value for state in self._optimizer.state.values() for value in state.values()]
            changing += [local(value) for value in states if torch.is_tensor(value)]
        self._offload.offload(changing, keep=read)
        frozen = [local(parameter) for parameter in self._parameters.values() if not parameter.requires_grad]
        if self._reference is not None:
            frozen += self._reference_weights()
        self._offload.offload(frozen, keep=read, frozen=True)

    def reload(self) -> None:
        self._offload.reload()

    # ---- gradients ------------------------------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of each gradient, by name."""
        return {name: local(p.grad) for name, p in self._trained.items() if p.grad is not None}

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
        self._merge()
        for name, pieces in self._model.layout.items():
            # Cast before gathering: half the traffic in half precision.
            tensor = gather_full(self._parameters[name], self.local(name).to(self.device, dtype))
            outer = whole(tuple(tensor.shape))
            for piece in pieces:
                part = tensor[piece.target.within(outer)].reshape(piece.source.size).contiguous()
                yield piece.name, part if self._group.rank() == 0 else tensor.new_empty(0)

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def layout(self) -> list[Region]:
        self._merge()
        return [
            region(piece, name, self.local(name).stride())
            for name, pieces in self._model.layout.items()
            for piece in restrict(pieces, local_box(self._parameters[name]))
        ]

    def local(self, tensor: str) -> torch.Tensor:
        if self._merged is not None and tensor in self._merged.tensors:
            return self._merged.tensors[tensor]
        return local(self._parameters[tensor])

    def _merge(self) -> None:
        """Merge adapters, and again after every step from now on: someone reads the weights."""
        if self._model.adapters and self._merged is None:
            self._merged = lora.MergedWeights(self._model.adapters, self._parameters, self.device)

    def _refresh_merged(self) -> None:
        if self._merged is not None:
            self._merged.refresh()

    def shards(self, copy: bool = False) -> Shards:
        """Raises ValueError for a model that is not trained, as `load` does."""
        self._check_trained()
        record = {
            "ranks": self._group.size(),
            "schedule": self._schedule.steps,
            "param_group": checkpoint_state.options(self._optimizer),
            "lora": self._lora_record,
            "random": checkpoint_state.random_record(),
        }
        return collect_shards(self._entries(), record, copy)

    def _entries(self) -> Iterator[Entry]:
        """All that a checkpoint holds of this rank."""
        shapes = self._saved_shapes()
        for prefix, parameter, pieces in self._saved():
            yield from checkpoint_state.entries(prefix, parameter, pieces, shapes)
        yield from checkpoint_state.optimizer_entries(self._optimizer, self._pieces(), shapes)
        for name, tensor in checkpoint_state.random_tensors(self.device, self._group.rank()).items():
            yield name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor

    def load(self, folder: Path) -> None:
        """The layout may be another than that of saving; with another number of ranks, the random states stay as they are.

        Raises ValueError if the weights are of another model, or if optimizer or schedule are set otherwise than they were.
        """
        self._check_trained()
        reader, records = read_shards(folder)
        rank, record = self._group.rank(), records[0]
        lora.check_record(folder, record.get("lora"), self._lora_record)
        shapes = self._saved_shapes()
        expected = {f"{prefix}.{piece.name}": shapes[piece.name] for prefix, _, pieces in self._saved() for piece in pieces}
        stored = {name: shape for name, shape in reader.shapes.items() if name.startswith(("model.", "adapter."))}
        if stored != expected:
            odd = sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
            raise ValueError(f"{folder}: the checkpoint is of another model; these differ: {odd[:4]} ({len(odd)})")
        if "param_group" not in record:
            raise ValueError(
                f"{folder}: another train backend wrote this; go on with policy.megatron_cfg.enabled=true, or begin anew from"
                " its weights (python launch/export.py)"
            )
        optimizer, schedule = self._new_optimizer()
        schedule.advance(checkpoint_state.schedule_steps(record))
        ours, theirs = checkpoint_state.options(optimizer), record["param_group"]
        if ours != theirs:
            odd = [f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in ours | theirs if ours.get(k) != theirs.get(k)]
            raise ValueError(f"{folder}: policy.optimizer or policy.scheduler has changed since: {', '.join(odd)}")
        self._optimizer, self._schedule = optimizer, schedule
        for prefix, parameter, pieces in self._saved():
            checkpoint_state.load_entries(prefix, parameter, pieces, reader)
        checkpoint_state.load_optimizer(self._optimizer, self._pieces(), shapes, reader)
        self._refresh_merged()
        if record["ranks"] == self._group.size():
            checkpoint_state.load_random(self.device, rank, reader, records[rank]["random"])

    def _saved(self) -> Iterator[tuple[str, torch.nn.Parameter, list[Piece]]]:
        """(prefix of the names, parameter, its pieces by name) of all that is trained: adapters, or all weights."""
        adapters = {name: piece for adapter in self._model.adapters for name, piece in adapter.pieces(self._parameters).items()}
        for name, parameter in self._trained.items():
            if name in adapters:
                yield "adapter", parameter, [adapters[name]]
            else:
                yield "model", parameter, self._model.layout[name]

    def _saved_shapes(self) -> dict[str, Shape]:
        """Of tensors on disk and in a checkpoint."""
        adapters = (piece for adapter in self._model.adapters for piece in adapter.pieces(self._parameters).values())
        return self._shapes | {piece.name: piece.source.size for piece in adapters}

    def _pieces(self) -> dict[torch.nn.Parameter, list[Piece]]:
        return {parameter: pieces for _, parameter, pieces in self._saved()}
