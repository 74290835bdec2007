"""Choose the parameters of a pipeline stage that train: those of its adapters, or all that are not frozen.

The stage attaches its adapters to modules, initializes and merges them, and disables them for the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.boxes import Box, whole
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.models.family import CONSTANTS, Parameter
from pipeline.models.frozen_names import freeze, grouped
from pipeline.models.recorded_layout import Shape
from pipeline.train.adapters.adapter_weights import initial_a
from pipeline.train.adapters.linear import AdapterSwitch
from pipeline.train.adapters.modules import AdaptedModule, choose, options
from pipeline.train.adapters.spec import A as SUFFIX_A
from pipeline.train.adapters.spec import AdapterSpec, layer_of
from pipeline.train.adapters.spec import B as SUFFIX_B
from pipeline.train.gradients import sum_over_groups
from pipeline.train.initial_weights import ReadBox
from pipeline.train.megatron.adapters import SUBMODULE, ModuleAdapter, adapter_parameters
from pipeline.train.megatron.local_tensors import LocalTensor, global_name
from pipeline.train.megatron.model import PipelineStage


def adapt(
    stage: PipelineStage, policy: PolicyConfig, parameters: Mapping[str, Parameter], shapes: Mapping[str, Shape]
) -> StageAdapters | None:
    """Add the recipe's adapters to a stage, and freeze everything else except for a value head.

    Returns None, and changes nothing, if the recipe has no adapters. parameters: {global name: parameter} of the whole model;
    shapes: {name: shape} of the tensors on disk. Raises RecipeError if a name in the recipe matches no module.
    """
    config = policy.megatron_cfg.peft
    if not config.enabled:
        return None
    adapters = StageAdapters(AdapterSpec.of(options(config)), choose(config, parameters), shapes)
    stage.requires_grad_(False)
    if stage.post_process and hasattr(stage, "value_head"):
        stage.value_head.requires_grad_(True)
    adapters.attach(stage)
    return adapters


class StageAdapters:
    """The adapters of a model, and the adapters of this rank's stage."""

    def __init__(self, spec: AdapterSpec, adapted: list[AdaptedModule], shapes: Mapping[str, Shape]):
        self.spec = spec
        self._targets, self._model_shapes = adapted, shapes
        self.switch = AdapterSwitch()
        self._held: dict[str, tuple[nn.Module, ModuleAdapter]] = {}  # of this rank, by global name of the module
        self.parameters: dict[str, Parameter] = {}  # of all ranks, by global name
        self.shapes: dict[str, Shape] = {}  # of the tensors on disk
        self.copies: dict[str, list[str]] = {}  # tensors on disk that are one parameter, by the first one's name
        for target in adapted:
            self.parameters |= adapter_parameters(target, spec, shapes)
            self.shapes |= target.tensors(spec, shapes)
            self.copies |= target.duplicates()

    def attach(self, stage: PipelineStage) -> None:
        """Add the adapters to this stage's modules. A stage may have no module that gets one."""
        modules = {}
        for name, _ in list(stage.named_parameters()):
            module = name.rpartition(".")[0]
            modules[global_name(stage, name).rpartition(".")[0]] = stage.get_submodule(module)
        for target in self._targets:
            if (layer := modules.get(target.name)) is None:
                continue  # of another stage or expert-parallel rank
            if not hasattr(layer, "weight"):
                message = "got true with adapters of experts, which one kernel then computes together; expected false"
                raise RecipeError(Problem("policy.megatron_cfg.moe_grouped_gemm", "unsupported", message))
            adapter = ModuleAdapter(layer, target, target.rows(self._model_shapes), self.spec, self.switch)
            layer.add_module(SUBMODULE, adapter)
            layer.register_forward_hook(self._add)
            self._held[target.name] = layer, adapter
        if stage.pre_process:
            stage.embedding.register_forward_hook(require_gradient)

    def _add(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
        """Return a module's output with its adapter's output added: the forward hook of an adapted module."""
        if not self.switch.enabled:
            return output
        adapter = layer.get_submodule(SUBMODULE)
        if isinstance(output, tuple):
            return adapter(layer, inputs[0], output[0], output[1] is None), *output[1:]
        return adapter(layer, inputs[0], output)

    def sum_partial(self) -> None:
        """Sum the partial gradients of adapters over the ranks that cut the module (`ModuleAdapter.partial`).

        Collective. Call it after gradients are summed over data-parallel ranks.
        """
        partial: list[tuple[Any, dist.ProcessGroup]] = []
        for _, adapter in self._held.values():
            partial += [(parameter, adapter.group) for parameter in adapter.partial]
        sum_over_groups((parameter.main_grad, group) for parameter, group in partial)

    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (global name, merged weight) of this rank's part of each adapted weight. Collective with DoRA."""
        for module, (layer, adapter) in self._held.items():
            yield f"{module}.weight", adapter.merged(layer)

    def initial(self, local: Mapping[str, LocalTensor], seed: int) -> ReadBox:
        """Return a function that reads boxes of the adapters' initial tensors, in float32. Collective with DoRA.

        local: {global name: tensor} of this rank; the weights among these must be loaded.
        """
        magnitudes: dict[str, torch.Tensor] = {}  # whole, of which this rank fills its rows
        for module, (layer, adapter) in self._held.items() if self.spec.dora else ():
            rows = adapter.initial_magnitude(layer).cpu()
            for piece in local[f"{module}.{SUBMODULE}.magnitude"].hugging_face:
                into = magnitudes.setdefault(piece.name, torch.zeros(self.shapes[piece.name]))
                into[piece.source.within(whole(tuple(into.shape)))] = rows[piece.target.within(whole(tuple(rows.shape)))]

        @functools.lru_cache(maxsize=8)
        def draw(name: str) -> torch.Tensor:
            return initial_a(self.spec, name.removesuffix(SUFFIX_A), self.shapes[name][1], seed)

        def read(name: str, box: Box) -> torch.Tensor:
            assert layer_of(name) is not None
            if name.endswith(SUFFIX_B):
                return torch.zeros(box.size)
            full = draw(name) if name.endswith(SUFFIX_A) else magnitudes[name]
            return full[box.within(whole(tuple(full.shape)))]

        return read


def require_gradient(embedding: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the embedding's output require gradients, as recomputation and pipeline stages expect: a forward hook."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def freeze_stage(
    stage: PipelineStage, policy: PolicyConfig, local: Mapping[str, LocalTensor], parameters: Mapping[str, Parameter]
) -> None:
    """Freeze the parameters of this stage that policy.freeze_parameters names.

    local: this rank's tensors by global name. parameters: {global name: parameter} of the whole model. Raises RecipeError, on
    all ranks alike, as `freeze` does.
    """
    trained = {name: parameter.sources for name, parameter in parameters.items() if not name.endswith(CONSTANTS)}
    tensors = [
        (tensor.tensor, trained[name])
        for name, tensor in local.items()
        if name in trained and isinstance(tensor.tensor, torch.nn.Parameter)
    ]
    freeze(policy.freeze_parameters, tensors, grouped(trained))
    megatron = policy.megatron_cfg
    needs = megatron.pipeline_model_parallel_size > 1 or megatron.activation_checkpointing
    if needs and stage.pre_process and not stage.embedding.word_embeddings.weight.requires_grad:
        stage.embedding.register_forward_hook(require_gradient)
