"""Apply the tensor-parallel plan of a Hugging Face model, with torch's DTensor styles.

Supported are column-wise and row-wise linear layers (also those between which activations are whole, as for joint projections),
embeddings and head cut by vocabulary, and small parameters inside the cut region that stay whole. A value head stays whole too,
and so do the projections of embeddings that each layer adds (Gemma 4's).

Activations between blocks are whole on every rank or, with sequence parallelism, cut by tokens: a block that has column-wise
layers gathers its input once, and its row-wise layers reduce-scatter their output. The last hidden states are gathered again.

If there are more ranks than key-value heads, ranks share heads. The rows of k_proj and v_proj are cut over all ranks all the
same. The ranks gather keys and values, and each computes attention with the head that its queries use. The backward pass sums
the gradients of the ranks that share a head. Megatron-Core does the same.

Latent attention is cut where the model's plan does so (not DeepSeek-V3's). Its down-projection of keys and values stays whole.
The part of its output that becomes the keys' rotary part gets the gradients of a rank's own heads, which are summed.

Experts are not cut: see expert_parallel.py. Mixers with states are not cut either; each rank computes some of their sequences
(sequence_resets.py). But without sequence parallelism, mixers that the model's plan cuts (Qwen3.5's) are cut.
`block_styles` completes the plans of hybrid models. Not supported, with an error that names the style: packed projections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel
from typing_extensions import override

from pipeline.config import Problem, RecipeError
from pipeline.models.decoder import layer_configs
from pipeline.models.hugging_face import language_model
from pipeline.train.adapters.linear import AdaptedLinear
from pipeline.train.context_parallel import GatherRows, SplitRows
from pipeline.train.expert_parallel import expert_modules
from pipeline.train.logprobs import VocabularyShard
from pipeline.train.sequence_resets import Copy, is_whole, mixers

KEY = "policy.dtensor_cfg.tensor_parallel_size"
LATENT_KEYS = "mla_kv_a_proj"
"""transformers' style of the down-projection of keys and values in latent attention."""


class _ColumnsOfGathered(ColwiseParallel):
    """The style of a column-wise layer in a block that gathers its input.

    The gradient of the layer's input stays a partial sum; the backward pass of the gather sums it.
    """

    @staticmethod
    @override
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh) -> DTensor:
        return _WithPartialGradient.apply(inputs[0], device_mesh)


