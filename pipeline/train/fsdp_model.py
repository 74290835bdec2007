"""The model of the FSDP2 backend: a Hugging Face model for packed tokens, built in shards.

The model is built on the meta device, cut by tensor parallelism and `fully_shard`, and then allocated. Each rank reads its own
boxes of the checkpoint, so no rank ever holds the whole model, except for random weights, which are drawn whole on the CPU. The
model is always in evaluation mode: with dropout, its log-probs would differ from those that the engine sampled with.

Models that need more than this are rejected when they are built: heads that compute more than f(hidden @ W^T),
checkpoints with other names than the model's, buffers that cannot be recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.boxes import Piece
from pipeline.config import PolicyConfig
from pipeline.models.backend_support import check_attention, check_indexer
from pipeline.models.family import SCORE
from pipeline.models.frozen_names import freeze
from pipeline.models.hugging_face import language_model, layout, meta_model, model_config, other_modalities
from pipeline.models.precision import served_dtype
from pipeline.models.recorded_layout import copy_pieces, restrict
from pipeline.train import compiled, expert_parallel, lora, tensor_parallel
from pipeline.train.context_parallel import GatherContextParallel, LocalBatch
from pipeline.train.fsdp_mesh import Meshes
from pipeline.train.heads import OutputHead
from pipeline.train.indexers import replace_indexers
from pipeline.train.initial_weights import ReadBox, initial_weights
from pipeline.train.kernels import use_kernels
from pipeline.train.logprobs import VocabularyShard
from pipeline.train.lora import Adapters
from pipeline.train.model_checks import check_model, derive_buffers, freeze_buffers
from pipeline.train.optimizer_trial import stand_ins, try_optimizer
from pipeline.train.packed_attention import NAME
from pipeline.train.recompute import recompute
from pipeline.train.routers import Routers
from pipeline.train.sequence_resets import TensorRanks, decoder_layers, reset_sequences
from pipeline.train.shards import local, local_box
from pipeline.train.train_backend import ModelRole
from pipeline.types import Outputs


class PackedModel(nn.Module):
    """A Hugging Face model that maps this rank's part of a batch to the Outputs of the whole batch.

    The Outputs have the fields that the model's role needs.
    """

    def __init__(self, hf: PreTrainedModel, head: OutputHead):
        super().__init__()
        self.hf = hf
        self.head = head
        self.partial: dict[str, dist.ProcessGroup] = {}  # parameters of which each rank of the group has a partial gradient
        self.shard: VocabularyShard | None = None
        self.tensor_ranks: TensorRanks | None = None  # None: one
        self.layout: dict[str, list[Piece]] = {}  # for each parameter of `hf`: its pieces of tensors on disk
        self.shares_prompts = True  # whether attention alone mixes the tokens of a sequence
        self.compiled = False  # whether layers are compiled at the first call
        self.adapters: Adapters | None = None  # their parameters exist only in our checkpoints
        self.routers: Routers | None = None  # None: nothing observes them

    def forward(self, batch: LocalBatch, top_k: int = 0, truncated: bool = True) -> Outputs:
        """Return outputs of the whole batch. top_k: see `packed_outputs`. truncated: False to ignore the head's truncation."""
        with self.routers.forward(batch) if self.routers else contextlib.nullcontext():
            # With use_cache, transformers would ignore that positions restart.
            hidden = language_model(self.hf)(
                input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, packing=batch.packing
            ).last_hidden_state[0]
        if self.tensor_ranks is not None and self.tensor_ranks.sequence:
            hidden = GatherContextParallel.apply(hidden, self.tensor_ranks.group)
        head = self.head if truncated else self.head.untruncated()
        if head.role.head == "values":
            return head.outputs(hidden, self.hf.get_parameter(SCORE), batch, None, top_k)
        layer = self.hf.get_output_embeddings()
        assert layer is not None  # `check_model` requires one
        weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (layer.get_parameter("weight"), layer.bias))
        if bias is not None:  # a column of weights of a hidden unit that is always 1
            weight = torch.cat([weight, bias[:, None]], 1)
            hidden = F.pad(hidden, (0, 1), value=1.0)
        return head.outputs(hidden, weight, batch, self.shard, top_k)


