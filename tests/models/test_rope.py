"""One meaning of RoPE and its overrides for plans, trainers and engines: each consumer's own reading of the same files."""

import json

import pytest

from launch.recipes.model_files import planning_config
from pipeline.config import PolicyConfig
from pipeline.models import rope
from pipeline.models.hugging_face import config_of, engine_overrides, model_config
from tests.models.test_tensors import CASES, TINY
from tests.problems import named, refused

DEFAULT, LINEAR, YARN = {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
OLD = {"rope_theta": 5e5}
OLD_SCALED = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, **ORIGINAL}}
NEW = {"rope_parameters": {"rope_theta": 5e5, **DEFAULT}}
NEW_SCALED = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3, **ORIGINAL}}
THETA = {"rope_theta": 5e5}

MERGED = {  # what the file has, what the recipe gives, what the model computes
    "a card's scaling": (
        [OLD, NEW],
        {"rope_scaling": {**YARN, **ORIGINAL}},
        {**THETA, "rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    ),
    "linear as older cards spell it": ([OLD, NEW], {"rope_scaling": {"type": "linear", "factor": 2.0}}, {**THETA, **LINEAR}),
    "the newer spelling": ([OLD, NEW], {"rope_parameters": {**LINEAR}}, {**THETA, **LINEAR}),
    "another type than the file's": ([OLD_SCALED, NEW_SCALED], {"rope_scaling": LINEAR}, {**THETA, **LINEAR}),
    "only another factor": (
        [OLD_SCALED, NEW_SCALED],
        {"rope_scaling": {"factor": 32.0}},
        {**THETA, **LLAMA3, **ORIGINAL, "factor": 32.0},
    ),
    "theta alone": ([OLD, NEW], {"rope_theta": 1e6}, {"rope_theta": 1e6, **DEFAULT}),
    "theta alone, scaled": ([OLD_SCALED, NEW_SCALED], {"rope_theta": 7}, {**LLAMA3, **ORIGINAL, "rope_theta": 7}),
    "theta in the parameters": ([OLD, NEW], {"rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 1e6, **DEFAULT}),
    "no scaling": ([OLD_SCALED, NEW_SCALED], {"rope_scaling": None}, {**THETA, **DEFAULT}),
    "nothing": ([OLD_SCALED, NEW_SCALED], {"rope_parameters": {}}, {**THETA, **LLAMA3, **ORIGINAL}),
}
GRID = [
    pytest.param(file, given, right, marks=[pytest.mark.full] if i else [])
    for files, given, right in MERGED.values()
    for i, file in enumerate(files)
]


def write(folder, family: str, **more) -> PolicyConfig:
    base, changes = CASES.get(family, (family, {}))
    config = {"model_type": base, **TINY, "max_position_embeddings": 128, **changes, **more}
    for name, value in more.items():
        if value is None:
            del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    return PolicyConfig(model_name=str(folder))


def plan(policy: PolicyConfig) -> dict:
    described = planning_config(policy)
    assert described is not None
    return described


def readings(policy: PolicyConfig) -> list[dict]:
    """Return rope_parameters as the plan, both train backends, and an engine read them."""
    planned = config_of(plan(policy)).rope_parameters
    trained = model_config(policy)
    engine = model_config(PolicyConfig(model_name=policy.model_name))
    engine.update(engine_overrides(policy))  # as vLLM does
    return [planned, trained.rope_parameters, engine.rope_parameters]


@pytest.mark.parametrize(("file", "given", "right"), GRID)
def test_every_consumer_merges_an_override_alike(tmp_path, file, given, right):
    policy = write(tmp_path, "llama", **file)
    policy.hf_config_overrides = given
    assert readings(policy) == [right] * 3
    (found,) = rope.decide(json.loads((tmp_path / "config.json").read_text()), given)
    assert (found.kind, found.theta, found.factor) == (right["rope_type"], right["rope_theta"], right.get("factor"))
    assert found.original == right.get("original_max_position_embeddings")
    assert found.source == ", ".join(["config.json", *(f"hf_config_overrides.{name}" for name in given)])


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4", "qwen3_5_text"])
@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": {**YARN, **ORIGINAL}},
        pytest.param({"rope_theta": 123.0}, marks=pytest.mark.full),
        pytest.param({"rope_scaling": None}, marks=pytest.mark.full),
    ],
)
def test_families_keep_what_is_theirs(tmp_path, family, given):
    """Theta and the share of each head that is rotated come from the file or from the family's defaults."""
    policy = write(tmp_path, family)
    before = model_config(policy).rope_parameters
    policy.hf_config_overrides = given
    planned, *others = readings(policy)
    assert all({name: other[name] for name in planned} == planned for other in others)
    theta = given.get("rope_theta", before["rope_theta"])
    share = before.get("partial_rotary_factor")
    assert (planned["rope_theta"], planned.get("partial_rotary_factor")) == (theta, share)
    kind = "yarn" if given.get("rope_scaling") else before["rope_type"] if "rope_theta" in given else "default"
    assert planned["rope_type"] == kind


SLIDING = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize("file", ["old", "new"])
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"rope_scaling": LINEAR}, {"full_attention": {"rope_theta": 1e6, **LINEAR}, "sliding_attention": SLIDING}),
        ({"rope_theta": 5.0}, {"full_attention": {"rope_theta": 5.0, **DEFAULT}, "sliding_attention": SLIDING}),
        (
            {"rope_local_base_freq": 5.0},
            {"full_attention": {"rope_theta": 1e6, **DEFAULT}, "sliding_attention": {**SLIDING, "rope_theta": 5.0}},
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}},
            {"full_attention": {"rope_theta": 1e6, **DEFAULT}, "sliding_attention": {**SLIDING, "rope_theta": 7.0}},
        ),
    ],
)
def test_layers_with_their_own_rope(tmp_path, file, given, right):
    spelled = {
        "old": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        "new": {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **DEFAULT}, "sliding_attention": SLIDING}},
    }[file]
    policy = write(tmp_path, "gemma3_text", **spelled)
    policy.hf_config_overrides = given
    assert readings(policy) == [right] * 3
    found = {each.layers: each.theta for each in rope.decide(json.loads((tmp_path / "config.json").read_text()), given)}
    assert found == {layers: parameters["rope_theta"] for layers, parameters in right.items()}


