"""The FSDP2/DTensor training backend, on Hugging Face models.

Ranks form a mesh of data x context x tensor parallelism (fsdp_mesh.py). Trained parameters are in float32 and cut over the
whole mesh. Each rank computes a part of its batch's tokens; outputs are gathered, so all ranks of a batch compute the same
loss. Computation uses the recipe's precision, and so do the weights of models that are not trained. A single rank that needs
neither offloading nor two precisions runs the plain module without sharding.

Mixtures of experts train too. transformers keeps a layer's experts in one tensor, which `fully_shard` cuts like any other
tensor. With expert parallelism, the tensor is first cut over expert-parallel ranks (expert_parallel.py).
With adapters (lora.py) only the adapters and a value head are trained and saved. `weights` and `local_tensor` then return
merged weights, or the adapters for a role that serves these.

Not supported: pipeline parallelism, dropout.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from pipeline.boxes import Piece, Region, region, whole
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.files.stored_files import FileKey
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.models.precision import served_dtype
from pipeline.models.recorded_layout import Shape, restrict
from pipeline.train import checkpoint_state, compiled, lora
from pipeline.train.context_parallel import localize
from pipeline.train.fsdp_mesh import Layout, Meshes
from pipeline.train.fsdp_model import PackedModel, build
from pipeline.train.gradients import Gradients, LossScale
from pipeline.train.matrices import find_matrices
from pipeline.train.offload import Offload
from pipeline.train.optimizer import LRSchedule, build_optimizer
from pipeline.train.outputs import reduce_outputs
from pipeline.train.sequence_bounds import check_batches
from pipeline.train.shards import Entry, Shards, collect_shards, gather_full, is_first_holder, local, local_box, read_shards
from pipeline.train.shared_prompts import saved_tokens, share
from pipeline.train.train_backend import Loss, ModelRole, TrainBackend
from pipeline.types import LossOutput, Outputs, PackedBatch, StepResult


class FSDPBackend(TrainBackend):
    """The training backend on FSDP2."""

    def __init__(self, policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole):
        """Build the backend, as `pipeline.train.build` documents. With GPUs, the current CUDA device must be set."""
        if group.size() != dist.get_world_size():
            raise ValueError(f"the train component has {group.size()} ranks but the default group {dist.get_world_size()}")
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        layout = Layout.of(policy.dtensor_cfg, group.size(), group.rank())
        self.data_size, self.data_rank = layout.data_size, layout.data_rank
        self._layout = layout
        self._group = group
        self._policy = policy
        self._role = role
        offload = (policy.dtensor_cfg.cpu_offload or role.offload) and self.device.type == "cuda"
        two_precisions = role.trained and policy.precision != "float32"
        meshes = None
        if group.size() > 1 or two_precisions or offload:
            meshes = Meshes.of(layout, self.device.type)
        self._context = meshes.context if meshes is not None else None
        self._model = build(policy, self.device, meshes, seed, role)
        self._balancing = self._model.routers.balancing if self._model.routers else None
        self._parameters = dict(self._model.hf.named_parameters())
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._shapes, _ = checkpoint_shapes(self._model.hf.config, role.head)  # on disk, in a checkpoint's order
        self._gradients = Gradients(self._trained, self._model.partial, group, self.device)
        self._vocabulary = self._model.hf.get_input_embeddings().get_parameter("weight").shape[0]
        self._reference: PackedModel | None = None
        self._offloaded: Offload | None = None  # of the reference, between forward passes
        if role.reference and not self._model.adapters:
            untrained = dataclasses.replace(role, trained=False, reference=False)
            self._reference = build(policy, self.device, meshes, seed, untrained, like=self._model)
            if policy.dtensor_cfg.reference_cpu_offload and self.device.type == "cuda":
                self._offload_reference(self._reference, Offload(self.device))
        self._merged: lora.MergedWeights | None = None  # merged weights, from the first read on
        self._offload = Offload(self.device, shared=True)
        if role.trained:
            self._optimizer, self._schedule = self._new_optimizer(self._policy)
            self._scale = LossScale(policy.precision)
            lora_cfg, random_seed = policy.dtensor_cfg.lora_cfg, seed if policy.random_init else None
            self._lora_record = checkpoint_state.adapter_record(lora_cfg, random_seed) if self._model.adapters else None
        if self._model.compiled:
            with role.phase("compile"), compiled.explain_out_of_memory(policy):
                self._run_trial_batches()

    def _new_optimizer(self, policy: PolicyConfig) -> tuple[torch.optim.Optimizer, LRSchedule]:
        layout = self._model.layout | (self._model.adapters.layout if self._model.adapters else {})
        matrices = find_matrices(self._model.hf, self._trained, layout)
        optimizer = build_optimizer(policy.optimizer, self._trained.values(), matrices, self.device)
        return optimizer, LRSchedule(optimizer, policy.scheduler)

    def _run_trial_batches(self) -> None:
        """Compile the layers with batches that are the same in every start. Collective.

        A separate reference model uses the policy's graphs. The policy without its adapters has other graphs.
        """
        for batch in compiled.trial_batches(self._policy, self.device):
            if self._role.reference and self._model.adapters:
                with torch.no_grad(), self._reference_model() as reference:
                    self._outputs(batch, reference, truncated=False)
            with torch.set_grad_enabled(self._role.trained):
                outputs = self._outputs(batch, self._model, truncated=False)
            if self._role.trained:
                result = outputs.values if self._role.head == "values" else outputs.logprobs
                assert result is not None
                result.sum().backward()
                self._optimizer.zero_grad(set_to_none=True)
            self._reshard()

    # ---- forward and step -----------------------------------------------------------------------------------------------

    @override
    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        self._model.head.check(model, top_k)
        check_batches(batches, self._vocabulary)
        if model == "policy":
            with torch.no_grad():
                outputs = [self._outputs(batch, self._model, top_k=top_k) for batch in batches]
            self._reshard()
            return outputs
        with torch.no_grad(), self._reference_model() as reference:
            chosen_by_itself = (dataclasses.replace(batch, experts=None) for batch in batches)
            return [self._outputs(batch, reference, top_k=top_k, truncated=False) for batch in chosen_by_itself]

    @override
    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        self._check_trained()
        check_batches(batches, self._vocabulary)
        if not batches:
            raise ValueError("a step needs at least one batch")
        shares: list[LossOutput] = []

        def differentiate() -> float:
            shares[:] = self._differentiate(batches, loss)
            return self._gradients.norm()

        try:
            norm = self._scale.finite_norm(differentiate, self.device)
        except FloatingPointError:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        # Context- and tensor-parallel peers have the same batches, so only one of them counts.
        metrics = reduce_outputs(shares, counts=self._layout.leads_batch, group=self._group, device=self.device)
        self._scale.count_step()
        self._gradients.clip(norm, self._policy.max_grad_norm)
        if self._balancing is not None:
            metrics |= self._balancing.metrics(self._group, self.device)
        metrics |= {"grad_norm": norm, "lr": self._schedule.lr}
        self._optimizer.step()
        self._refresh_merged()
        return StepResult(metrics)

    def _differentiate(self, batches: Sequence[PackedBatch], loss: Loss) -> list[LossOutput]:
        """Compute the gradient of this rank's batches, and return their losses. Collective."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._balancing is not None:
            self._balancing.begin(self._scale.factor)
        shares = []
        for batch in batches:
            with self._model.adapters.switch.training() if self._model.adapters else contextlib.nullcontext():
                output = loss(self._outputs(batch, self._model), batch)
                (output.loss * self._scale.factor if self._scale.factor != 1 else output.loss).backward()
            shares.append(LossOutput(output.loss.detach(), output.metrics))
        self._gradients.sum_partial()
        self._gradients.divide(self._scale.factor)
        return shares

    @override
    def advance_schedule(self) -> None:
        self._check_trained()
        self._schedule.step()

    @override
    def new_rates(self, policy: PolicyConfig) -> Callable[[], None]:
        self._check_trained()
        optimizer, schedule = self._new_optimizer(policy)
        schedule.advance(self._schedule.steps)

        def take() -> None:
            optimizer.state.update(self._optimizer.state)
            self._policy, self._optimizer, self._schedule = policy, optimizer, schedule

        return take

    def _check_trained(self) -> None:
        if not self._role.trained:
            raise ValueError(f"{self._policy.model_name} was built with ModelRole(trained=False)")

    def _outputs(self, batch: PackedBatch, model: PackedModel, top_k: int = 0, truncated: bool = True) -> Outputs:
        layout = self._layout
        if model.routers is None:
            batch = dataclasses.replace(batch, experts=None)
        # Answers of one prompt may have other recorded experts of its tokens, and balance these tokens with their own.
        if (
            model.shares_prompts
            and batch.experts is None
            and batch.balance is None
            and layout.context == layout.tokens_multiple == 1
            and saved_tokens(batch)
        ):
            return model(share(batch), top_k, truncated)
        local = localize(batch, layout.context, layout.context_rank, layout.tokens_multiple, self._context)
        return model(local, top_k, truncated)

    def _reshard(self) -> None:
        # The root module keeps its weights gathered for a backward pass, which does not follow here.
        if isinstance(self._model, FSDPModule):
            self._model.reshard()

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[PackedModel]:
        """Yield the reference model, which is on the device within this context.

        With adapters, it is the policy with its adapters disabled.
        """
        if not self._role.reference:
            raise ValueError("there are no reference weights; build the backend with ModelRole(reference=True)")
        if self._model.adapters:
            with self._model.adapters.switch.disabled():
                yield self._model
            self._reshard()
            return
        reference = self._reference
        assert reference is not None
        if self._offloaded is not None:
            self._offloaded.reload()
        try:
            yield reference
        finally:
            if isinstance(reference, FSDPModule):
                reference.reshard()
            if self._offloaded is not None:
                self._offloaded.offload(_weights(reference), frozen=True)

    def _offload_reference(self, reference: PackedModel, offload: Offload) -> None:
        """Keep the reference in host memory between forward passes. Raises RecipeError if memory cannot be page-locked."""
        weights = _weights(reference)
        size = sum(tensor.untyped_storage().nbytes() for tensor in weights)
        try:
            offload.offload(weights, frozen=True)
        except (torch.cuda.CudaError, OSError) as error:
            message = (
                f"got true, but {size / 1e9:.1f} GB of host memory cannot be page-locked ({error}); every rank of the node"
                " needs as much. Try false, which keeps the reference on the GPU, or a larger cluster.train.mem"
            )
            raise RecipeError(Problem("policy.dtensor_cfg.reference_cpu_offload", "out-of-memory", message)) from error
        self._offloaded = offload

    # ---- offloading -----------------------------------------------------------------------------------------------------

    @override
    def offload(self, keep_weights: bool = False) -> None:
        self._reshard()
        read: list[torch.Tensor] = []
        if keep_weights:  # what a refit reads: merged weights without their parts, or the adapters
            self._merge()
            read = [self.local_tensor(name) for name in self._served_layout]
        changing = [local(parameter) for parameter in self._trained.values()]
        changing += self._merged.tensors.values() if self._merged else ()
        if self._role.trained:
            self._optimizer.zero_grad(set_to_none=True)
            states = [value for state in self._optimizer.state.values() for value in state.values()]
            changing += [local(value) for value in states if torch.is_tensor(value)]
        self._offload.offload(changing, keep=read)
        fixed = [local(parameter) for parameter in self._parameters.values() if not parameter.requires_grad]
        if self._reference is not None:
            fixed += _weights(self._reference)
        self._offload.offload(fixed, keep=read, frozen=True)

    @override
    def reload(self) -> None:
        self._offload.reload()

    # ---- weights and checkpoints ----------------------------------------------------------------------------------------

    @override
    def weights(self, model: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = getattr(torch, self._policy.precision)
        self._merge(always=model)
        for name, pieces in (self._model.layout if model else self._served_layout).items():
            # Cast before gathering, which halves the traffic in half precision.
            tensor = gather_full(self._parameters[name], self.local_tensor(name).to(self.device, served_dtype(name, dtype)))
            outer = whole(tuple(tensor.shape))
            for piece in pieces:
                part = tensor[piece.target.within(outer)].reshape(piece.source.size).contiguous()
                yield piece.name, part if self._group.rank() == 0 else tensor.new_empty(0)

    @property
    @override
    def shapes(self) -> dict[str, Shape]:
        adapters = self._model.adapters
        return adapters.shapes if adapters and self._role.serves_adapters else self._shapes

    @property
    def _served_layout(self) -> dict[str, list[Piece]]:
        """{parameter: its pieces of tensors on disk} for the parameters that refits read."""
        adapters = self._model.adapters
        return adapters.layout if adapters and self._role.serves_adapters else self._model.layout

    @override
    def layout(self) -> list[Region]:
        self._merge()
        return [
            region(piece, name, self.local_tensor(name).stride())
            for name, pieces in self._served_layout.items()
            for piece in restrict(pieces, local_box(self._parameters[name]))
        ]

    @override
    def local_tensor(self, name: str) -> torch.Tensor:
        if self._merged is not None and name in self._merged.tensors:
            return self._merged.tensors[name]
        return local(self._parameters[name])

    def _merge(self, always: bool = False) -> None:
        """Merge the adapters into separate tensors for a reader of the weights; every later step updates these tensors.

        It does nothing if the role serves adapters, unless `always` is True.
        """
        if self._model.adapters and self._merged is None and (always or not self._role.serves_adapters):
            self._merged = lora.MergedWeights(self._model.adapters, self._parameters, self.device)

    def _refresh_merged(self) -> None:
        if self._merged is not None:
            self._merged.refresh()

    @override
    def shards(self, copy: bool = False) -> Shards:
        self._check_trained()
        record = {
            "ranks": self._group.size(),
            "layout": self._layout.sizes,
            "schedule": self._schedule.steps,
            "loss_scale": self._scale.record(),
            "param_group": checkpoint_state.options(self._optimizer),
            "lora": self._lora_record,
            "frozen": self._policy.freeze_parameters,
            "random": checkpoint_state.random_record(),
        }
        return collect_shards(self._entries(), record, copy)

    def _entries(self) -> Iterator[Entry]:
        """Yield this rank's part of a checkpoint, without the parts that a lower rank holds too."""
        shapes, rank = self._saved_shapes(), self._group.rank()
        saved_here = {saved: pieces for saved, pieces in self._saved_pieces().items() if is_first_holder(saved, rank)}
        for parameter, pieces in saved_here.items():
            yield from checkpoint_state.entries(local(parameter), restrict(pieces, local_box(parameter)), shapes)
        yield from checkpoint_state.optimizer_entries(self._optimizer, saved_here, shapes)
        yield from checkpoint_state.random_entries(self.device, rank)

    @override
    def load(self, folder: Path, key: FileKey | None = None) -> None:
        # The layout may differ from the saved one. Random states then stay as they are: tensor-parallel peers draw the same.
        self._check_trained()
        reader, records = read_shards(folder, key)
        rank, record = self._group.rank(), records[0]
        checkpoint_state.check_record(folder, record, self._lora_record, self._policy.freeze_parameters)
        shapes, saved = self._saved_shapes(), self._saved_pieces()
        expected = {piece.name: shapes[piece.name] for pieces in saved.values() for piece in pieces}
        checkpoint_state.check_tensors(folder, reader, expected)
        if "param_group" not in record:
            message = (
                f"{folder} is from the Megatron-Core backend. Continue with true, or start a new run from its weights (python"
                " launch/export.py)"
            )
            raise RecipeError(Problem("policy.megatron_cfg.enabled", "contradiction", message))
        optimizer, schedule = self._new_optimizer(self._policy)
        schedule.advance(checkpoint_state.schedule_steps(record))
        ours, theirs = checkpoint_state.options(optimizer), record["param_group"]
        if ours != theirs:
            changes = [f"{k} {theirs.get(k)} -> {ours.get(k)}" for k in ours | theirs if ours.get(k) != theirs.get(k)]
            message = f"{folder} was saved with another policy.optimizer or policy.scheduler: {', '.join(changes)}"
            raise RecipeError(Problem("policy.optimizer", "contradiction", message))
        self._optimizer, self._schedule = optimizer, schedule
        self._scale.restore(record.get("loss_scale"))
        for parameter, pieces in saved.items():
            checkpoint_state.load_entries(parameter, pieces, reader)
        checkpoint_state.load_optimizer(self._optimizer, saved, shapes, reader)
        self._refresh_merged()
        sizes = self._layout.sizes
        if record["ranks"] == self._group.size() and record.get("layout", sizes) == sizes:
            checkpoint_state.load_random(self.device, rank, reader, records[rank]["random"])

    def _saved_pieces(self) -> dict[torch.Tensor, list[Piece]]:
        """Return {parameter: its pieces on disk} of all parameters or, with adapters, of those that train."""
        adapters = self._model.adapters
        saved = self._trained if adapters else self._parameters  # with the constants of a checkpoint
        layout = self._model.layout | (adapters.layout if adapters else {})
        return {parameter: layout[name] for name, parameter in saved.items()}

    def _saved_shapes(self) -> dict[str, Shape]:
        """Return {name on disk: shape} of the model's tensors and of the adapters."""
        return self._shapes | (self._model.adapters.shapes if self._model.adapters else {})


def _weights(model: PackedModel) -> list[torch.Tensor]:
    return [local(parameter) for parameter in model.hf.parameters()]
