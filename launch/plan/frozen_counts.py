"""Count the parameters of a rank that `freeze_parameters` freezes. They have no gradient and no optimizer state."""

from __future__ import annotations

from collections.abc import Iterable

from launch.plan.memory_parts import TrainModel
from launch.plan.rank_division import Parallelism
from pipeline.models.frozen_names import matched
from pipeline.models.tensors import Tensor


def tensors(model: TrainModel) -> list[Tensor]:
    """Return the frozen tensors of a model, without buffers and value heads; empty for a model that does not train."""
    if not model.trained or not model.policy.freeze_parameters:
        return []
    names = matched(model.policy.freeze_parameters, (tensor.name for tensor in model.shape.tensors))
    frozen = (tensor for tensor in model.shape.tensors if tensor.name in names and tensor.part != "buffer")
    return [tensor for tensor in frozen if not (model.values and tensor.part == "output")]


def cut(model_tensors: Iterable[Tensor], tensor: int) -> float:
    """Return how many parameters of these tensors one of `tensor` tensor-parallel ranks holds, without routed experts."""
    return sum(part.numel / (1 if part.split == "none" else tensor) for part in model_tensors if part.part != "routed")


def routed_parameters(experts: Iterable[Tensor]) -> int:
    """Return how many parameters of these tensors belong to routed experts, on all ranks together."""
    return sum(expert.numel for expert in experts if expert.part == "routed")


def of_stage(model: TrainModel, layout: Parallelism, layers: range, first: bool, last: bool) -> tuple[float, float]:
    """Return numbers of frozen parameters on a rank of a Megatron-Core stage: (outside of routed experts, in routed experts).

    layers: the layers of the stage. first, last: whether it is the first or last stage. A tied embedding is on both of these.
    """
    frozen = tensors(model)
    of_layers = [frozen_tensor for frozen_tensor in frozen if frozen_tensor.layer in layers]
    for frozen_tensor in frozen:
        if frozen_tensor.layer is None:
            at_begin = first if frozen_tensor.part == "embedding" else last
            of_layers += [frozen_tensor] * (
                at_begin or (frozen_tensor.part == "embedding" and model.shape.tied and last and not model.values)
            )
    if model.policy.megatron_cfg.freeze_moe_router:  # the plan leaves routers out already
        router = (model.shape.experts, model.shape.hidden)
        of_layers = [
            frozen_tensor for frozen_tensor in of_layers if frozen_tensor.part != "router" or frozen_tensor.shape != router
        ]
    return cut(of_layers, layout.tensor), routed_parameters(of_layers) / (layout.expert * layout.expert_tensor)
