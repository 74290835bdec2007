"""Tensor parallelism: the plan that a Hugging Face model brings, as DTensor styles of torch.

Column-cut and row-cut linear layers, embedding and head cut by vocabulary, and small parameters inside the cut region that stay
whole, as a value head does. Activations between blocks are whole on every rank. Left out: sequence parallelism, experts, packed
projections. A style that is not known is refused by name.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from pipeline.train.logprobs import VocabularyShard

KEY = "policy.dtensor_cfg.tensor_parallel_size"


def parallelize(hf: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Cut the parameters of `hf` over the 1-d mesh, in place.

    Returns the names of the parameters that are whole on every rank and whose gradients are partial: each rank sees them act on
    its own heads only, so their gradients must be summed over the mesh. Raises ValueError for what cannot be cut.
    """
    _check_heads(hf, mesh.size())
    styles: dict[str, ParallelStyle] = {}
    partial = []
    for name, style in expand(hf).items():
        module = hf.get_submodule(name)
        if style == "replicated_with_grad_allreduce":
            partial += [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        else:
            styles[name] = _style(name, style, module, mesh.size())
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    _check_vocabulary(len(embedding.weight), mesh.size())
    styles[_name(hf, embedding)] = RowwiseParallel(input_layouts=Replicate())
    if head is not None:
        styles[_name(hf, head)] = ColwiseParallel(use_local_output=False)  # its forward is not used, only its weight is cut
    if tied:
        del styles[_name(hf, head)]
    parallelize_module(hf, mesh, styles)
    if tied:
        head.weight = embedding.weight
    return partial


def _name(hf: PreTrainedModel, wanted: nn.Module) -> str:
    return next(name for name, module in hf.named_modules() if module is wanted)


def vocabulary_shard(hf: PreTrainedModel, mesh: DeviceMesh) -> VocabularyShard:
    """This rank's rows of the head: torch cuts dimensions into equal chunks, of which the last may be shorter."""
    rows = hf.get_output_embeddings().weight.shape[0]
    return VocabularyShard(mesh.get_local_rank() * -(-rows // mesh.size()), mesh.get_group())


def expand(hf: PreTrainedModel) -> dict[str, str]:
    """Module name -> style, from a plan whose names have `*` for layer numbers."""
    plan = dict(hf.tp_plan or {})
    if not plan:
        raise ValueError(f"{KEY}: {type(hf).__name__} brings no tensor-parallel plan; it must be 1")
    expanded = {name: plan[generic] for name, _ in hf.named_modules() if (generic := _generic(name)) in plan}
    used = {_generic(name) for name in expanded}
    for name, _ in hf.named_parameters():
        if (generic := _generic(name)) in plan and generic not in used:
            raise ValueError(
                f"{KEY}: the plan of {type(hf).__name__} cuts the bare parameter {name} ({plan[generic]}); it must be 1"
            )
    return expanded


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _style(name: str, style: str, module: nn.Module, size: int) -> ParallelStyle:
    vocabulary = isinstance(module, nn.Embedding) or name == "lm_head"
    cut = {"colwise": 0, "rowwise": 1, "embedding_rowwise": 0, "colwise_gather_output": 0}.get(style)
    if cut is None or (style in ("embedding_rowwise", "colwise_gather_output") and not vocabulary):
        raise ValueError(f"{KEY}: style '{style}' of {name} is not supported; it must be 1 for this model")
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"{KEY}: {name} is a {type(module).__name__}, which cannot be cut '{style}'; it must be 1 for this model"
        )
    if not vocabulary and module.weight.shape[cut] % size:
        raise ValueError(
            f"{KEY}: {size} does not divide dimension {cut} of {name}, which has {module.weight.shape[cut]} entries"
        )
    return RowwiseParallel() if style == "rowwise" else ColwiseParallel()


def _check_heads(hf: PreTrainedModel, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(hf.config, name, None)
        if heads is not None and heads % size:
            raise ValueError(f"{KEY}: {size} does not divide {name} {heads} of {type(hf).__name__}")


def _check_vocabulary(rows: int, size: int) -> None:
    if -(-rows // size) * (size - 1) >= rows:
        raise ValueError(f"{KEY}: a vocabulary of {rows} leaves some of {size} ranks without a row")