def build(
    policy: PolicyConfig,
    device: torch.device,
    meshes: Meshes | None,
    seed: int,
    role: ModelRole,
    like: PackedModel | None = None,
) -> PackedModel:
    """Return the model with its initial weights, cut over `meshes` (None: one rank, whole).

    device: meta returns the model without memory, to describe its layout.
    like: the same model with the same cut, whose current weights are copied instead of reading them from disk. Trained weights
    are float32; other weights, such as frozen weights and the base weights of adapters, are in policy.precision. Raises
    RecipeError if the model, the layout or the optimizer is not supported.
    """
    config = model_config(policy, role.head)
    adapted = role.trained and policy.dtensor_cfg.lora_cfg.enabled
    trains = role.trained or like is not None  # so that compiled layers have the same graphs as those of `like`
    model = _described(policy, config, role, adapted, trains)
    hf = model.hf
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    tied = {n: names[id(p)] for n, p in hf.named_parameters(remove_duplicate=False) if names[id(p)] != n}

    if adapted:
        model.adapters = lora.inject(hf, policy.dtensor_cfg.lora_cfg, model.layout)
    offload = (policy.dtensor_cfg.cpu_offload or role.offload) and device.type != "cpu"
    if meshes is not None and meshes.tensor.size() > 1:
        _parallelize(model, meshes.tensor, role, policy.dtensor_cfg.sequence_parallel)
    experts = [] if meshes is None else _distribute_experts(model, meshes, policy.dtensor_cfg.sequence_parallel)
    if role.trained and (policy.router_replay.enabled or policy.moe_aux_loss_coeff):
        model.routers = _routers(model, policy.moe_aux_loss_coeff, meshes)
    layers = decoder_layers(hf)
    use_kernels(policy, hf, device)
    resets = reset_sequences(language_model(hf), layers, model.tensor_ranks)
    model.shares_prompts = not resets and not (model.adapters is not None and model.adapters.spec.dropout > 0)
    mixture = resets or any(parameter.dim() > 2 for parameter in language_model(hf).parameters())
    model.compiled = like.compiled if like is not None else compiled.should_compile(policy, device, mixture)
    if model.compiled:
        compiled.compile_layers(layers, policy.deterministic or device.type == "cpu")
    if policy.dtensor_cfg.activation_checkpointing:
        draws = model.adapters is not None and model.adapters.spec.dropout > 0
        recompute(layers, policy.dtensor_cfg.recompute_granularity or "full", draws)
    unsharded = [] if meshes is None else _shard(model, layers, experts, meshes, policy.precision, offload)
    if device.type == "meta":
        return model
    storage = torch.device("cpu") if offload else device
    if role.trained:
        trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
        try_optimizer(policy.optimizer, stand_ins(trained, storage), device)
    source = like if like is not None else initial_weights(policy, config, seed, role.head)
    allocate(model, storage, device, unsharded)
    for alias, name in tied.items():  # to_empty allocated separate memory for each name
        module, _, parameter = alias.rpartition(".")
        setattr(hf.get_submodule(module), parameter, hf.get_parameter(name))
    derive_buffers(hf, device)
    _load(model, source, seed)
    return model


def _described(policy: PolicyConfig, config: PreTrainedConfig, role: ModelRole, adapted: bool, trains: bool) -> PackedModel:
    """Return the model on the meta device, whole, with the parameters that train. Raises RecipeError if it is not supported."""
    check_attention(config.get_text_config())
    check_indexer(config.get_text_config(), policy.max_total_sequence_length)
    precision = torch.float32 if role.trained and not adapted else getattr(torch, policy.precision)
    hf = meta_model(config, role.head, dtype=precision, attn_implementation=NAME).eval()
    function = check_model(hf, role)
    # transformers gives the padding token's embeddings no gradient. Here nothing is padded, so this token was sampled.
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    hf.requires_grad_(trains)
    replace_indexers(hf)
    freeze_buffers(hf)
    model = PackedModel(hf, OutputHead.of(policy, role, function))
    model.layout = layout(hf)
    if trains:
        _freeze(hf, model.layout, policy)
    return model


def _freeze(hf: PreTrainedModel, pieces: Mapping[str, list[Piece]], policy: PolicyConfig) -> None:
    """Freeze the parameters that policy.freeze_parameters names, and those for pictures and sound.

    They are converted to the precision in which they are served.
    """
    unused = [hf.get_parameter(name).requires_grad_(False) for name in other_modalities(hf)]
    trained = {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}
    sources = {name: [piece.name for piece in pieces[name]] for name in trained}
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    chosen = freeze(
        policy.freeze_parameters, [(trained[name], names_on_disk) for name, names_on_disk in sources.items()], sources
    )
    for parameter in (*unused, *chosen):
        parameter.data = parameter.data.to(served_dtype(names[id(parameter)], getattr(torch, policy.precision)))


