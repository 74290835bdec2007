"""The Megatron-Core training backend: tensor, pipeline, context, expert, sequence and data parallelism.

Weights are in the recipe's precision, gradients are summed by Megatron-Core's DistributedDataParallel, and its distributed
optimizer keeps float32 weights and state cut over data-parallel ranks. Checkpoints hold boxes of Hugging Face tensors, so they
load at any layout.

Left out: virtual pipeline stages, FP8, multi-token prediction, LoRA, Megatron-FSDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import PreTrainedConfig

from pipeline import models
from pipeline.boxes import Box, Piece, Region, region, whole
from pipeline.config import PolicyConfig
from pipeline.models.base import VALUE_HEAD
from pipeline.models.config_json import check_attention
from pipeline.models.hugging_face import SCORE, checkpoint_shapes, model_config
from pipeline.models.recorded_layout import Shape, copy_pieces, flat_boxes, restrict
from pipeline.train import checkpoint_state
from pipeline.train.base import Loss, ModelRole
from pipeline.train.initial_weights import ReadBox, initial_weights
from pipeline.train.megatron.batch import LocalBatch, localize
from pipeline.train.megatron.conversion import converted
from pipeline.train.megatron.gather import WeightGatherer
from pipeline.train.megatron.groups import initialize
from pipeline.train.megatron.heads import ValueHead, VocabularyHead, broadcast_outputs
from pipeline.train.megatron.host_weights import HostWeights
from pipeline.train.megatron.local_tensors import LocalTensor, local_tensors
from pipeline.train.megatron.model import PipelineStage, build
from pipeline.train.megatron.optimizer import MegatronOptimizer, ParameterRange
from pipeline.train.offload import Offload
from pipeline.train.outputs import broadcast_record, reduce_outputs
from pipeline.train.packed_attention import check_batch
from pipeline.train.shards import BoxReader, Entry, Shards, collect_shards, read_shards
from pipeline.types import LossOutput, Outputs, PackedBatch, StepResult


class MegatronBackend:
    """See `pipeline.train.base.TrainBackend`."""

    def __init__(self, policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole):
        """As `pipeline.train.build`: group is the train ranks and the default group. All models of a process have one layout.

        Raises ValueError, naming the key of the recipe, if the model or the layout is not supported.
        """
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._policy, self._group = policy, group
        self._role = role
        initialize(policy, seed)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        hf = model_config(policy, role.head)
        check_attention(hf, policy.max_total_sequence_length)
        self._shapes, _ = checkpoint_shapes(hf, role.head)
        self._stage = build(policy, hf, role.head).to(self.device)
        if not role.trained:
            self._stage.requires_grad_(False)
        self._local = local_tensors(self._stage, models.family(hf.model_type).parameters(hf, role.head), self._shapes)
        self._of = {id(local.tensor): local for local in self._local.values()}
        self._vocabulary = hf.vocab_size
        self._head = ValueHead() if role.head == "values" else VocabularyHead.of(policy, hf, role)
        self._model = _data_parallel(policy, self._stage) if role.trained else None
        self._optimizer = MegatronOptimizer(policy, self._model) if role.trained else None
        self._load_initial(hf, seed)
        self._reference = self._copy_weights() if role.reference else None
        self._gatherer = WeightGatherer(
            [(local.tensor, local.hugging_face) for name, local in self._local.items() if _is_data_parallel_leader(name)],
            self._shapes,
            group,
            self.device,
        )
        # After all that needs the weights on the device: they go to the host.
        offload = role.offload and not role.trained
        self._host = HostWeights([local.tensor for local in self._local.values()], self.device) if offload else None
        self._offload = Offload(self.device, shared=True)

    # ---- forward and step -----------------------------------------------------------------------------------------------

    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        """The same on every rank that shares `data_rank`. Raises ValueError for another `model`, or for "reference" when none
        was kept."""
        if model not in ("policy", "reference"):
            raise ValueError(f"model '{model}' is not one of: policy, reference")
        self._check(batches)
        found: list[Outputs] = []

        def keep(batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            found.append(outputs)
            return torch.zeros((), device=self.device)  # the schedule wants a loss

        head = self._head if model == "policy" else self._head.untruncated()
        with torch.no_grad(), self._weights_of(model):
            self._run(self._stage, batches, keep, head, top_k)
        self._empty_cache(2)
        return self._on_all_stages(found, batches, head, top_k)

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        self._check_trained()
        self._check(batches)
        if not batches:
            raise ValueError("a step needs at least one batch")
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        found: list[LossOutput] = []

        def finish(batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            output = loss(outputs, batch)
            found.append(LossOutput(output.loss.detach(), output.metrics))
            return output.loss

        self._run(self._model, batches, finish, self._head)
        metrics = self._metrics(found)
        lr = self._optimizer.lr
        metrics |= {"grad_norm": self._optimizer.step(), "lr": lr}
        self._empty_cache(1)
        return StepResult(metrics)

    def advance_schedule(self) -> None:
        """Raises ValueError for a model that is not trained."""
        self._check_trained()
        self._optimizer.advance_schedule()

    def _check_trained(self) -> None:
        if not self._role.trained:
            raise ValueError(f"{self._policy.model_name} was built with ModelRole(trained=False)")

    def _check(self, batches: Sequence[PackedBatch]) -> None:
        for batch in batches:
            check_batch(batch, self._vocabulary)
            if batch.teacher is not None and batch.teacher.tokens.max() >= self._vocabulary:
                raise ValueError(f"a teacher's tokens do not fit a vocabulary of {self._vocabulary}")

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[PackedBatch],
        finish: Callable[[PackedBatch, Outputs], torch.Tensor],
        head: VocabularyHead | ValueHead,
        top_k: int = 0,
    ) -> None:
        """Megatron-Core's own schedule over the microbatches. finish(batch, outputs): on the last stage; what it returns is
        differentiated, unless gradients are off."""
        if not batches:
            return

        def forward_step(iterator: Iterator[tuple[PackedBatch, LocalBatch]], model: torch.nn.Module):
            batch, local = next(iterator)
            hidden = model(local.tokens, local.positions, attention_mask=None, packed_seq_params=local.sequences)
            if not parallel_state.is_pipeline_last_stage():
                return hidden, None
            # It wants a number of tokens as well, to divide by in the end; `_finalize` does not, as losses are divided already.
            one = torch.ones((), dtype=torch.int, device=self.device)
            outputs = head.outputs(self._stage, hidden, local, top_k)
            return outputs, lambda outputs: (finish(batch, outputs), one, None)

        config = self._stage.config
        context = parallel_state.get_context_parallel_group()
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        pairs = ((batch, localize(batch, context.size(), context.rank(), multiple)) for batch in batches)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=pairs,
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # each microbatch tells its own (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )

    def _on_all_stages(
        self, found: list[Outputs], batches: Sequence[PackedBatch], head: VocabularyHead | ValueHead, top_k: int
    ) -> list[Outputs]:
        """What the last pipeline stage found."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() == 1 or not batches:
            return found
        if stages.rank() != stages.size() - 1:
            found = [head.empty(batch, top_k) for batch in batches]
        broadcast_outputs(found, stages)
        return found

    def _metrics(self, outputs: list[LossOutput]) -> dict[str, float]:
        """The same on every rank of the component."""
        stages = parallel_state.get_pipeline_model_parallel_group()
        found = {}
        if parallel_state.is_pipeline_last_stage():
            # Tensor- and context-parallel peers computed the same loss of the same batches.
            found = reduce_outputs(outputs, True, parallel_state.get_data_parallel_group(), self.device)
        if stages.size() == 1:
            return found
        return broadcast_record(found, stages.size() - 1, stages, self.device)

    def _empty_cache(self, level: int) -> None:
        if self.device.type == "cuda" and self._policy.megatron_cfg.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()

    # ---- turns on the device --------------------------------------------------------------------------------------------

    def offload(self, keep_weights: bool = False) -> None:
        weights = [local.tensor for local in self._local.values()]
        if self._role.trained:
            self._optimizer.zero_grad()
            self._offload.drop(buffer.grad_data for buffer in [*self._model.buffers, *self._model.expert_parallel_buffers])
            self._offload.offload(self._optimizer.tensors(), keep=weights)
        if not keep_weights:
            self._offload.offload(weights, frozen=not self._role.trained)

    def reload(self) -> None:
        self._offload.reload()

    # ---- weights --------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._weights_of("policy"):
            yield from self._gatherer.tensors(getattr(torch, self._policy.precision))

    @property
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def layout(self) -> list[Region]:
        return [
            region(piece, name, local.tensor.stride()) for name, local in self._local.items() for piece in local.hugging_face
        ]

    def local(self, tensor: str) -> torch.Tensor:
        return self._local[tensor].tensor.detach()

    def _copy_weights(self) -> list[torch.Tensor]:
        """All weights of this rank, on the CPU."""
        return [local.tensor.detach().to("cpu", copy=True) for local in self._local.values()]

    @contextlib.contextmanager
    def _weights_of(self, model: str) -> Iterator[None]:
        """While they are used, the weights of "policy" or "reference" are on the device, where forward passes find them."""
        if model == "policy":
            with self._host.on_device() if self._host else contextlib.nullcontext():
                yield
            return
        if self._reference is None:
            raise ValueError("no reference weights were kept; build the backend with ModelRole(reference=True)")
        ours = [local.tensor.detach() for local in self._local.values()]
        kept = self._copy_weights()
        try:
            for tensor, reference in zip(ours, self._reference, strict=True):
                tensor.copy_(reference)
            yield
        finally:
            for tensor, policy in zip(ours, kept, strict=True):
                tensor.copy_(policy)

    def _load_initial(self, hf: PreTrainedConfig, seed: int) -> None:
        head = self._role.head
        if self._policy.random_init:
            self._fill(initial_weights(self._policy, hf, seed, head), lambda local: local.hugging_face)
            return
        conversion = converted(self._policy, hf, self._group, head, phase=self._role.phase)
        read = conversion.read
        if head == "values":  # the head is no part of a conversion: it may have to be drawn
            files = initial_weights(self._policy, hf, seed, head)

            def read(name: str, box: Box) -> torch.Tensor:
                return files(SCORE, box) if name == VALUE_HEAD else conversion.read(name, box)

        self._fill(read, lambda local: local.whole)

    def _fill(self, read: ReadBox, pieces_of: Callable[[LocalTensor], list[Piece]]) -> None:
        """Give the model's tensors, and the optimizer's float32 copies of its ranges, what `read` has of their pieces."""
        for local in self._local.values():
            tensor = local.tensor.detach()
            tensor.zero_()  # padding of the vocabulary has no piece
            copy_pieces(tensor, pieces_of(local), read)
        for part in self._optimizer.ranges() if self._role.trained else ():
            part.main.zero_()
            for box, view in _boxes(part, part.main):
                copy_pieces(view, restrict(pieces_of(self._of[id(part.parameter)]), box), read)

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    def shards(self, copy: bool = False) -> Shards:
        self._check_trained()
        record = {
            "ranks": self._group.size(),
            "layout": self._layout(),
            "updates": self._optimizer.updates,
            "schedule": self._optimizer.schedule_steps,
            "optimizer": self._optimizer.options,
            "random": checkpoint_state.random_record(),
        }
        return collect_shards(self._entries(), record, copy)

    def _entries(self) -> Iterator[Entry]:
        """All that a checkpoint holds of this rank."""
        for part in self._optimizer.ranges():
            local = self._of[id(part.parameter)]
            for prefix, values in {"model": part.main, **{f"optimizer.{k}": v for k, v in part.state.items()}}.items():
                for box, view in _boxes(part, values):
                    yield from self._as_hugging_face(prefix, restrict(local.hugging_face, box), view)
        for name, local in self._local.items():
            if not local.tensor.requires_grad and _is_data_parallel_leader(name):  # a frozen router, or a router's bias
                yield from self._as_hugging_face("model", local.hugging_face, local.tensor.detach())
        for name, tensor in checkpoint_state.random_tensors(self.device, self._group.rank()).items():
            yield name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor

    def _as_hugging_face(self, prefix: str, pieces: Iterable[Piece], tensor: torch.Tensor) -> Iterator[Entry]:
        for piece in pieces:
            part = tensor[piece.target.within(whole(tuple(tensor.shape)))]
            yield f"{prefix}.{piece.name}", self._shapes[piece.name], piece.source, part.reshape(piece.source.size)

    def load(self, folder: Path) -> None:
        """The layout may be another than that of saving; only at the same one are the random states restored.

        Raises ValueError if the weights are of another model, or if optimizer or schedule are set otherwise than they were.
        """
        self._check_trained()
        reader, records = read_shards(folder)
        record = records[0]
        stored = {n.removeprefix("model."): s for n, s in reader.shapes.items() if n.startswith("model.")}
        if stored != {name: tuple(shape) for name, shape in self._shapes.items()}:
            odd = sorted(n for n in stored.keys() | self._shapes.keys() if stored.get(n) != self._shapes.get(n))
            raise ValueError(f"{folder}: the checkpoint is of another model; these differ: {odd[:4]} ({len(odd)})")
        if record.get("optimizer") != self._optimizer.options:
            raise ValueError(
                f"{folder}: the optimizer's settings have changed since, or another backend's were used:"
                f" {record.get('optimizer')} -> {self._optimizer.options}"
            )
        self._fill(lambda name, box: reader.read(f"model.{name}", box), lambda local: local.hugging_face)
        states = {}
        kinds = sorted({name.split(".", 2)[1] for name in reader.shapes if name.startswith("optimizer.")})
        for part in self._optimizer.ranges():
            states[part.parameter] = {kind: self._read_state(reader, kind, part) for kind in kinds}
        updates = record["updates"] if "updates" in record else record["steps"]
        self._optimizer.restore(updates, checkpoint_state.schedule_steps(record), states)
        if record.get("layout") == self._layout() and record["ranks"] == self._group.size():
            checkpoint_state.load_random(self.device, self._group.rank(), reader, records[self._group.rank()]["random"])

    def _read_state(self, reader: BoxReader, kind: str, part: ParameterRange) -> torch.Tensor:
        values = torch.zeros_like(part.main)
        for box, view in _boxes(part, values):
            pieces = restrict(self._of[id(part.parameter)].hugging_face, box)
            copy_pieces(view, pieces, lambda name, source: reader.read(f"optimizer.{kind}.{name}", source))
        return values

    def _layout(self) -> list[int]:
        config = self._stage.config
        return [
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.context_parallel_size,
            config.expert_model_parallel_size,
        ]


def _boxes(part: ParameterRange, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A flat range of a parameter as boxes of it, each with the view of `values` ([stop - start]) that belongs to it."""
    done = 0
    for box in flat_boxes(tuple(part.parameter.shape), part.start, part.stop):
        yield box, values[done : done + box.numel].view(box.size)
        done += box.numel


def _is_data_parallel_leader(name: str) -> bool:
    """Whether this rank speaks for its data-parallel peers, which hold the same of this parameter."""
    if ".local_experts." in name:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _data_parallel(policy: PolicyConfig, stage: PipelineStage) -> DistributedDataParallel:
    settings = policy.megatron_cfg.distributed_data_parallel_config
    model = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            # Never overlapped with the next forward pass: a refit reads every weight before it, and our head reads the output
            # layer's without running that module, which is what would wait for it.
            overlap_param_gather=False,
            use_distributed_optimizer=True,
        ),
        stage,
    )
    stage.config.finalize_model_grads_func = _finalize
    stage.config.no_sync_func = model.no_sync
    return model


def _finalize(models_: list, num_tokens=None, **kwargs) -> None:
    finalize_model_grads(models_, None, **kwargs)  # None: the loss is divided already