class _WithPartialGradient(torch.autograd.Function):
    """Returns a tensor that is whole on every rank of the mesh as a DTensor; its backward returns the rank's partial sum.

    It does the same as `DTensor.from_local` with grad_placements=[Partial()], which torch 2.11 does not have.
    """

    @staticmethod
    @override
    def forward(ctx, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(whole.view_as(whole), mesh, [Replicate()], run_check=False)

    @staticmethod
    @override
    def backward(ctx, grad: DTensor):
        assert grad.placements == (Partial(),)  # of the input of a column-wise layer
        return grad.to_local(), None


def parallelize(hf: PreTrainedModel, mesh: DeviceMesh, sequence: bool = False) -> list[str]:
    """Cut the parameters of `hf` over the 1-d mesh, in place. sequence: with sequence parallelism.

    Returns the names of parameters that are whole on every rank but have partial gradients, which must be summed over the mesh,
    because each rank applies them only to its own heads or tokens. Raises RecipeError for a model that cannot be cut.
    """
    planned = expand(hf)
    shared = shared_heads(hf, planned, mesh.size(), sequence)
    styles: dict[str, ParallelStyle] = {}
    partial, adapted, gathered = [], {}, []
    parts = _parts(mixers(hf)) if sequence else set()
    for name, style in planned.items():
        module = hf.get_submodule(name)
        if id(module) in parts:  # with sequence parallelism, each sequence of a mixer is computed on one rank
            continue
        gathered += [name] if style == "colwise_gather_output" and _block(name) else []
        if style == LATENT_KEYS:
            if not sequence:  # with it, all gradients before the column-wise layers of a block are partial sums
                module.register_forward_hook(_sum_rotary(hf.config.qk_rope_head_dim, mesh.get_group()))
        elif style == "replicated_with_grad_allreduce":
            partial += [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        elif isinstance(module, AdaptedLinear):
            base = f"{name}.base_layer"
            if style == "colwise_gather_output" and module.lora_magnitude_vector is not None:
                raise _unsupported_plan(f"style '{style}' of {name} does not support DoRA; expected 1")
            styles[base] = _style(base, style, module.base_layer, mesh.size(), sequence)
            adapted[name] = module
        else:
            styles[name] = _style(name, style, module, mesh.size(), sequence)
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    _check_vocabulary(len(embedding.get_parameter("weight")), mesh.size())
    styles[_name(hf, embedding)] = RowwiseParallel(input_layouts=Replicate(), output_layouts=_between_blocks(sequence))
    for name in _layer_embeddings(hf):
        _check_vocabulary(len(hf.get_parameter(f"{name}.weight")), mesh.size())
        styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if head is not None:
        styles[_name(hf, head)] = ColwiseParallel(use_local_output=False)  # its forward is not used, only its weight is cut
        if tied:
            del styles[_name(hf, head)]
    parallelize_module(hf, mesh, styles)
    for name, module in adapted.items():
        partial += [f"{name}.{parameter}" for parameter in module.cut(styles[f"{name}.base_layer"], mesh)]
    for name, heads in shared.items():
        hf.get_submodule(name).register_forward_hook(_one_head(heads, mesh.get_group()))
    if sequence and _layer_embeddings(hf):
        _split_layer_inputs(language_model(hf), mesh.get_group())
    if head is not None and tied:
        head.weight = embedding.weight
    if sequence:
        return _split_sequences(hf, mesh, styles, gathered)
    whole = {id(parameter) for mixer in mixers(hf) if is_whole(mixer) for parameter in mixer.parameters()}
    return partial + [name for name, parameter in hf.named_parameters() if id(parameter) in whole]


def _split_sequences(hf: PreTrainedModel, mesh: DeviceMesh, styles: dict[str, ParallelStyle], gathered: list[str]) -> list[str]:
    """Gather the tokens before each cut block of a model that is cut, in place, and return what `parallelize` does.

    styles: of the cut modules. gathered: names of the modules whose outputs every rank gathers. Raises RecipeError if
    attention is not cut.
    """
    blocks = {_block(name) for name, style in styles.items() if isinstance(style, _ColumnsOfGathered)}
    # Attention that the plan leaves whole would see only a rank's own tokens.
    text = _parts([language_model(hf)])
    attentions = [name for name, module in hf.named_modules() if hasattr(module, "is_causal") and id(module) in text]
    if uncut := [name for name in attentions if name not in blocks]:
        message = f"got true for {type(hf).__name__}, whose tensor-parallel plan does not cut {uncut[0]}; expected false"
        raise RecipeError(Problem("policy.dtensor_cfg.sequence_parallel", "unsupported", message))
    for block in sorted(blocks):
        hf.get_submodule(block).register_forward_pre_hook(_gather_input(mesh.get_group()), with_kwargs=True)
    # Before the column-wise layers of a block gradients are partial sums, and outside of blocks a rank has its own tokens.
    body = {id(parameter) for parameter in hf.base_model.parameters() if not isinstance(parameter, DTensor)}
    # Blocks of which every rank computes the whole inner part have whole gradients there, but for adapters.
    inner = tuple(f"{_block(name)}." for name in gathered)
    return [
        name
        for name, parameter in hf.named_parameters()
        if id(parameter) in body and (not name.startswith(inner) or ".lora_" in name)
    ]


def _parts(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of modules and of all modules in them."""
    return {id(part) for module in modules for part in module.modules()}


def _between_blocks(sequence: bool) -> Placement:
    """Return the placement of hidden states [1, t, H], or of experts' [t, H], outside of blocks."""
    return Shard(-2) if sequence else Replicate()


def _block(name: str) -> str:
    """Return the name of the module that contains a layer, which may be adapted. name: the layer's name."""
    return name.removesuffix(".base_layer").rpartition(".")[0]


def _gather_input(group: dist.ProcessGroup) -> Callable[..., tuple[tuple, dict]]:
    """Return a forward hook that gathers a block's hidden states [1, t / ranks, H] or [t / ranks, H] over the tokens."""

    def gather_rows(hidden: torch.Tensor) -> torch.Tensor:
        return GatherRows.apply(hidden.flatten(0, -2), group).view(*hidden.shape[:-2], -1, hidden.size(-1))

    def gather(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (gather_rows(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": gather_rows(kwargs["hidden_states"])}

    return gather


def _sum_rotary(size: int, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return a forward hook of latent attention's down-projection [..., latent + size], whose backward sums the last gradients.

    size: the entries of a key's rotary part, which all heads share.
    """

    def copy(_layer: nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.tensor_split([-size], -1)
        return torch.cat([latent, Copy.apply(rotary, group)], -1)

    return copy


def _layer_embeddings(hf: PreTrainedModel) -> list[str]:
    """Return the names of tables with an embedding of each token for each layer, which layers add to their outputs."""
    return [name for name, _ in hf.named_modules() if name.endswith("embed_tokens_per_layer")]


def _split_layer_inputs(body: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a body split the embeddings of all layers [1, T, layers, D] over the tokens, in place, as its hidden states are."""
    owner: Any = body
    whole: Callable[..., torch.Tensor] = owner.get_per_layer_inputs

    def split(*args: torch.Tensor | None) -> torch.Tensor:
        return SplitRows.apply(whole(*args)[0], group)[None]

    owner.get_per_layer_inputs = split


def _name(hf: PreTrainedModel, target: nn.Module) -> str:
    return next(name for name, module in hf.named_modules() if module is target)


def vocabulary_shard(hf: PreTrainedModel, mesh: DeviceMesh) -> VocabularyShard:
    """Return this rank's rows of the head. torch cuts a dimension into chunks of equal size; only the last may be shorter."""
    head = hf.get_output_embeddings()
    assert head is not None  # a model with log-probs has one
    rows = head.get_parameter("weight").shape[0]
    return VocabularyShard(mesh.get_local_rank() * -(-rows // mesh.size()), mesh.get_group())


def expand(hf: PreTrainedModel) -> dict[str, str]:
    """Return {module name: style} from the model's plan, in which `*` stands for layer numbers. Experts are left out."""
    plan, hybrid = dict(hf.tp_plan or {}), mixers(hf)
    if not plan and not hybrid:
        raise _unsupported_plan(f"{type(hf).__name__} has no tensor-parallel plan; expected a size of 1")
    experts = tuple(f"{name}." for name in expert_modules(hf))
    other = _parts([hf.base_model]) - _parts([language_model(hf)])  # modules for pictures and sound stay whole
    modules = [name for name, module in hf.named_modules() if not f"{name}.".startswith(experts) and id(module) not in other]
    expanded = {name: plan[generic] for name in modules if (generic := _generic(name)) in plan}
    if hybrid:
        planned, states = {_block(name) for name in expanded}, _parts(hybrid)
        blocks = {name: hf.get_submodule(name) for name in modules if name not in planned}
        expanded |= block_styles({name: block for name, block in blocks.items() if id(block) not in states})
    for name in modules:  # layers that some plans leave out
        block, _, leaf = name.rpartition(".")
        if leaf == "q_proj" and expanded.get(f"{block}.kv_b_proj") == "colwise":  # queries without a latent
            expanded.setdefault(name, "colwise")
        if leaf in ("q_norm", "k_norm") and expanded.get(f"{block}.{leaf[0]}_proj") == "colwise":
            expanded.setdefault(name, "replicated_with_grad_allreduce")
    used = {_generic(name) for name in expanded}
    for name, _ in hf.named_parameters():
        if (generic := _generic(name)) in plan and generic not in used and not name.startswith(experts):
            raise _unsupported_plan(
                f"the plan of {type(hf).__name__} cuts the bare parameter {name} ({plan[generic]}); expected 1"
            )
    return expanded


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _unsupported_plan(message: str) -> RecipeError:
    return RecipeError(Problem(KEY, "unsupported", message))


def _style(name: str, style: str, module: nn.Module, size: int, sequence: bool) -> ParallelStyle:
    vocabulary = isinstance(module, nn.Embedding) or name == "lm_head"
    cut = {
        "colwise": 0,
        "rowwise": 1,
        "rowwise_split_input": 1,
        "embedding_rowwise": 0,
        "colwise_gather_output": 0,
    }.get(style)
    if cut is None or (style == "embedding_rowwise" and not vocabulary):
        raise _unsupported_plan(f"style '{style}' of {name} is not supported; expected 1 for this model")
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise _unsupported_plan(
            f"{name} is a {type(module).__name__}, which cannot be cut '{style}'; expected 1 for this model"
        )
    if not vocabulary and module.weight.shape[cut] % size:
        message = f"got {size}; expected a divisor of dimension {cut} of {name}, which has {module.weight.shape[cut]} entries"
        raise RecipeError(Problem(KEY, "not-divisible", message))
    if style in ("rowwise", "rowwise_split_input"):
        options = {"input_layouts": Replicate()} if style == "rowwise_split_input" else {}
        return RowwiseParallel(**options, output_layouts=_between_blocks(sequence))
    options = {"output_layouts": Replicate()} if style == "colwise_gather_output" else {}
    return _ColumnsOfGathered(**options) if sequence and not vocabulary else ColwiseParallel(**options)


# ---- heads ------------------------------------------------------------------------------------------------------------------


def shared_heads(hf: PreTrainedModel, planned: Mapping[str, str], size: int, sequence: bool) -> dict[str, int]:
    """Return {layer of keys or values of which each rank needs one whole head, since ranks share heads: its number of heads}.

    planned: of `expand`. sequence: with sequence parallelism, which leaves mixers whole. Raises RecipeError if the ranks can
    neither divide nor share the heads.
    """
    names = ["num_attention_heads"] if sequence else ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"]
    for name in names:
        _check_divides(hf, size, name)
    of_layers = [getattr(config, "num_key_value_heads", None) for config in layer_configs(hf.config.get_text_config())]
    cut = [name for name, style in planned.items() if name.endswith((".k_proj", ".v_proj")) and style == "colwise"]
    for heads in filter(None, of_layers):
        if heads % size and (size % heads or not cut):
            _refuse_heads(hf, size, "num_key_value_heads", heads)
    counts = {name: of_layers[int(re.split(r"\.(?=\d+\.)", name)[-1].partition(".")[0])] for name in cut}
    return {name: heads for name, heads in counts.items() if heads and heads % size}


def _check_divides(hf: PreTrainedModel, size: int, name: str) -> None:
    if (heads := getattr(hf.config.get_text_config(), name, None) or 0) % size:
        _refuse_heads(hf, size, name, heads)


def _refuse_heads(hf: PreTrainedModel, size: int, name: str, heads: int) -> NoReturn:
    message = f"got {size}; expected a divisor of {name} {heads} of {type(hf).__name__}"
    raise RecipeError(Problem(KEY, "not-divisible", message))


def _one_head(heads: int, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return a forward hook that gathers keys or values [..., heads D / ranks], and returns this rank's head [..., D]."""
    head = group.rank() * heads // group.size()

    def gather(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        columns = GatherRows.apply(output.movedim(-1, 0), group)
        return columns.chunk(heads)[head].movedim(0, -1).contiguous()

    return gather


def _check_vocabulary(rows: int, size: int) -> None:
    if -(-rows // size) * (size - 1) >= rows:
        raise RecipeError(Problem(KEY, "too-large", f"got {size}; a vocabulary of {rows} leaves some ranks without a row"))


# ---- hybrid models ----------------------------------------------------------------------------------------------------------

# transformers' plans of models with state spaces or short convolutions are empty, or name the head alone. Attention and MLPs of
# these models are like those of other decoders, so they are known by the names of their linear layers. Everything else stays
# whole: mixers, routers, projections to the latent of experts, and blocks with other linear layers.

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"})
# (layers whose rows are cut, the layer whose columns are cut). The names are all linear layers of the block.
_CUT = [
    (_ATTENTION, "o_proj"),
    (_ATTENTION, "out_proj"),  # LFM2
    (frozenset({"gate_proj", "up_proj"}), "down_proj"),
    (frozenset({"up_proj"}), "down_proj"),  # Nemotron-H
    (frozenset({"w1", "w3"}), "w2"),  # LFM2
]
# (layer of a gate and an input together, the layer after them). Activations between the two are whole.
_JOINT = [("input_linear", "output_linear")]  # Granite 4


def block_styles(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return {layer's name: transformers' name of its style} for the layers in `blocks`, {name: module}."""
    styles: dict[str, str] = {}
    for name, block in blocks.items():
        styles |= {f"{name}.{child}": style for child, style in _of_block(block).items()}
    return styles


def _of_block(block: nn.Module) -> dict[str, str]:
    linear = {name for name, child in block.named_children() if isinstance(child, (nn.Linear, AdaptedLinear))}
    for joint, last in _JOINT:
        if linear == {joint, last}:
            return {joint: "colwise_gather_output", last: "rowwise_split_input"}
    for first, last in _CUT:
        if linear == {*first, last}:
            return _cut(block, first, last)
    return {}


def _cut(block: nn.Module, first: frozenset[str], last: str) -> dict[str, str]:
    """Return {child: style} of a block; {} if it has parameters besides its linear layers and norms of its heads."""
    norms = {name: child for name, child in block.named_children() if name not in first and name != last}
    norms = {name: child for name, child in norms.items() if next(child.parameters(), None) is not None}
    width = getattr(block, "head_dim", None)
    if any(tuple(p.shape) != (width,) for child in norms.values() for p in child.parameters()):
        return {}
    if next(block.parameters(recurse=False), None) is not None:
        return {}
    return {
        **dict.fromkeys(sorted(first), "colwise"),
        **dict.fromkeys(norms, "replicated_with_grad_allreduce"),
        last: "rowwise",
    }
