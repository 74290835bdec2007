"""Boxes computed from a config alone, against what torch, Megatron-Core and vLLM make of the model.

All ranks of a layout are built one after another in this process, in torch's "fake" process group, which has any size and
whose collectives do nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline.models.sizes import QWEN3_5
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from launch.plan.refit_layouts import rank_layouts
from pipeline import models
from pipeline.boxes import Region
from pipeline.config import DTensorConfig, GenerationConfig, MegatronConfig, PolicyConfig, VLLMConfig
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.models.recorded_layout import restrict
from pipeline.refit.tables import LayoutTable
from pipeline.train.megatron import cpu  # noqa: F401 before Megatron-Core is imported
from pipeline.train.shards import local_box
from pipeline.train.train_backend import ModelRole
from tests.generate import families
from tests.models.cases import configs
from tests.problems import named, refused
from tests.train.megatron.layouts import Layout as Megatron
from tests.train.ranks import Layout as Cut

OTHERS = ("mistral", "gemma3")  # besides those of other tests
STATE_SPACE = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 16}
EXPERTS_ONLY = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_routed_experts": 4}
HYBRIDS = {  # changes of Nemotron-H's configuration
    "nemotron_h_groups": {**STATE_SPACE, "n_groups": 4, "hybrid_override_pattern": "M-*M"},
    "nemotron_h_one_group": {**STATE_SPACE, "n_groups": 1, "hybrid_override_pattern": "M-*M"},
    "nemotron_h_moe": {
        **STATE_SPACE,
        **EXPERTS_ONLY,
        "n_groups": 4,
        "num_experts_per_tok": 2,
        "moe_latent_size": 32,
        "hybrid_override_pattern": "ME*-E",
    },
}
DELTA_NETS = {  # changes of Qwen3.5's configuration
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
WITH_STATES = {  # {name: (configuration class, its fields)}
    **{name: ("NemotronH", changes) for name, changes in HYBRIDS.items()},
    "qwen3_5_text": ("Qwen3_5Text", {**DELTA_NETS, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**DELTA_NETS, **EXPERTS}),
}

Held = set[tuple[str, tuple[int, ...], tuple[int, ...]]]


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Meshes of equal layout are one to DTensor, so it would go on with those of a rank that is gone.
        _clear_sharding_prop_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("configs")
    for family, config in configs().items():
        config.save_pretrained(found / family)
    for family in (*OTHERS, "gpt_oss"):
        families.save_config(family, found / family)
    return found


def read(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def held(table: LayoutTable, shapes: dict[str, tuple[int, ...]]) -> Held:
    """Return a table's boxes without the empty ones. Raises AssertionError if one comes twice."""
    names, found = list(shapes), set()
    for tensor, offset, size in zip(table.tensor, table.offset.tolist(), table.size.tolist(), strict=True):
        dims = len(shapes[names[tensor]])
        assert offset[dims:] == [0] * (len(offset) - dims) and size[dims:] == [1] * (len(size) - dims)
        if all(size):
            box = (names[tensor], tuple(offset[:dims]), tuple(size[:dims]))
            assert box not in found
            found.add(box)
    return found


def boxes(regions: list[Region]) -> Held:
    return {(region.name, region.box.offset, region.box.size) for region in regions if region.box.numel}


# ---- FSDP2 and tensor parallelism


def fsdp_boxes(policy: PolicyConfig) -> Held:
    from pipeline.train.fsdp_mesh import Layout, Meshes
    from pipeline.train.fsdp_model import build

    layout = Layout.of(policy.dtensor_cfg, dist.get_world_size(), dist.get_rank())
    meshes = Meshes.of(layout, "cpu") if layout.ranks > 1 else None
    model = build(policy, torch.device("cpu"), meshes, seed=0, role=ModelRole())
    found = set()
    for name, tensor in model.hf.named_parameters():
        for piece in restrict(model.layout[name], local_box(tensor)):
            found.add((piece.name, piece.source.offset, piece.source.size))
    return found


