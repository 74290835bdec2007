"""The plan's memory of an engine, and the sequences and tokens that it takes: those of vLLM's own functions."""

from types import SimpleNamespace

import pytest
import yaml
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from launch.plan import generate_time
from launch.plan.memory_generate import EngineRank, engine_sizes, generate
from launch.plan.memory_parts import RUNTIME, GenerateMemory
from pipeline import config
from pipeline.config import RECIPES, hardware
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.models.shape import ModelShape
from tests.launch.plan.plans import planned, table
from tests.launch.plan.test_memory import DEEPSEEK, GPT_OSS, HYBRID, LLAMA, recipe

KEY = "policy.generation"
RANKS = ("cluster.generate.ranks_per_node=2", "cluster.train.gpus_per_node=0")
SHORT = ("qwen3_1p7b_grpo_single_gpu", "plan.answer_tokens=400")  # of which the KV cache holds more than 512


def vllms(monkeypatch, gpu: str, loaded: config.Recipe) -> tuple[int, int]:
    """Return what vLLM takes by itself with this GPU, or on a CPU."""
    generation = loaded.policy.generation
    on_cpu = not loaded.cluster.generate.gpus_per_node
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    memory = int(hardware.memory_gb(loaded.cluster.generate) * 1e9)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda *_: memory, raising=False)
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: f"NVIDIA {gpu.upper()}", raising=False)
    vllm_cfg = generation.vllm_cfg
    arguments = EngineArgs(
        model=str(RECIPES / "tiny"),
        max_num_seqs=generation.max_num_seqs,
        enable_chunked_prefill=True,
        tensor_parallel_size=vllm_cfg.tensor_parallel_size,
        pipeline_parallel_size=vllm_cfg.pipeline_parallel_size,
        **generation.vllm_kwargs,
    )
    model = SimpleNamespace(max_model_len=vllm_cfg.max_model_len, is_multimodal_model=False)
    parallel = SimpleNamespace(use_batched_dp_moe=False)
    arguments._set_default_max_num_seqs_and_batched_tokens_args(UsageContext.LLM_CLASS, model, parallel)
    return arguments.max_num_seqs, arguments.max_num_batched_tokens


@pytest.fixture
def a100(tmp_path):
    described = yaml.safe_load((RECIPES / "hardware/h100.yaml").read_text())
    (tmp_path / "a100.yaml").write_text(yaml.safe_dump({**described, "memory_gb": 80, "compute_capability": 8.0}))
    return str(tmp_path / "a100.yaml")


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "a100"])
@pytest.mark.parametrize(
    "given",
    [
        (),
        (f"{KEY}.max_num_seqs=300",),
        (f"{KEY}.vllm_kwargs={{performance_mode: throughput}}",),
        (f"{KEY}.vllm_kwargs={{max_num_batched_tokens: 512}}",),
        ("policy.max_total_sequence_length=2", "policy.generation.max_new_tokens=1"),
    ],
)
def test_the_plan_takes_vllms_own_numbers(monkeypatch, a100, gpu, given):
    loaded = recipe(*given, f"cluster.generate.gpu={a100 if gpu == 'a100' else gpu}")
    expected = vllms(monkeypatch, gpu, loaded)
    assert engine_sizes(loaded, LLAMA) == expected
    if not given:
        assert expected == ((256, 8192) if gpu == "a100" else (1024, 16384))


def test_on_a_cpu_each_rank_adds_sequences(monkeypatch):
    loaded = recipe("cluster.generate.gpus_per_node=0", f"{KEY}.vllm_cfg.tensor_parallel_size=2", *RANKS)
    assert engine_sizes(loaded, LLAMA)[0] == vllms(monkeypatch, "cpu", loaded)[0] == 512


def test_where_vllms_default_does_not_apply():
    assert engine_sizes(recipe(), HYBRID)[0] == MOST_SEQUENCES
    assert engine_sizes(recipe(f"{KEY}.max_num_seqs=300"), HYBRID)[0] == 300
    assert engine_sizes(recipe(f"{KEY}.backend=transformers"), LLAMA)[0] == MOST_SEQUENCES


def test_512_answers_on_one_h100_are_one_wave():
    made = planned(*SHORT)
    loaded = generate_time.load(made.recipe, made.shapes["policy"], made.lengths, hardware.gpu("h100"), made.generate)
    assert loaded.count == 512 <= loaded.slots
    assert "at most 1,024 run at once" in table(made)
    old = config.changed(made.recipe, {f"{KEY}.max_num_seqs": 256})
    assert generate_time.slots(old, made.generate, made.lengths) == 256  # two waves


# ---- generation -----------------------------------------------------------------------------------------------------------


VLLM = "policy.generation.vllm_cfg"


def generated(*overrides: str, of: ModelShape = LLAMA) -> GenerateMemory:
    return generate(recipe(*overrides), of)


def test_the_kv_cache_takes_the_rest_of_gpu_memory_utilization():
    found = generated()
    whole = recipe().policy.generation.vllm_cfg.gpu_memory_utilization * 84.9e9
    assert found.total - found.parts["buffers"] - RUNTIME == pytest.approx(whole)
    assert found.parts["weights"] == pytest.approx(2 * LLAMA.parameters, rel=1e-3)
    token = 2 * 2 * LLAMA.layers * LLAMA.kv_heads * LLAMA.head_dim
    assert found.tokens == found.parts["KV cache"] // (16 * token) * 16 - 16


