"""What an engine is built with: overrides of config.json, compilation, its size, and the environment while it starts."""

import os
from pathlib import Path

import pytest
import torch._inductor.config
import vllm.envs
from vllm.config import ModelConfig
from vllm.model_executor.determinism.batch_invariant import override_envs_for_invariance
from vllm.platforms import current_platform

from pipeline.config import VLLMConfig, determinism
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.generate import vllm as subject
from pipeline.generate.vllm_launcher import launcher_environment
from pipeline.models.hugging_face import engine_overrides, model_config
from tests.models.test_rope import LINEAR, NEW, OLD_SCALED, ORIGINAL, YARN, write


@pytest.mark.parametrize(
    ("family", "file", "given"),
    [
        ("llama", NEW, {"rope_scaling": {**YARN, **ORIGINAL}, "max_position_embeddings": 64}),
        ("llama", OLD_SCALED, {"rope_theta": 7.0}),
        ("llama", OLD_SCALED, {"rope_scaling": None}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rope_scaling": LINEAR}),
    ],
)
def test_vllm_reads_overrides_as_the_trainers_do(tmp_path, family, file, given):
    kind = {"llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}[family]
    policy = write(tmp_path, family, **file, architectures=[kind])
    policy.hf_config_overrides = given
    trained = model_config(policy)
    engine = ModelConfig(model=policy.model_name, skip_tokenizer_init=True, hf_overrides=engine_overrides(policy)).hf_config
    assert engine.rope_parameters == trained.rope_parameters
    assert engine.max_position_embeddings == trained.max_position_embeddings


@pytest.mark.parametrize("given", [None, True, False])
def test_an_engine_on_cpus_compiles_only_where_the_recipe_says_so(tmp_path, given):
    policy = write(tmp_path, "llama")
    policy.generation.vllm_cfg = VLLMConfig(max_model_len=64, enforce_eager=given)
    arguments = subject._arguments(policy, model_config(policy), 1, 0, None)
    assert arguments["enforce_eager"] == (current_platform.is_cpu() if given is None else given)


def test_vllm_decides_how_many_sequences_run_at_once_where_the_recipe_does_not(tmp_path):
    """With the cache of a CPU's default, 256 for each rank."""
    policy, found = write(tmp_path, "llama"), {}
    policy.generation.vllm_cfg = VLLMConfig(max_model_len=64)
    for given in (None, 256, 7):
        policy.generation.max_num_seqs = given
        found[given] = subject._arguments(policy, model_config(policy), 1, 0, None)
        assert found[given]["max_num_seqs"] == given
    assert found[None] | {"max_num_seqs": 256} == found[256]
    assert found[7]["kv_cache_memory_bytes"] < found[256]["kv_cache_memory_bytes"]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_models_with_states_have_a_bound(tmp_path, family):
    """vLLM refuses more sequences than its cache has places for states."""
    policy = write(tmp_path, family)
    assert subject._max_num_seqs(policy, model_config(policy)) == MOST_SEQUENCES
    policy.generation.max_num_seqs = 7
    assert subject._max_num_seqs(policy, model_config(policy)) == 7


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_an_engine_tells_how_many_sequences_run_at_once(backend, new_engine):
    for given, expected in ((5, 5), (None, 256)):
        engine = new_engine(backend, "llama", max_num_seqs=given)
        assert engine.max_num_seqs == expected
        if backend == "vllm":
            engine.close()


def test_nccls_variables_of_an_engine_do_not_outlive_its_start(monkeypatch):
    """vLLM sets them for its own communicators; a later one with train ranks must have theirs."""
    monkeypatch.setattr(os, "environ", os.environ | {"NCCL_ALGO": "Ring"})
    monkeypatch.setattr("vllm.utils.nccl._unpinned_env", None)
    with launcher_environment(1, 0):
        override_envs_for_invariance()
        assert os.environ["NCCL_ALGO"] != "Ring" and os.environ["NCCL_PROTO"] == "Simple"
    assert {name: value for name, value in os.environ.items() if name.startswith("NCCL_")} == {"NCCL_ALGO": "Ring"}


def test_the_variables_of_deterministic_engines_are_vllms_and_torchs():
    assert vllm.envs.environment_variables.keys() >= {name for name in determinism.OF_ENGINES if name.startswith("VLLM_")}
    assert all(name in Path(torch._inductor.config.__file__).read_text() for name in determinism.OF_ENGINES if "TORCH" in name)
