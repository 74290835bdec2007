"""The plan's memory against arithmetic. test_memory_measured.py compares it with measurements."""

import dataclasses
import subprocess
import sys

import pytest

from launch.plan import memory
from launch.plan.activations import RankMicrobatch, hugging_face_layer, megatron_layer, norms, state_space
from launch.plan.advice import advice
from launch.plan.memory_generate import EngineRank, generate
from launch.plan.memory_megatron import MegatronMemory, stages
from launch.plan.memory_parts import RUNTIME, GenerateMemory, TrainMemory, models, rank_batches
from launch.plan.rank_division import Parallelism, train_parallelism
from launch.recipes.model_files import read_json
from pipeline import config
from pipeline.config import RECIPES
from pipeline.models.shape import ModelShape
from tests.test_imports import ROOT


def shape(name: str) -> ModelShape:
    return ModelShape.of(read_json(RECIPES / f"models/{name}.json"))


LLAMA, QWEN_MIXTURE, DEEPSEEK = shape("meta-llama/Llama-3.1-8B"), shape("Qwen/Qwen3-30B-A3B"), shape("unsloth/DeepSeek-V3-bf16")
GPT_OSS, HYBRID = shape("openai/gpt-oss-20b"), shape("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
DELTA_NETS = ModelShape.of(read_json(RECIPES / "models/Qwen/Qwen3.5-9B.json")["text_config"])
MEGATRON = "policy.megatron_cfg"


def recipe(*overrides: str, name: str = "llama8b_grpo"):
    """The recipe with recomputation and microbatches that the tests fix, where it leaves them open."""
    dtensor = ("policy.dtensor_cfg.activation_checkpointing=true", "policy.dtensor_cfg.recompute_granularity=selective")
    return config.load(name, ["run_dir=runs/unused", *dtensor, "policy.sequence_packing.train_mb_tokens=8192", *overrides])


def trained(*overrides: str, of: ModelShape = LLAMA, name: str = "llama8b_grpo") -> TrainMemory:
    loaded = recipe(*overrides, name=name)
    return memory.train(loaded, dict.fromkeys(config.models(loaded), of))


def on_megatron(*overrides: str, **more) -> TrainMemory:
    on = ("policy.dtensor_cfg.enabled=false", f"{MEGATRON}.enabled=true")
    return trained(*on, f"{MEGATRON}.activation_checkpointing=true", *overrides, **more)


# ---- training -----------------------------------------------------------------------------------------------------------


def test_fsdp_shards_sixteen_bytes_per_parameter_over_all_ranks():
    parts = trained("cluster.train.nodes=2").parts
    held = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert held == pytest.approx(16 * LLAMA.parameters / 16, rel=1e-6)


def test_replicas_of_fsdp_hold_as_much_as_fewer_ranks_would():
    key = "policy.dtensor_cfg"
    one, two = (trained(f"{key}.data_parallel_replicate_size={size}").parts for size in (1, 2))
    for part in ("weights", "gradients", "optimizer"):
        assert two[part] == pytest.approx(2 * one[part])


def test_context_parallelism_of_fsdp_divides_activations_but_not_weights():
    key = "policy.dtensor_cfg"
    one, two = (trained(f"{key}.context_parallel_size={size}").parts for size in (1, 2))
    assert two["weights"] == one["weights"] and two["activations"] < 0.75 * one["activations"]


def test_expert_parallelism_of_fsdp_shards_over_the_ranks_with_the_same_experts():
    for layout in (Parallelism(16, 2, expert_tensor=2), Parallelism(16, 2, expert=4), Parallelism(16, expert=16)):
        assert layout.expert * layout.expert_shard == layout.tensor * layout.shard == 16
    assert Parallelism(16, 2, context=2, replicas=2).data == 4 and Parallelism(16, 2, context=2, replicas=2).shard == 4


def test_more_ranks_than_experts_gather_padding():
    assert QWEN_MIXTURE.experts == 128
    for layout, times in ((Parallelism(64), 1), (Parallelism(256, 4), 2), (Parallelism(256, expert=2), 2)):
        assert layout.gathered_experts(QWEN_MIXTURE) == times * QWEN_MIXTURE.routed / layout.expert


def test_tensor_parallelism_of_fsdp_gathers_whole_experts():
    key = "policy.dtensor_cfg"
    one, two = (trained(f"{key}.tensor_parallel_size={size}", of=QWEN_MIXTURE).parts for size in (1, 2))
    layer = 2 * QWEN_MIXTURE.routed / QWEN_MIXTURE.sparse_layers
    assert two["buffers"] > 3 * layer and two["weights"] == pytest.approx(one["weights"], rel=1e-3)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("of", "mixers"), [(HYBRID, ("in_proj", "conv1d", "A_log")), (DELTA_NETS, ("linear_attn",))])
