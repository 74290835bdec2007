"""What one process records for all ranks, against what each rank describes, for small models of several families."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config

from launch.plan.backend_choice import choose
from launch.recipes.model_files import KNOWN
from pipeline import config
from pipeline.boxes import Region
from pipeline.generate.vllm_layout import record
from pipeline.generate.vllm_rank import record_rank
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.models.recorded_layout import restrict
from pipeline.refit.recorded_sides import RecordedSides, _describable, _rank_of, record_sides
from pipeline.refit.tables import LayoutTable
from pipeline.train.shards import local_box
from pipeline.train.train_backend import ModelRole
from tests.generate import families
from tests.models.cases import configs
from tests.train import multimodal

Held = set[tuple[str, tuple[int, ...], tuple[int, ...]]]
FSDP, MEGATRON, VLLM = "policy.dtensor_cfg", "policy.megatron_cfg", "policy.generation.vllm_cfg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs")
    for family, model in configs().items():
        model.save_pretrained(path / family)
    multimodal.config(configs()["qwen3_5_moe_text"]).save_pretrained(path / "qwen3_5_moe")
    return path


def recipe(model: Path, train: int, *keys: str, generate: int = 1) -> config.Recipe:
    ranks = (f"cluster.train.ranks_per_node={train}", f"cluster.generate.ranks_per_node={generate}")
    fixed = (f"policy.model_name={model}", "policy.random_init=true", "policy.max_total_sequence_length=64")
    return choose(config.load("tiny_grpo", [*fixed, "needs=[]", f"{VLLM}.max_model_len=64", *ranks, *keys]))[0]


def held(table: LayoutTable, shapes: dict[str, tuple[int, ...]]) -> Held:
    """Return a table's boxes without the empty ones. Raises AssertionError if one comes twice."""
    names, boxes = list(shapes), set()
    for tensor, offset, size in zip(table.tensor, table.offset.tolist(), table.size.tolist(), strict=True):
        dims = len(shapes[names[tensor]])
        if all(size):
            box = (names[tensor], tuple(offset[:dims]), tuple(size[:dims]))
            assert box not in boxes
            boxes.add(box)
    return boxes


def check_train_ranks_hold_everything(sides: RecordedSides) -> None:
    """Check that the distinct boxes of the train ranks have every entry once."""
    entries = dict.fromkeys(sides.shapes, 0)
    for name, _, size in set().union(*(held(table, sides.shapes) for table in sides.train.values())):
        entries[name] += math.prod(size)
    assert entries == {name: math.prod(shape) for name, shape in sides.shapes.items()}


# uneven cuts, replicas, tied embeddings, experts whole and cut, latent attention, state spaces
CUTS = [
    ("llama", 3, []),
    ("qwen3_tied", 4, [f"{FSDP}.tensor_parallel_size=2"]),
    ("llama", 4, [f"{FSDP}.context_parallel_size=2", f"{FSDP}.data_parallel_replicate_size=2"]),
    ("deepseek_v3", 4, [f"{FSDP}.expert_parallel_size=2"]),
    ("qwen3_moe", 6, [f"{FSDP}.tensor_parallel_size=2", f"{FSDP}.expert_parallel_size=2"]),
]


@pytest.mark.parametrize(("family", "ranks", "keys"), CUTS, ids=lambda value: str(value) if not isinstance(value, list) else "")
def test_ranks_of_fsdp_hold_what_their_own_models_say(family, ranks, keys, folder):
    from pipeline.train.fsdp_mesh import Layout, Meshes
    from pipeline.train.fsdp_model import build

    planned = recipe(folder / family, ranks, f"{FSDP}.enabled=true", "policy.generation.backend=transformers", *keys)
    sides = record_sides(planned)
    policy = planned.policy
    for rank in range(ranks):
        with _rank_of(rank, ranks):
            meshes = Meshes.of(Layout.of(policy.dtensor_cfg, ranks, rank), "cpu")
            model = build(policy, torch.device("meta"), meshes, 0, ModelRole())
            pieces = [
                p for name, tensor in model.hf.named_parameters() for p in restrict(model.layout[name], local_box(tensor))
            ]
        assert held(sides.train[rank], sides.shapes) == {
            (piece.name, piece.source.offset, piece.source.size) for piece in pieces
        }, rank
    check_train_ranks_hold_everything(sides)