def test_nccls_buffers_for_a_refit_on_one_node_are_besides_vllms_share():
    shared = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=4", "cluster.generate.gpus_per_node=4")
    found, alone = generated(*shared), generated()
    assert found.parts["buffers"] - alone.parts["buffers"] == pytest.approx((4 + 1) * 32 * 9.633792e6, rel=1e-3)
    assert found.parts["KV cache"] == alone.parts["KV cache"]


def test_the_kv_cache_of_windows_and_states():
    """Check that of gpt-oss, with a window of 128 in every other layer, and of Nemotron 3 Nano, with states in 23 layers."""
    windows, hybrid = generated(of=GPT_OSS), generated(f"{VLLM}.gpu_memory_utilization=0.95", of=HYBRID)
    longest = recipe().policy.generation.vllm_cfg.max_model_len
    assert windows.sequences == int(windows.tokens / ((longest + 128) / 2))
    token, states = 6 * 2 * 2 * 128 * 2, 23 * (2 * 3 * (64 * 64 + 2 * 8 * 128) + 4 * 64 * 64 * 128)
    assert hybrid.holds(1000) > 0
    assert hybrid.holds(1000) == pytest.approx(hybrid.tokens * token / (1000 * token + states))
    half = generate(recipe("policy.generation.vllm_kwargs={mamba_ssm_cache_dtype: bfloat16}"), HYBRID)
    assert half.state_tokens == pytest.approx(hybrid.state_tokens - 23 * 2 * 64 * 64 * 128 / token)


def test_stages_of_a_hybrid_model_have_the_experts_of_their_layers():
    assert EngineRank(HYBRID, 2, 1, 2, False).linear < 0.55 * EngineRank(HYBRID, 2, 1, 1, False).linear


def test_ranks_hold_copies_of_what_cannot_be_divided():
    """Check key-value heads of Llama, latents of DeepSeek-V3 and their projections 7168 x (1536 + 512 + 64), and norms."""
    assert [EngineRank(LLAMA, 2, tensor, 1, False).cache_elements for tensor in (1, 8, 16)] == [65536, 8192, 8192]
    assert [EngineRank(DEEPSEEK, 2, tensor, 1, True).cache_elements for tensor in (1, 16)] == [61 * 576] * 2
    for of, copied in ((LLAMA, LLAMA.other), (DEEPSEEK, DEEPSEEK.other + 61 * 7168 * (1536 + 512 + 64))):
        whole, cut = (EngineRank(of, 2, tensor, 1, of is DEEPSEEK).parameters for tensor in (1, 8))
        assert 8 * cut - whole == pytest.approx(7 * copied, rel=1e-6)


def test_linear_layers_in_eight_bits_take_half_plus_scales():
    plain, small = generated(), generated(f"{VLLM}.precision=fp8")
    linear = LLAMA.attention + LLAMA.mlp
    assert plain.parts["weights"] - small.parts["weights"] == pytest.approx(linear * (1 - 4 / 128**2))
    assert small.parts["buffers"] == plain.parts["buffers"] and small.received == plain.received == plain.parts["weights"]
    assert small.parts["KV cache"] > plain.parts["KV cache"]


def test_experts_in_eight_bits():
    plain, small = (EngineRank(DEEPSEEK, 2, 16, 1, True, fp8) for fp8 in (False, True))
    ends = 2 * DEEPSEEK.vocabulary * DEEPSEEK.hidden / 16
    assert plain.parameters - plain.linear == pytest.approx(ends + DEEPSEEK.other)  # norms and routers are whole
    assert plain.weights == 2 * plain.parameters
    assert small.weights == pytest.approx(2 * (ends + DEEPSEEK.other) + (1 + 4 / 128**2) * plain.linear)


@pytest.mark.parametrize(
    ("keys", "exact"),
    [
        ((f"{VLLM}.precision=fp8",), True),
        ((f"{VLLM}.precision=fp8", f"{VLLM}.quantization_ignored_layer_kws=[o_proj]"), False),
        (("policy.generation.vllm_kwargs.quantization=fp8_per_channel",), False),
    ],
)
def test_weights_count_in_full_if_only_some_layers_are_in_eight_bits(keys, exact):
    found = generated(*keys)
    assert found.exact == exact
    assert (found.parts["weights"] == generated().parts["weights"]) == (not exact)
    assert any("weights without quantization" in text for text in found.assumptions) == (not exact)


def test_weights_that_leave_no_room_leave_no_tokens():
    assert generated(of=DEEPSEEK).tokens <= 0
    assert generated(of=DEEPSEEK).sequences == 0


def test_vllm_kwargs_override():
    assert generated("policy.generation.vllm_kwargs.kv_cache_memory_bytes=1000000000").parts["KV cache"] == 1e9
    assert generated("policy.generation.vllm_kwargs.kv_cache_dtype=fp8").tokens == pytest.approx(
        2 * generated().tokens, rel=1e-3
    )