def test_tensor_parallelism_of_fsdp_leaves_mixers_whole(of, mixers, sequence):
    """State spaces, and delta nets with sequence parallelism; without it their projections are cut."""
    key = "policy.dtensor_cfg"
    sizes = (f"{key}.tensor_parallel_size=2", *([f"{key}.sequence_parallel=true"] if sequence else []))
    one, two = (trained(*given, of=of).parts for given in ((), sizes))
    whole = sum(t.numel for t in of.tensors if any(f".{name}" in t.name for name in mixers))
    whole += sum(t.numel for t in of.tensors if of is HYBRID and t.name.endswith(("mixer.out_proj.weight", "mixer.D")))
    found = (two["weights"] - one["weights"]) * 8 / 4
    if of is HYBRID or sequence:
        assert found == pytest.approx(whole, rel=0.01)
    else:
        assert 0 < found < 0.01 * whole


def test_tensor_parallel_ranks_share_the_tokens_of_whole_mixers():
    """Delta nets without sequence parallelism are cut, and compute all tokens."""
    alone = RankMicrobatch(1.0, 2, True)
    for of, before, after in (
        (HYBRID, alone, RankMicrobatch(1.0, 2, True, 2)),
        (DELTA_NETS, RankMicrobatch(1.0, 2, True, 2), RankMicrobatch(1.0, 2, True, 2, 2)),
    ):
        states = of.state_layers / of.layers * state_space(of, alone)
        first, then = (hugging_face_layer(of, False, microbatch).saved for microbatch in (before, after))
        assert first > states and first - then > states / 2


def test_megatron_replicates_weights_and_gradients_and_shards_the_rest():
    parts = on_megatron().parts
    held = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert held == pytest.approx((2 + 4 + 12 / 8) * LLAMA.parameters, rel=1e-6)