def _load(model: PackedModel, source: PackedModel | ReadBox, seed: int) -> None:
    """Copy this rank's part of the weights from another model with the same cut, or from a reader; initialize adapters."""
    parameters = dict(model.hf.named_parameters())
    model.layout = {name: model.layout[name] for name in parameters if name in model.layout}
    for name, pieces in model.layout.items():
        if isinstance(source, PackedModel):
            local(parameters[name]).copy_(local(source.hf.get_parameter(name)))
        else:
            copy_pieces(local(parameters[name]), restrict(pieces, local_box(parameters[name])), source)
    if model.adapters:
        model.adapters.initialize(parameters, seed)


def _parallelize(model: PackedModel, mesh: DeviceMesh, role: ModelRole, sequence: bool) -> None:
    """Cut the model over the 1-d mesh of tensor-parallel ranks."""
    model.tensor_ranks = TensorRanks(mesh.get_group(), sequence)
    partial = [
        name for name in tensor_parallel.parallelize(model.hf, mesh, sequence) if model.hf.get_parameter(name).requires_grad
    ]
    model.partial = dict.fromkeys(partial, mesh.get_group())
    if role.head == "logprobs":
        model.shard = tensor_parallel.vocabulary_shard(model.hf, mesh)


def _distribute_experts(model: PackedModel, meshes: Meshes, sequence: bool) -> list[nn.Module]:
    """With expert or tensor parallelism, cut the experts separately from other weights, and return their modules.

    Otherwise return []: `fully_shard` cuts the experts like other weights. sequence: whether tokens are already split over the
    tensor-parallel ranks.
    """
    modules = expert_parallel.expert_modules(model.hf)
    if meshes.expert.size() == 1 and (meshes.tensor.size() == 1 or not modules):
        return []
    experts = tuple(f"{name}." for name in modules)  # `fully_shard` sums their gradients over all ranks
    model.partial = {name: group for name, group in model.partial.items() if not name.startswith(experts)}
    shared = meshes.tensor.size() > 1 and not sequence
    return expert_parallel.distribute(model.hf, meshes.expert, meshes.tensor.get_group() if shared else None)


def _routers(model: PackedModel, coefficient: float, meshes: Meshes | None) -> Routers:
    """Return the model's routers. coefficient: of the load-balancing loss."""
    shared = [meshes.context] if meshes is not None and meshes.context is not None else []
    if (ranks := model.tensor_ranks) is None:
        return Routers(model.hf, coefficient, shared)
    if ranks.sequence:
        return Routers(model.hf, coefficient, shared, split=ranks.group)
    return Routers(model.hf, coefficient, shared, counts=ranks.group.rank() == 0)


def _shard(
    model: PackedModel, layers: list[nn.Module], experts: list[nn.Module], meshes: Meshes, precision: str, offload: bool
) -> list[str]:
    """Apply `fully_shard` to experts, layers and the rest. Returns the names of the parameters that it leaves out.

    experts: the modules of experts that are cut over a mesh of their own.
    """
    compute = getattr(torch, precision)
    dtypes = {"param_dtype": compute if compute != torch.float32 else None, "reduce_dtype": torch.float32}
    options = {
        "mesh": meshes.data,
        "mp_policy": MixedPrecisionPolicy(**dtypes),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    # `fully_shard` would round them to the precision of the weights.
    ignored = {name: p for name, p in model.named_parameters() if served_dtype(name, compute) != compute}
    options["ignored_params"] = set(ignored.values())
    # A router may give float32 weights, which must stay so.
    uncast = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for module in experts:
        fully_shard(module, **{**options, "mesh": meshes.expert_data, "mp_policy": uncast})
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are already divided by the global count, so gradients are summed; fully_shard would average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return list(ignored)


def allocate(model: nn.Module, storage: torch.device, device: torch.device, unsharded: Sequence[str]) -> None:
    """Allocate memory for the weights of a model that is on the meta device.

    storage: where weights are kept, from which `fully_shard` moves them to `device` for computation. unsharded: the names of
    parameters that `fully_shard` does not move, which are allocated on `device`.
    """
    model.to_empty(device=storage)
    for name in unsharded if storage != device else ():
        module, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        moved = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        model.get_submodule(module).register_parameter(leaf, moved)