def test_a_sub_configuration_is_merged(tmp_path):
    text = {"model_type": "gemma3_text", **TINY, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    given = {"text_config": {"rope_scaling": LINEAR, "num_hidden_layers": 1}}
    policy = PolicyConfig(model_name=str(tmp_path), hf_config_overrides=given)
    planned, trained = plan(policy), model_config(policy).get_text_config()
    right = {"full_attention": {"rope_theta": 1e6, **LINEAR}, "sliding_attention": SLIDING}
    assert config_of(planned).rope_parameters == trained.rope_parameters == right
    assert planned["num_hidden_layers"] == trained.num_hidden_layers == 1
    assert planned["hidden_size"] == trained.hidden_size == TINY["hidden_size"]
    engine = engine_overrides(policy)["text_config"]
    assert engine["rope_parameters"] == right and engine["num_hidden_layers"] == 1 and "hidden_size" not in engine


@pytest.mark.parametrize(
    ("given", "key", "code"),
    [
        ({"rope_scaling": 4}, "rope_scaling", "wrong-type"),
        ({"rope_scaling": LINEAR, "rope_parameters": YARN}, "rope_scaling", "contradiction"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta", "contradiction"),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq", "has-no-effect"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters", "unsupported"),
    ],
)
def test_overrides_that_mean_nothing_are_refused(tmp_path, given, key, code):
    policy = write(tmp_path, "llama")
    policy.hf_config_overrides = given
    for reading in (planning_config, model_config):
        with refused((f"policy.hf_config_overrides.{key}", code)):
            reading(policy)


@pytest.mark.parametrize("name", ["trust_remote_code", "code_revision", "revision", "local_files_only", "return_unused_kwargs"])
def test_overrides_do_not_choose_what_is_loaded(tmp_path, name):
    policy = write(tmp_path, "llama")
    policy.hf_config_overrides = {name: True}
    with refused(("policy.hf_config_overrides", "unknown-key")):
        model_config(policy)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"rope_scaling": {"type": "linear"}}, "missing-value"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "missing-value"),
        ({"rope_scaling": {"rope_type": "yarns", "factor": 2.0}}, "not-a-choice"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "wrong-type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "too-small"),
        ({"rope_scaling": "linear"}, "wrong-type"),
        ({"rope_theta": -1.0}, "wrong-type"),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 3.0}}, "contradiction"),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 1.0}}, None),
    ],
)
def test_what_transformers_would_not_compute_is_refused(config, code):
    assert named(rope.problems("k", {"model_type": "llama", **config})) == ({("k", code)} if code else set())