@pytest.mark.parametrize(
    ("family", "keys", "tables"),
    [
        ("llama", ["pipeline_model_parallel_size=2", "tensor_model_parallel_size=2"], 4),
        ("qwen3_moe", ["expert_model_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true"], 2),
        ("deepseek_v3", ["pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=1"], 2),
        ("qwen3_5_moe", ["pipeline_model_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true"], 4),
    ],
)
def test_ranks_of_megatron_hold_every_entry_once(family, keys, tables, folder):
    """Data-parallel ranks share a table, and tensor, pipeline and expert ranks do not."""
    settings = [f"{MEGATRON}.{key}" for key in ("enabled=true", *keys)]
    sides = record_sides(recipe(folder / family, 8, "policy.generation.backend=transformers", *settings))
    assert len(sides.train) == 8 and len({id(table) for table in sides.train.values()}) == tables
    check_train_ranks_hold_everything(sides)


def boxes(regions: Iterable[Region]) -> Held:
    return {(region.name, region.box.offset, region.box.size) for region in regions}


@pytest.mark.parametrize("keys", [("tensor_parallel_size=2", "expert_parallel_size=2"), ("pipeline_parallel_size=2",)])
def test_ranks_of_an_engine_receive_what_their_loaders_record_in_memory(keys, folder):
    families.save_config("qwen3_moe", folder / "engine")
    sides = record_sides(recipe(folder / "engine", 1, *(f"{VLLM}.{key}" for key in keys), generate=4))
    assert sides.engines == [[1, 2], [3, 4]] and sides.generate[1] is sides.generate[3]
    sizes = {"tensor": 2, "experts": True} if len(keys) == 2 else {"stages": 2}
    for rank in range(2):
        with families.rank_model(folder / "engine", rank, **sizes) as model:
            units = record(model, sides.shapes, torch.float32, complete=True)
        table = sides.generate[1 + rank]
        assert held(table, sides.shapes) == set().union(*(boxes(unit.unit.regions) for unit in units.values()))
        assert set(table.units) == {name for name, unit in units.items() if unit.unit.regions}


DESCRIBED = {  # those with a config.json of their own
    str(path.relative_to(KNOWN).with_suffix("")): text
    for path in sorted(KNOWN.glob("*/*.json"))
    if "like" not in (text := json.loads(path.read_text()))
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_vllm_loads_the_tensors_of_each_model_in_recipes(name, tmp_path, monkeypatch):
    """A description lacks no key on which vLLM's parameters depend. Of each model, some layers of each kind."""
    described = {key: value for key, value in DESCRIBED[name].items() if key != "quantization_config"}
    text = described.get("text_config", described)
    if any(kind.endswith("ForConditionalGeneration") for kind in described["architectures"]):
        pytest.importorskip("torchvision")  # of the encoders of images
    if "E" in text.get("hybrid_override_pattern", "") and not torch.cuda.is_available():
        pytest.skip("vLLM has no experts without gates on CPUs")
    if "index_topk" in text and not torch.cuda.is_available():
        pytest.skip("vLLM has no sparse attention on CPUs")
    layers = 8 if "hybrid_override_pattern" in text else 4
    text["num_hidden_layers"] = layers
    text |= {key: text[key][:layers] for key in ("hybrid_override_pattern", "layer_types") if key in text}
    (tmp_path / "config.json").write_text(json.dumps(described))
    if described["model_type"] == "kimi_k2":  # vLLM renames the class of its configuration
        monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    policy = _describable(recipe(tmp_path, 1, "policy.precision=bfloat16").policy)
    shapes, _ = checkpoint_shapes(model_config(policy))
    units = record_rank(policy, shapes, 0, 1)
    text = shapes.keys() - multimodal.of_pictures(shapes) - {"lm_head.weight"}
    assert {region.name for unit in units for region in unit.regions} >= text