DENSE = ("llama", "qwen2", "qwen3_tied")
SPARSE = ("qwen3_moe", "mixtral")
WITH_OTHERS = [*((family, Cut(3, 1)) for family in OTHERS), ("mistral", Cut(2, 2)), ("gemma3", Cut(2, 2))]
CUTS = [
    *((family, Cut(data, 1)) for family in (*DENSE, *SPARSE) for data in (1, 2, 3, 5)),
    *((family, Cut(data, 2)) for family in DENSE for data in (1, 2, 3)),
    ("qwen3_moe", Cut(1, 1, context=2)),
    *(("llama", cut) for cut in (Cut(1, 2, context=2), Cut(4, 2, replicas=2), Cut(2, 1, context=2, replicas=2))),
    *((family, Cut(data, 2)) for family in SPARSE for data in (1, 3)),
    *WITH_OTHERS,
    ("glm4", Cut(3, 2)),
    ("deepseek_v3", Cut(3, 1)),
    ("deepseek_v3", Cut(2, 2)),
    *((family, Cut(4, 1, expert=size)) for family in (*SPARSE, "deepseek_v3") for size in (2, 4)),
    *((family, Cut(3, 2, expert=2)) for family in (*SPARSE, "deepseek_v3")),
    ("mixtral", Cut(4, 1, context=2, replicas=2, expert=2)),
    *((family, Cut(3, 2)) for family in ("nemotron_h", "nemotron_h_moe", "qwen3_5_text", "qwen3_5_moe_text")),
    *((family, Cut(2, 2, sequence=True)) for family in ("nemotron_h_moe", "qwen3_5_text")),
]


QUICK = {  # one of each kind: uneven cuts, replicas, tied embeddings, experts whole and cut, latent attention, state spaces
    *((family, Cut(3, 1)) for family in ("llama", "mixtral")),
    ("qwen3_tied", Cut(2, 2)),
    ("llama", Cut(2, 1, context=2, replicas=2)),
    ("deepseek_v3", Cut(4, 1, expert=2)),
    ("qwen3_moe", Cut(4, 1, expert=4)),
    ("nemotron_h_moe", Cut(2, 2, sequence=True)),
    ("qwen3_5_text", Cut(2, 2, sequence=True)),
}
FSDP = [pytest.param(*cut, marks=[pytest.mark.full] * (cut not in QUICK), id=f"{cut[0]}-{cut[1]}") for cut in CUTS]


