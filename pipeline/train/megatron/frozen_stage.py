"""Freeze parameters of a pipeline stage (`pipeline/train/freezing.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipeline.config import PolicyConfig
from pipeline.models.family import Parameter
from pipeline.models.frozen_names import grouped
from pipeline.train.freezing import freeze
from pipeline.train.megatron.adapted_stage import require_gradient
from pipeline.train.megatron.local_tensors import LocalTensor
from pipeline.train.megatron.model import PipelineStage


def freeze_stage(
    stage: PipelineStage, policy: PolicyConfig, local: Mapping[str, LocalTensor], parameters: Mapping[str, Parameter]
) -> None:
    """Freeze the parameters of this stage that policy.freeze_parameters names.

    local: this rank's tensors by global name. parameters: {global name: parameter} of the whole model. Raises RecipeError, on
    all ranks alike, as `freeze` does.
    """
    trained = {name: parameter.sources for name, parameter in parameters.items() if not name.endswith("expert_bias")}
    tensors = [
        (tensor.tensor, trained[name]) for name, tensor in local.items() if isinstance(tensor.tensor, torch.nn.Parameter)
    ]
    freeze(policy.freeze_parameters, tensors, grouped(trained))
    megatron = policy.megatron_cfg
    needs = megatron.pipeline_model_parallel_size > 1 or megatron.activation_checkpointing
    if needs and stage.pre_process and not stage.embedding.word_embeddings.weight.requires_grad:
        stage.embedding.register_forward_hook(require_gradient)
