"""Convert a tiny checkpoint of every family from Hugging Face to Megatron and back, and check unsupported configurations."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from pipeline.boxes import whole
from pipeline.models import family
from pipeline.models.family import VALUE_HEAD
from pipeline.models.hugging_face import SCORE
from pipeline.models.recorded_layout import copy_pieces, cut_after, invert, record, record_all
from tests.models.cases import FAMILIES, configs
from tests.problems import refused

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.fixture(params=FAMILIES)
def case(request, families_folder):
    """Return (config, {name on disk: tensor})."""
    return configs()[request.param], load_file(families_folder / request.param / "model.safetensors")


def reader(tensors):
    return lambda name, box: tensors[name][box.within(whole(tuple(tensors[name].shape)))]


def padded(function, rows, *sources):
    tensor = function(*sources)
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def layouts_and_tensors(config, disk, rank, size):
    """Return ({name: pieces}, {name: tensor}) of one rank's parts: the functions' tensors equal those placed by the pieces."""
    layouts, tensors = {}, {}
    for name, parameter in family(config.model_type).parameters(config).items():
        function = parameter.function
        if name in PADDED:
            function = partial(padded, function, -(-config.vocab_size // size) * size)
        function = cut_after(function, parameter.split, rank, size)
        sources = [disk[source] for source in parameter.sources]
        shape, layouts[name] = record(function, [(n, tuple(t.shape)) for n, t in zip(parameter.sources, sources, strict=True)])
        tensors[name] = torch.zeros(shape, dtype=sources[0].dtype)
        copy_pieces(tensors[name], layouts[name], reader(disk))
        assert torch.equal(tensors[name], function(*sources)), name
    return layouts, tensors


@pytest.mark.parametrize("size", [1, 2])
def test_a_round_trip_is_bitwise(case, size):
    config, disk = case
    parameters = family(config.model_type).parameters(config)
    layouts, tensors = {}, {}
    for rank in range(size):
        for kind, found in zip((layouts, tensors), layouts_and_tensors(config, disk, rank, size), strict=True):
            # What is not cut is whole on every rank: the first one's will do.
            kind |= {f"{name}@{rank}": value for name, value in found.items() if rank == 0 or parameters[name].split != "none"}
    inverse = invert(layouts)
    assert inverse.keys() == disk.keys()
    for name, original in disk.items():
        back, covered = torch.full_like(original, torch.nan), torch.zeros(original.shape)
        copy_pieces(back, inverse[name], reader(tensors))
        for piece in inverse[name]:
            covered[piece.target.within(whole(tuple(original.shape)))] += 1
        assert torch.equal(back, original), name
        assert (covered == 1).all(), name


def test_a_value_model_has_a_value_head_in_place_of_the_vocabulary(case):
    config, _ = case
    causal, values = family(config.model_type).parameters(config), family(config.model_type).parameters(config, "values")
    assert values.keys() - causal.keys() == {VALUE_HEAD}
    assert causal.keys() - values.keys() == (set() if config.tie_word_embeddings else {"output_layer.weight"})
    assert values[VALUE_HEAD].sources == (SCORE,) and values[VALUE_HEAD].split == "none"


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_transformers_conversion_to_disk_is_recorded(name, families_folder):
    """Record what is in memory under transformers' names as pieces of the tensors on disk."""
    disk = load_file(families_folder / name / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(families_folder / name)
    memory = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    layouts = record_all(partial(revert_weight_conversion, model), {key: tuple(t.shape) for key, t in memory.items()})
    assert {key: shape for key, (shape, _) in layouts.items()} == {key: tuple(t.shape) for key, t in disk.items()}
    for key, (shape, pieces) in layouts.items():
        built = torch.full(shape, torch.nan)
        copy_pieces(built, pieces, reader(memory))
        assert torch.equal(built, disk[key]), key


def changed(name: str, changes: dict) -> PreTrainedConfig:
    config = configs()[name]
    return type(config)(**{**config.to_dict(), **changes})


REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE of type 'dynamic'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "without a layer that has experts"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("deepseek_v3", {"num_experts_per_tok": 3}, "topk_group=1"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "without"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"use_bias": True}, "use_bias=True"),
    ("nemotron_h_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("nemotron_h_moe", {"n_group": 2}, "n_group=2"),
    (
        "deepseek_v3",
        {"rope_parameters": {**configs()["deepseek_v3"].rope_parameters, "attention_factor": 1.0}},
        "attention_factor",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{name} {message}" for name, _, message in REFUSED])
def test_an_undescribed_configuration_is_refused(name, changes, message):
    family(configs()[name].model_type).transformer(configs()[name])
    config = changed(name, changes)
    with refused(("policy.model_name", "unsupported")) as error:
        family(config.model_type).transformer(config)
    assert message in str(error.value)


def test_an_unknown_family_is_refused():
    with refused(("policy.model_name", "unsupported")) as error:
        family("other")
    assert "'other'" in str(error.value) and "llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v3" in str(error.value)