@pytest.mark.parametrize(("family", "layout"), FSDP)
def test_fsdp(family, layout, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    policy = PolicyConfig(
        model_name=str(folder / family),
        random_init=True,
        precision="float32",
        max_total_sequence_length=64,
        dtensor_cfg=layout.dtensor(enabled=True),
        generation=GenerationConfig(backend="transformers", temperature=1.0),
    )
    ours = rank_layouts(read(folder / family), policy, layout.ranks, 1)
    assert sorted(ours.train) == list(range(layout.ranks))
    for rank in range(layout.ranks):
        with rank_of(rank, layout.ranks):
            assert held(ours.train[rank], ours.shapes) == fsdp_boxes(policy), rank


def test_expert_parallel_ranks_hold_every_tensor_once(folder):
    """2 replicas x 8 ranks, experts 4: a rank has whole experts, and the ranks of a replica share no number."""
    sizes = {"expert_parallel_size": 4, "data_parallel_replicate_size": 2}
    policy = PolicyConfig(
        model_name=str(folder / "qwen3_moe"),
        dtensor_cfg=DTensorConfig(enabled=True, **sizes),
        generation=GenerationConfig(backend="transformers", temperature=1.0),
    )
    ours = rank_layouts(read(folder / "qwen3_moe"), policy, 16, 1)
    assert all(held(ours.train[rank], ours.shapes) == held(ours.train[rank + 8], ours.shapes) for rank in range(8))
    counts = dict.fromkeys(ours.shapes, 0)
    for rank in range(8):
        for name, _, size in held(ours.train[rank], ours.shapes):
            counts[name] += math.prod(size)
            if ".experts." in name:
                assert size == tuple(ours.shapes[name])
    assert counts == {name: math.prod(shape) for name, shape in ours.shapes.items()}


# ---- Megatron-Core


def megatron_boxes(policy: PolicyConfig) -> Held:
    from megatron.core import parallel_state

    from pipeline.train.megatron.groups import initialize
    from pipeline.train.megatron.local_tensors import local_tensors
    from pipeline.train.megatron.model import build

    config = AutoConfig.from_pretrained(policy.model_name)
    initialize(policy, seed=0)
    try:
        shapes, _ = checkpoint_shapes(config)
        local = local_tensors(build(policy, config), models.family(config.model_type).parameters(config), shapes)
    finally:
        parallel_state.destroy_model_parallel()
    return {(piece.name, piece.source.offset, piece.source.size) for tensor in local.values() for piece in tensor.hugging_face}


MEGATRON = [
    Megatron(pp=2),
    Megatron(tp=2, ep=2, dp=2, sp=True),
]
OTHERS_AND_OF_MORE_RANKS = [
    Megatron(),
    Megatron(tp=2, sp=True),
    Megatron(cp=2),
    Megatron(ep=2, dp=2),
    Megatron(dp=2, tp=2, pp=2, sp=True),
    Megatron(tp=2, cp=2, pp=2, sp=True),
    Megatron(ep=2, dp=4, pp=2),
    Megatron(tp=2, ep=2, etp=2, dp=2, pp=2, sp=True),
    Megatron(tp=4, ep=4, cp=2, sp=True),
]


def check_megatron(model: Path, layout: Megatron, megatron: MegatronConfig) -> None:
    policy = PolicyConfig(
        model_name=str(model),
        precision="float32",
        megatron_cfg=megatron,
        generation=GenerationConfig(backend="transformers", temperature=1.0),
    )
    ours = rank_layouts(read(model), policy, layout.ranks, 1)
    distinct = {}
    for rank in range(layout.ranks):
        with rank_of(rank, layout.ranks):
            theirs = megatron_boxes(policy)
        assert held(ours.train[rank], ours.shapes) == theirs, rank
        distinct.setdefault(frozenset(theirs), set()).add(id(ours.train[rank]))
    assert all(len(tables) == 1 for tables in distinct.values())  # equal ranks share a table


@pytest.mark.parametrize(
    "layout",
    [*MEGATRON, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS_AND_OF_MORE_RANKS)],
    ids=lambda layout: layout.name,
)
def test_megatron(layout, folder):
    for family in layout.families:
        if layout.pp > 1 and configs()[family].num_hidden_layers % layout.pp:
            continue
        if family == "gpt_oss" and (layout.etp or 1) > 1:  # refused: its experts have biases
            continue
        if family.startswith(("qwen3_5", "nemotron_h")) and layout.tp > 2:  # refused: their mixers have two groups of heads
            continue
        check_megatron(folder / family, layout, layout.megatron())


@pytest.mark.parametrize(
    ("first", "last"), [*(pytest.param(*pair, marks=pytest.mark.full) for pair in ((1, None), (None, 2))), (2, 1)]
)
def test_megatron_stages_of_unequal_size(first, last, folder):
    layout = Megatron(pp=2, ep=2, dp=2)
    changes = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    check_megatron(folder / "deepseek_v3", layout, layout.megatron(**changes))


# ---- vLLM


def vllm_boxes(model: Path, rank: int, vllm: VLLMConfig) -> dict[str, Held]:
    """Return vLLM's boxes by unit."""
    from vllm.model_executor.models import utils

    from pipeline.generate.vllm_layout import record

    utils._model_to_pp_missing_layer_names.clear()  # kept by id, which a model that is gone may have had
    shapes, _ = checkpoint_shapes(AutoConfig.from_pretrained(model))
    experts = vllm.expert_parallel_size > 1
    with families.rank_model(model, rank, vllm.tensor_parallel_size, vllm.pipeline_parallel_size, experts) as built:
        units = record(built, shapes, torch.float32, complete=True)
    return {name: boxes(unit.unit.regions) for name, unit in units.items()}


def units(table: LayoutTable, shapes: dict[str, tuple[int, ...]]) -> dict[str, Held]:
    found = {}
    for i, name in enumerate(table.units):
        mine = table.unit == i
        found[name] = held(LayoutTable(table.tensor[mine], table.offset[mine], table.size[mine], table.unit[mine]), shapes)
    return found


DENSE_HYBRIDS = ("nemotron_h_groups", "nemotron_h_one_group")


def experts_without_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM build experts without gates, whose kernels its CPU platform lacks; loading needs none."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    described = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_cpu=lambda: True)
    chosen = UnquantizedMoeBackend.TRITON, None
    monkeypatch.setattr(config, "current_platform", described)
    monkeypatch.setattr(unquantized_fused_moe_method, "select_unquantized_moe_backend", lambda *_, **__: chosen)