def test_gradients_in_half_precision_take_half_the_bytes():
    halved = on_megatron(f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32=false").parts["gradients"]
    assert halved == on_megatron().parts["gradients"] / 2


def test_expert_parallel_ranks_hold_part_of_the_experts():
    spread = on_megatron(f"{MEGATRON}.expert_model_parallel_size=8", of=QWEN_MIXTURE).parts["gradients"]
    whole = on_megatron(of=QWEN_MIXTURE).parts["gradients"]
    assert whole - spread == pytest.approx(4 * QWEN_MIXTURE.routed * 7 / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("of", "sizes", "dense"),
    [
        (DEEPSEEK, {"pipeline_model_parallel_size": 16, "num_layers_in_first_pipeline_stage": 3}, [3, *[0] * 15]),
        (LLAMA, {"pipeline_model_parallel_size": 4}, [8, 8, 8, 8]),
        (LLAMA, {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 4}, [14, 14, 4]),
    ],
)
def test_pipeline_stages_have_all_layers(of, sizes, dense):
    sizes = {"num_layers_in_last_pipeline_stage": 2 if of is DEEPSEEK else None, **sizes}
    policy = recipe().policy
    policy = dataclasses.replace(policy, megatron_cfg=dataclasses.replace(policy.megatron_cfg, **sizes))
    (model, *_) = models(recipe(), {"policy": of})
    found = stages(dataclasses.replace(model, policy=policy))
    assert [stage.dense for stage in found] == dense
    assert sum(stage.sparse for stage in found) == of.sparse_layers


def test_pipeline_stages_sum_to_the_model():
    overrides = ("policy.dtensor_cfg.enabled=false", f"{MEGATRON}.enabled=true", f"{MEGATRON}.pipeline_model_parallel_size=4")
    loaded = recipe(*overrides)
    (model, *_), cut = models(loaded, {"policy": LLAMA}), train_parallelism(loaded.policy, loaded.cluster.train)
    held = [MegatronMemory(model, cut, True, stage) for stage in stages(model)]
    assert sum(one.dense_parameters + one.expert_parameters for one in held) == LLAMA.parameters


def test_an_early_stage_keeps_several_microbatches():
    found = on_megatron(f"{MEGATRON}.pipeline_model_parallel_size=4", f"{MEGATRON}.activation_checkpointing=false")
    assert "pipeline stage 0" in found.phase
    last = on_megatron(
        f"{MEGATRON}.pipeline_model_parallel_size=4",
        f"{MEGATRON}.activation_checkpointing=false",
        "policy.train_global_batch_size=4",
    )
    # Of one sequence and so one microbatch on each data rank, a stage keeps one.
    assert found.parts["activations"] > 3 * last.parts["activations"]


@pytest.mark.parametrize("layer", [hugging_face_layer, megatron_layer])
@pytest.mark.parametrize(("of", "sparse"), [(LLAMA, False), (QWEN_MIXTURE, True), (DEEPSEEK, True)])
def test_context_parallelism_splits_tokens_and_tensor_parallelism_widths(layer, of, sparse):
    one, half = (layer(of, sparse, RankMicrobatch(tokens, 2, True)) for tokens in (8192, 4096))
    assert half.saved == one.saved / 2
    sequence = 4 if layer is megatron_layer else 1  # which a mixture needs
    cut = layer(of, sparse, RankMicrobatch(8192, 2, True, tensor=4, sequence=sequence, expert_tensor=4))
    assert one.saved / 4 <= cut.saved < one.saved


def test_sequence_parallelism_splits_all_activations_of_a_layer():
    kept = [
        megatron_layer(LLAMA, False, RankMicrobatch(8192, 2, True, tensor=4, sequence=sequence)).saved for sequence in (1, 4)
    ]
    whole = megatron_layer(LLAMA, False, RankMicrobatch(8192, 2, True)).saved
    assert kept[1] == pytest.approx(whole / 4)
    assert kept[0] > kept[1]


@pytest.mark.parametrize(("of", "found"), [(LLAMA, (2, False, 0)), (QWEN_MIXTURE, (2, True, 0)), (DEEPSEEK, (2, False, 2048))])
def test_norms_follow_from_the_parameter_counts(of, found):
    assert norms(of) == found


def test_microbatches_are_no_larger_than_a_ranks_share():
    loaded = recipe("policy.train_global_batch_size=8", "policy.sequence_packing.train_mb_tokens=100000")
    assert rank_batches(loaded, 8).train_tokens == loaded.policy.max_total_sequence_length
    assert rank_batches(loaded, 8).microbatches == 1
    pairs = config.load("llama8b_dpo", ["run_dir=runs/unused", "policy.sequence_packing.enabled=false"])
    size = pairs.policy.train_micro_batch_size * pairs.policy.max_total_sequence_length
    assert rank_batches(pairs, 8).train_tokens == 2 * size


def test_models_besides_the_policy_are_counted():
    alone, both = trained("cluster.train.nodes=2"), trained("cluster.train.nodes=2", name="llama8b_ppo")
    critic = 16 * (LLAMA.parameters - LLAMA.output + LLAMA.hidden) / 16
    assert both.parts["other models"] == pytest.approx(critic, rel=1e-6)
    assert "other models" not in alone.parts
    reference = 2 * LLAMA.parameters / 16
    assert alone.host == pytest.approx(reference)
    kept = trained("cluster.train.nodes=2", "policy.dtensor_cfg.reference_cpu_offload=false")
    assert (kept.host, kept.parts["other models"]) == (0, pytest.approx(reference))
    phase, of_reference = "log-probs, policy", "log-probs of the reference, policy"
    assert alone.phases[of_reference] - alone.phases[phase] == pytest.approx(reference)


def test_a_reference_of_megatron_computes_beside_the_policy():
    found, weights = on_megatron(), 2 * LLAMA.parameters
    assert found.host == pytest.approx(weights, rel=1e-6)
    phase, of_reference = "log-probs, policy", "log-probs of the reference, policy"
    assert found.phases[of_reference] - found.phases[phase] == pytest.approx(weights, rel=1e-6)
    on_cpus = on_megatron("cluster.train.gpus_per_node=0", "cluster.train.ranks_per_node=8")
    assert on_cpus.phases[of_reference] == on_cpus.phases[phase]
    adapted = on_megatron(f"{MEGATRON}.peft.enabled=true")
    assert adapted.host == 0 and of_reference not in adapted.phases


def test_offloaded_weights_are_on_the_host():
    found = trained("policy.dtensor_cfg.cpu_offload=true")
    assert not {"weights", "gradients", "optimizer"} & found.parts.keys()
    assert found.host >= 16 * LLAMA.parameters / 8


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


def test_nccls_buffers_for_a_refit_are_besides_vllms_share():
    """Check 4 train ranks and 4 engines on one node, for 9.6 MB a channel, and several nodes."""
    shared = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=4", "cluster.generate.gpus_per_node=4")
    own = ("policy.generation.colocated.enabled=true", "grpo.async_grpo.enabled=false")
    found, alone = generated(*shared), generated(*own)
    bucket = 3 * recipe().policy.generation.refit_cfg.bucket_bytes
    assert found.parts["buffers"] - bucket == pytest.approx((4 + 1) * 32 * 9.633792e6)
    assert found.parts["KV cache"] == alone.parts["KV cache"]
    assert alone.parts["buffers"] < bucket  # over gloo and IPC
    assert generated(*shared, f"{VLLM}.gpu_memory_utilization=0.96").total > 80e9 > generated(*own).total
    several = generated("cluster.train.nodes=2", "cluster.generate.nodes=2").parts["buffers"] - bucket
    assert several == pytest.approx(2 * 9.633792e6 + 2 * 32 * 16 * 2**17)
    assert generated(*shared, "policy.generation.refit_transport=broadcast").parts["buffers"] < found.parts["buffers"]
    without = ("cluster.train.gpus_per_node=0", "cluster.generate.gpus_per_node=0")
    assert generated(*without).parts["buffers"] <= bucket


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
    model = models(recipe(f"{MEGATRON}.pipeline_model_parallel_size=2", name="llama8b_grpo"), {"policy": HYBRID})[0]
    assert [(stage.dense, stage.sparse) for stage in stages(model)] == [(15, 11), (14, 12)]
    assert EngineRank(HYBRID, 2, 1, 2, False).linear < 0.55 * EngineRank(HYBRID, 2, 1, 1, False).linear


def test_kv_heads_are_replicated_over_more_ranks_than_heads():
    cached = [EngineRank(LLAMA, 2, tensor, 1, False).cache_elements for tensor in (1, 8, 16)]
    assert cached == [65536, 8192, 8192]


def test_latents_are_replicated_on_all_ranks():
    assert [EngineRank(DEEPSEEK, 2, tensor, 1, True).cache_elements for tensor in (1, 16)] == [61 * 576] * 2


def test_engine_ranks_sum_to_the_model_and_padding():
    rank = EngineRank(LLAMA, 2, 8, 1, False)
    norms_twice = 7 * LLAMA.other  # each rank has all norms
    assert 8 * rank.parameters == pytest.approx(LLAMA.parameters + norms_twice, rel=1e-9)


def test_projections_to_latents_are_replicated():
    """Check q_a_proj and kv_a_proj_with_mqa of DeepSeek-V3: 7168 x (1536 + 512 + 64)."""
    whole, cut = (EngineRank(DEEPSEEK, 2, tensor, 1, True).parameters for tensor in (1, 8))
    replicated = DEEPSEEK.other + 61 * 7168 * (1536 + 512 + 64)
    assert 8 * cut - whole == pytest.approx(7 * replicated, rel=1e-9)


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


# ---- advice -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend", [("policy.dtensor_cfg.enabled=true",), ("policy.dtensor_cfg.enabled=false", f"{MEGATRON}.enabled=true")]
)
def test_advice_reduces_memory_as_stated(backend):
    loaded = recipe(*backend)
    held = memory.train(loaded, {"policy": LLAMA})
    assert advice(loaded, held, held.total) == []
    texts = advice(loaded, held, 0.8 * held.total)
    assert texts
    for text in texts:
        change, _, told = text.partition(": ")
        after = memory.train(recipe(*backend, *change.split()), {"policy": LLAMA}).total
        assert told.startswith(f"{after / 1e9:.1f} GB of"), text
        assert after <= 0.8 * held.total


def test_advice_for_an_engine_makes_room():
    loaded = recipe("cluster.generate.gpu_memory_gb=21")
    held = generate(loaded, LLAMA)
    assert held.sequences == 0
    (*_, text) = advice(loaded, held, 21e9)
    changed = recipe("cluster.generate.gpu_memory_gb=21", text.partition(": ")[0])
    assert generate(changed, LLAMA).sequences >= 1


def test_no_torch():
    code = "import sys, launch.plan.memory; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
