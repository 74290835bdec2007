"""Compare recipes/models with the parameter counts on the models' pages."""

import json
from collections.abc import Iterator

import pytest
import yaml

from launch.recipes.model_files import KNOWN, planning_config, public_model_config
from pipeline.config import PolicyConfig, RecipeError
from pipeline.models.shape import ModelShape

NAMES = sorted(str(path.relative_to(KNOWN).with_suffix("")) for path in KNOWN.glob("*/*.json"))
STATED = {  # by the metadata of their safetensors files, but for copies of a tied embedding
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "allenai/Llama-3.1-Tulu-3-8B-SFT": 8_030_326_784,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "Qwen/Qwen3-0.6B": 751_632_384 - 151_936 * 1024,
    "Qwen/Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,  # the biases that balance the experts are no parameters
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "google/gemma-3-1b-it": 999_885_952,
    # Without the encoders of pictures and sound, and without a scalar for each layer, which is a buffer. The E2B's file has
    # keys and values for layers that share those of others.
    "google/gemma-4-E2B-it": 5_123_178_051 - 475_728_160 - 35 - 18_880_512,
    "google/gemma-4-26B-A4B-it": 25_805_936_206 - 572_794_416 - 30,
    "google/gemma-4-31B-it": 31_273_088_876 - 575_743_536 - 60,
    "Qwen/Qwen3.5-9B": 9_409_813_744 - 456_010_480,  # without the images' encoder
    "Qwen/Qwen3.5-35B-A3B": 35_951_822_704 - 446_571_248 - 844_640_768,  # and without the layer for multi-token prediction
    "Qwen/Qwen3.5-397B-A17B": 403_397_928_944 - 456_010_480 - 6_595_568_128,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": 12_310_001_152,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344,
}


def of_language_model(name: str) -> dict:
    return planning_config(PolicyConfig(model_name=name))


@pytest.mark.parametrize("name", STATED)
def test_the_count_is_the_stated_one(name):
    assert ModelShape.of(of_language_model(name)).parameters == STATED[name]


def test_a_derived_model_has_only_the_differing_keys():
    instruct, base = public_model_config("Qwen/Qwen2.5-7B-Instruct"), public_model_config("Qwen/Qwen2.5-7B")
    assert {key for key in base if instruct[key] != base[key]} == {"max_position_embeddings"}
    assert "like" not in instruct


def test_a_local_model_is_read_from_its_folder(tmp_path, monkeypatch):
    """A folder or the cache precedes recipes/models, and the recipe's overrides precede both."""
    name = "meta-llama/Llama-3.2-1B"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    policy = PolicyConfig(model_name=name, hf_config_overrides={"tie_word_embeddings": False})
    assert planning_config(policy) == {**public_model_config(name), "tie_word_embeddings": False}
    snapshot = tmp_path / "models--meta-llama--Llama-3.2-1B/snapshots/1"
    snapshot.mkdir(parents=True)
    local = {**public_model_config(name), "vocab_size": 7}
    (snapshot / "config.json").write_text(json.dumps(local))
    assert planning_config(policy) == {**public_model_config(name), "tie_word_embeddings": False}  # a revision that is not main
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("1")
    assert planning_config(policy) == {**local, "tie_word_embeddings": False}


def test_an_unknown_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError, match=r"teacher.model_name: 'nobody/nothing' is neither"):
        planning_config(PolicyConfig(model_name="nobody/nothing"), key="teacher.model_name")
    assert planning_config(PolicyConfig(model_name=str(tmp_path / "run/hf")), [tmp_path / "run"]) is None


def named(tree: object) -> Iterator[str]:
    """Return every model_name in a recipe's tree."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from [value] if key == "model_name" else named(value)


def test_every_public_model_of_a_recipe_is_known():
    recipes = KNOWN.parent.glob("*.yaml")
    names = {name for path in recipes for name in named(yaml.safe_load(path.read_text()))}
    public = {name for name in names if not name.startswith(("runs/", "${")) and name != "tiny"}
    assert len(public) >= 8
    assert public <= set(NAMES)
