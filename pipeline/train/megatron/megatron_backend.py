"""The Megatron-Core training backend: tensor, pipeline, context, expert, sequence and data parallelism.

Weights are in the recipe's precision. Megatron-Core's DistributedDataParallel sums gradients, and its distributed optimizer
keeps float32 weights and state cut over data-parallel ranks. Checkpoints hold boxes of Hugging Face tensors, so they load with
any layout. With adapters (adapters.py) only the adapters and a value head are trained and saved; `weights` and `local_tensor`
return merged weights, or the adapters for a role that serves these (served_weights.py).

Not supported: virtual pipeline stages, FP8, multi-token prediction, Megatron-FSDP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import PreTrainedConfig
from typing_extensions import override

from pipeline.boxes import Region
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.files.stored_files import FileKey
from pipeline.models.backend_support import check_attention, check_indexer, check_megatron_attention
from pipeline.models.family import unsupported_model
from pipeline.models.hugging_face import model_config
from pipeline.models.recorded_layout import Shape, copy_pieces, restrict
from pipeline.models.text_model import TextModel
from pipeline.train import checkpoint_state
from pipeline.train.adapters.modules import options
from pipeline.train.context_parallel import LocalBatch, localize
from pipeline.train.heads import OutputHead
from pipeline.train.initial_weights import ReadBox, initial_weights
from pipeline.train.logprobs import LINEAR
from pipeline.train.megatron import adapted_stage
from pipeline.train.megatron.distributed_optimizer import ScheduledOptimizer
from pipeline.train.megatron.gradient_norm import GradientNorm, set_flags
from pipeline.train.megatron.groups import context_group, data_group, initialize, pipeline_group
from pipeline.train.megatron.local_modules import PackedSequences, kernels_read_starts
from pipeline.train.megatron.local_tensors import LocalTensor, local_tensors
from pipeline.train.megatron.model import build, data_parallel
from pipeline.train.megatron.other_modalities import hold
from pipeline.train.megatron.saved_state import SavedState, boxes, layout_of
from pipeline.train.megatron.served_weights import ServedWeights
from pipeline.train.megatron.stage_routers import StageRouters
from pipeline.train.model_checks import head_function
from pipeline.train.offload import HostWeights, Offload
from pipeline.train.outputs import broadcast_outputs, broadcast_record, reduce_outputs
from pipeline.train.sequence_bounds import check_batches
from pipeline.train.shards import Shards, collect_shards, read_shards
from pipeline.train.train_backend import Loss, ModelRole, TrainBackend
from pipeline.types import LossOutput, Outputs, PackedBatch, StepResult


class MegatronBackend(TrainBackend):
    """The training backend on Megatron-Core."""

    def __init__(self, policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole):
        """Build the backend, as `pipeline.train.build` documents."""
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._policy, self._group, self._role = policy, group, role
        initialize(policy, seed)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        checkpoint = model_config(policy, role.head)
        model = TextModel(checkpoint, role.head)
        hf, self._shapes, family = model.config, model.shapes, model.parameters
        check_attention(hf)
        check_indexer(hf, policy.max_total_sequence_length)
        check_megatron_attention(hf, policy.max_total_sequence_length)
        self._stage = build(policy, hf, role.head).to(self.device)
        hold(self._stage, model.others, self._shapes)
        self._starts_on_host = not kernels_read_starts(self._stage, self._stage.config)
        if not role.trained:
            self._stage.requires_grad_(False)
        self._adapters = adapted_stage.adapt(self._stage, policy, family, self._shapes) if role.trained else None
        whole, shapes = (self._adapters.parameters, self._adapters.shapes) if self._adapters else ({}, {})
        self._local = local_tensors(self._stage, family | model.others | whole, self._shapes | shapes)
        self._base = {name: local for name, local in self._local.items() if name not in whole}
        self._saved = SavedState.of(self._local, self._shapes, self._adapters, role.head)
        self._vocabulary = hf.vocab_size
        routes = role.trained and (policy.router_replay.enabled or policy.moe_aux_loss_coeff > 0)
        self._routers = StageRouters(self._stage, family, policy) if routes else None
        self._balancing = self._routers.balancing if self._routers else None
        self._head = OutputHead.of(policy, role, head_function(hf) if role.head == "logprobs" else LINEAR)
        self._training: tuple[DistributedDataParallel, ScheduledOptimizer] | None = None
        if role.trained:
            adapted_stage.freeze_stage(self._stage, policy, self._base, family)
            set_flags(self._local)
            wrapped = data_parallel(policy, self._stage, self._adapters.sum_partial if self._adapters else None)
            self._training = wrapped, ScheduledOptimizer(policy, wrapped, GradientNorm(self._local, group, self.device))
        self._load_initial(checkpoint, seed)
        weights = [local.tensor for local in self._local.values()]
        self._reference = HostWeights(weights, self.device) if role.reference and self._adapters is None else None
        peft, random_seed = policy.megatron_cfg.peft, seed if policy.random_init else None
        self._lora_record = checkpoint_state.adapter_record(options(peft), random_seed) if self._adapters else None
        served = (self._local, self._base, self._shapes, self._adapters, role.serves_adapters)
        self._served = ServedWeights(*served, group, self.device)
        self._host = HostWeights(weights, self.device) if role.offload and not role.trained else None
        if self._host is not None:
            self._host.free_device()
        self._offload = Offload(self.device, shared=True)

    # ---- forward and step -----------------------------------------------------------------------------------------------

    @override
    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        self._head.check(model, top_k)
        check_batches(batches, self._vocabulary)
        collected: list[Outputs] = []

        def keep(batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            collected.append(outputs)
            return torch.zeros((), device=self.device)  # Megatron-Core's schedule expects a loss

        head = self._head if model == "policy" else self._head.untruncated()
        if model != "policy":  # its own routers choose
            batches = [dataclasses.replace(batch, experts=None) for batch in batches]
        with torch.no_grad(), self._weights_of(model):
            self._run(self._stage, batches, keep, head, top_k)
        self._empty_cache(2)
        return self._on_all_stages(collected, batches, head, top_k)

    @override
    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        self._check_trained()
        check_batches(batches, self._vocabulary)
        if not batches:
            raise ValueError("a step needs at least one batch")
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._balancing is not None:
            self._balancing.begin()
        losses: list[LossOutput] = []

        def finish(batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            output = loss(outputs, batch)
            losses.append(LossOutput(output.loss.detach(), output.metrics))
            return output.loss

        with self._adapters.switch.training() if self._adapters else contextlib.nullcontext():
            self._run(self._model, batches, finish, self._head)
        metrics = self._metrics(losses)
        if self._balancing is not None:
            metrics |= self._balancing.metrics(self._group, self.device)
        lr = self._optimizer.schedule.lr
        metrics |= {"grad_norm": self._optimizer.step(), "lr": lr}
        self._served.refresh()
        self._empty_cache(1)
        return StepResult(metrics)

    @override
    def advance_schedule(self) -> None:
        self._optimizer.advance_schedule()

    @override
    def new_rates(self, policy: PolicyConfig) -> Callable[[], None]:
        return self._optimizer.new_rates(policy)

    @property
    def _model(self) -> DistributedDataParallel:
        return self._check_trained()[0]

    @property
    def _optimizer(self) -> ScheduledOptimizer:
        return self._check_trained()[1]

    def _check_trained(self) -> tuple[DistributedDataParallel, ScheduledOptimizer]:
        if self._training is None:
            raise ValueError(f"{self._policy.model_name} was built with ModelRole(trained=False)")
        return self._training

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[PackedBatch],
        finish: Callable[[PackedBatch, Outputs], torch.Tensor],
        head: OutputHead,
        top_k: int = 0,
    ) -> None:
        """Run Megatron-Core's pipeline schedule over the microbatches.

        finish: a function of (batch, outputs) that the last stage calls for each microbatch. Its result is differentiated,
        unless gradients are disabled.
        """
        if not batches:
            return

        def forward_step(iterator: Iterator[tuple[PackedBatch, LocalBatch]], model: torch.nn.Module):
            batch, local = next(iterator)
            sequences = PackedSequences.of(local.packing, self._starts_on_host)
            with self._routers.forward(local) if self._routers else contextlib.nullcontext():
                hidden = model(local.tokens, local.positions, attention_mask=None, packed_seq_params=sequences)
            if not parallel_state.is_pipeline_last_stage():
                return hidden, None
            # The schedule expects a number of tokens to divide by. It is ignored: losses are already divided.
            divisor = torch.ones((), dtype=torch.int, device=self.device)
            weight, shard = self._stage.head(self._vocabulary)
            outputs = head.outputs(hidden[:, 0], weight, local, shard, top_k)
            return outputs, lambda outputs: (finish(batch, outputs), divisor, None)

        config = self._stage.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        context = context_group()
        pairs = ((batch, localize(batch, context.size(), context.rank(), multiple, context)) for batch in batches)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=pairs,
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # unused: each microbatch has its own length (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )

    def _on_all_stages(
        self, outputs: list[Outputs], batches: Sequence[PackedBatch], head: OutputHead, top_k: int
    ) -> list[Outputs]:
        """Return the last pipeline stage's outputs on all stages."""
        stages = pipeline_group()
        if stages.size() == 1 or not batches:
            return outputs
        if stages.rank() != stages.size() - 1:
            outputs = [head.empty(batch, top_k) for batch in batches]
        broadcast_outputs(outputs, stages)
        return outputs

    def _metrics(self, outputs: list[LossOutput]) -> dict[str, float]:
        """Return the step's metrics, equal on all ranks."""
        stages = pipeline_group()
        metrics = {}
        if parallel_state.is_pipeline_last_stage():
            # Tensor- and context-parallel peers computed the same loss of the same batches.
            metrics = reduce_outputs(outputs, True, data_group(), self.device)
        if stages.size() == 1:
            return metrics
        return broadcast_record(metrics, stages.size() - 1, stages, self.device)

    def _empty_cache(self, level: int) -> None:
        if self.device.type == "cuda" and self._policy.megatron_cfg.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()

    # ---- offloading -----------------------------------------------------------------------------------------------------

    @override
    def offload(self, keep_weights: bool = False) -> None:
        if keep_weights:
            self._served.merge()
        served = self._served.read()
        weights = [*(local.tensor for local in self._local.values()), *self._served.merged]
        if self._training is not None:
            model, optimizer = self._training
            optimizer.zero_grad()
            buffers = model.buffers + model.expert_parallel_buffers  # pyright: ignore[reportOperatorIssue] - a list here
            self._offload.drop(buffer.grad_data for buffer in buffers)
            self._offload.offload(optimizer.tensors(), keep=served if self._adapters else weights)
        if self._adapters is not None:
            base = [local.tensor for local in self._base.values() if not local.tensor.requires_grad]
            self._offload.offload(base, keep=served if keep_weights else (), frozen=True)
        if self._host is None and (self._adapters is not None or not keep_weights):
            self._offload.offload(weights, keep=served if keep_weights else (), frozen=not self._role.trained)

    @override
    def reload(self) -> None:
        self._offload.reload()

    # ---- weights --------------------------------------------------------------------------------------------------------

    @override
    def weights(self, model: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        precision = getattr(torch, self._policy.precision)
        with self._weights_of("policy"):
            yield from self._served.tensors(precision, model)

    @property
    @override
    def shapes(self) -> dict[str, Shape]:
        return self._served.shapes

    @override
    def layout(self) -> list[Region]:
        return self._served.layout()

    @override
    def local_tensor(self, name: str) -> torch.Tensor:
        return self._served.tensor(name)

    @contextlib.contextmanager
    def _weights_of(self, model: str) -> Iterator[None]:
        """Within this context, the model's tensors hold the weights of `model` ("policy" or "reference") on the device."""
        if model == "reference" and self._adapters is not None and self._role.reference:
            with self._adapters.switch.disabled():
                yield
            return
        if model == "reference" and self._reference is None:
            raise ValueError("there are no reference weights; build the backend with ModelRole(reference=True)")
        frozen = self._host if model == "policy" else self._reference
        with frozen.on_device() if frozen else contextlib.nullcontext():
            yield

    def _load_initial(self, hf: PreTrainedConfig, seed: int) -> None:
        if getattr(hf, "quantization_config", None) and not self._policy.random_init:
            raise unsupported_model(f"{self._policy.model_name} is quantized; expected an unquantized checkpoint")
        self._fill(initial_weights(self._policy, hf, seed, self._role.head), self._base)
        if self._adapters is not None:
            adapters = {name: local for name, local in self._local.items() if name not in self._base}
            self._fill(self._adapters.initial(self._local, seed), adapters)

    def _fill(self, read: ReadBox, of: Mapping[str, LocalTensor]) -> None:
        """Fill the tensors `of`, and the optimizer's float32 ranges of these, with the boxes that `read` returns."""
        for local in of.values():
            tensor = local.tensor.detach()
            tensor.zero_()  # padding of the vocabulary has no piece
            copy_pieces(tensor, local.hugging_face, read)
        by_tensor = {id(local.tensor): local for local in of.values()}
        for part in self._optimizer.ranges() if self._training is not None else ():
            if (local := by_tensor.get(id(part.parameter))) is not None:
                part.main.zero_()
                for box, view in boxes(part, part.main):
                    copy_pieces(view, restrict(local.hugging_face, box), read)

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    @override
    def shards(self, copy: bool = False) -> Shards:
        self._check_trained()
        record = {
            "ranks": self._group.size(),
            "layout": layout_of(self._stage.config),
            "updates": self._optimizer.updates,
            "schedule": self._optimizer.schedule.steps,
            "optimizer": self._optimizer.options,
            "lora": self._lora_record,
            "frozen": self._policy.freeze_parameters,
            "random": checkpoint_state.random_record(),
        }
        random = checkpoint_state.random_entries(self.device, self._group.rank())
        return collect_shards(itertools.chain(self._saved.entries(self._optimizer.ranges()), random), record, copy)

    @override
    def load(self, folder: Path, key: FileKey | None = None) -> None:
        # The layout may differ from the saved one. Random states are restored only for the same layout.
        self._check_trained()
        reader, records = read_shards(folder, key)
        record = records[0]
        checkpoint_state.check_record(folder, record, self._lora_record, self._policy.freeze_parameters)
        self._saved.check_tensors(folder, reader)
        if record.get("optimizer") != self._optimizer.options:
            message = (
                f"{folder} was saved with other settings of the optimizer, or by another backend:"
                f" {record.get('optimizer')} -> {self._optimizer.options}"
            )
            raise RecipeError(Problem("policy.optimizer", "contradiction", message))
        self._fill(lambda name, box: reader.read(checkpoint_state.stored_name(name), box), self._saved.local)
        updates = record["updates"] if "updates" in record else record["steps"]
        states = self._saved.optimizer_states(self._optimizer.ranges(), reader)
        self._optimizer.restore(updates, checkpoint_state.schedule_steps(record), states)
        self._served.refresh()
        if record.get("layout") == layout_of(self._stage.config) and record["ranks"] == self._group.size():
            checkpoint_state.load_random(self.device, self._group.rank(), reader, records[self._group.rank()]["random"])