ENGINES = (VLLMConfig(), VLLMConfig(2), VLLMConfig(4), VLLMConfig(2, 2), VLLMConfig(2, 1, 2), VLLMConfig(4, 1, 4))


@pytest.mark.parametrize(
    "vllm", ENGINES, ids=lambda v: f"tp{v.tensor_parallel_size}pp{v.pipeline_parallel_size}ep{v.expert_parallel_size}"
)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[pytest.mark.full] * (each not in ("qwen3_tied", "mixtral", "deepseek_v3", "gemma3")))
        for each in (*families.SHORT, *OTHERS, "gpt_oss", *WITH_STATES)
    ],
)
def test_vllm(family, vllm, tmp_path, monkeypatch):
    if family in QWEN3_5:
        pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 imports it, for images")
    if family in WITH_STATES:
        monkeypatch.setitem(families.FAMILIES, family, WITH_STATES[family])
        experts_without_gates(monkeypatch)
    families.save_config(family, tmp_path)
    config = read(tmp_path)
    if vllm.expert_parallel_size > 1 and ("num_experts_per_tok" not in config or family in DENSE_HYBRIDS):
        pytest.skip("a dense model has no experts")
    if family == "gpt_oss" and vllm.tensor_parallel_size > config["num_key_value_heads"]:
        pytest.skip("vLLM's gpt-oss has no ranks without a head of keys")
    policy = PolicyConfig(
        model_name=str(tmp_path),
        generation=GenerationConfig(temperature=1.0, vllm_cfg=vllm),
    )
    size = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    ours = rank_layouts(config, policy, 1, 2 * size)
    assert ours.engines == [list(range(1, 1 + size)), list(range(1 + size, 1 + 2 * size))]
    for place in range(size):
        assert ours.generate[ours.engines[0][place]] is ours.generate[ours.engines[1][place]]
        assert units(ours.generate[1 + place], ours.shapes) == vllm_boxes(tmp_path, place, vllm), place


def test_state_spaces_that_vllm_cannot_cut_are_refused():
    config = (
        families.SHAPE | HYBRIDS["nemotron_h_groups"] | {"model_type": "nemotron_h", "vocab_size": 192, "mamba_head_dim": 24}
    )
    policy = PolicyConfig(generation=GenerationConfig(temperature=1.0, vllm_cfg=VLLMConfig(3)))
    config["mamba_num_heads"] = 12  # three ranks divide heads, but not groups
    with refused(("policy.generation.vllm_cfg.tensor_parallel_size", "not-divisible")) as error:
        rank_layouts(config | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 3), policy, 1, 3)
    assert "n_groups=4" in str(error.value)


MODEL, SIZES = "policy.model_name", ("num_hidden_layers", "hidden_size", "intermediate_size")


@pytest.mark.parametrize(
    ("config", "train", "sections", "key", "code", "names"),
    [
        ({"model_type": "bloom"}, 1, {}, MODEL, "unsupported", "expected one of llama"),
        ({"model_type": "llama"} | dict.fromkeys(SIZES, 8), 1, {}, MODEL, "bad-format", "vocab_size"),
        (
            "llama",
            2,
            {"dtensor_cfg": DTensorConfig(expert_parallel_size=2)},
            "policy.dtensor_cfg.expert_parallel_size",
            "too-large",
            "no experts",
        ),
        (
            "llama",
            3,
            {"megatron_cfg": MegatronConfig(enabled=True, tensor_model_parallel_size=3)},
            "policy.megatron_cfg.tensor_model_parallel_size",
            "not-divisible",
            "linear_qkv",
        ),
    ],
)
def test_an_undescribed_model_is_refused(config, train, sections, key, code, names, folder):
    policy = PolicyConfig(generation=GenerationConfig(temperature=1.0), **sections)
    with pytest.raises(ValueError, match=f"^{key}: .*{names}") as error:
        rank_layouts(read(folder / config) if isinstance(config, str) else config, policy, train, 1)
    assert not code or named(error.value.problems) == {(key, code)}


def test_a_tensor_unknown_to_the_family_is_refused(folder):
    policy = PolicyConfig(megatron_cfg=MegatronConfig(enabled=True), generation=GenerationConfig(temperature=1.0))
    with refused((MODEL, "unsupported")):
        rank_layouts({**read(folder / "llama"), "attention_bias": True}, policy, 1, 1)
