"""Times of phases: operations, closed forms, monotonicity, and an engine against a step-by-step simulation."""

import math
import random
from dataclasses import replace

import pytest

from launch.plan import backend_choice, generate_time, lengths, train_time
from launch.plan.generate_time import Engine
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory
from launch.plan.roofline import Rates
from launch.recipes.model_files import planning_config
from pipeline import config
from pipeline.config import PolicyConfig
from pipeline.config.hardware import gpu
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from tests.launch.model import write_recipe

H100 = gpu("h100")
KEY, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
MEGATRON = (f"{KEY}.enabled=true", "policy.dtensor_cfg.enabled=false")


def shape(name: str) -> ModelShape:
    return ModelShape.of(planning_config(PolicyConfig(model_name=name)))


def load(*overrides: str, name: str = "llama8b_grpo") -> config.Recipe:
    return backend_choice.choose(config.load(name, list(overrides)))[0]


def train_phases(*overrides: str, name: str = "llama8b_grpo") -> dict[str, train_time.Phase]:
    recipe = load(*overrides, name=name)
    shapes = {section: ModelShape.of(planning_config(policy)) for section, policy in config.models(recipe).items()}
    return {phase.name: phase for phase in train_time.phases(recipe, shapes, lengths.assume(recipe), H100)}


def train_seconds(*overrides: str, name: str = "llama8b_grpo") -> float:
    return sum(phase.seconds for phase in train_phases(*overrides, name=name).values())


# ---- training -------------------------------------------------------------------------------------------------------------


def test_one_gpu_only_computes():
    """Count a forward pass as 2 operations per active parameter and half the squared length in pairs; recomputed, four times
    that.
    """
    lone = ("cluster.train.gpus_per_node=1", "policy.train_global_batch_size=2048")
    lone += ("policy.dtensor_cfg.recompute_granularity=full", "policy.sequence_packing.train_mb_tokens=8192")
    limit = ("plan.prompt_tokens=100", "plan.answer_tokens=3072", "policy.generation.max_new_tokens=3072")  # all as long
    whole = "policy.dtensor_cfg.activation_checkpointing=true"
    update = train_phases(*lone, *limit, whole)["1 update of the policy"]
    llama, tokens = shape("meta-llama/Llama-3.1-8B-Instruct"), 2048 * 3172
    forward = 2 * llama.active * tokens + 4 * 32 * 32 * 128 * 2048 * 3172**2 / 2
    assert update.flops == pytest.approx(4 * forward)
    assert update.parts["matrix products"] == pytest.approx(4 * forward / (0.40 * 989e12))
    assert set(update.parts) == {"matrix products", "optimizer"}
    again = train_phases(*lone, "policy.dtensor_cfg.activation_checkpointing=false")["1 update of the policy"]
    assert again.flops == pytest.approx(0.75 * train_phases(*lone, whole)["1 update of the policy"].flops)


def passed(spread: Lengths, *keys: str, count: float, trains: bool = False) -> dict[str, float]:
    """Return part -> seconds of one pass of Llama 3.1 8B on Megatron-Core."""
    recipe = load(*MEGATRON, *keys)
    of = shape("meta-llama/Llama-3.1-8B-Instruct")
    job = train_time.job(recipe, recipe.policy, of, spread, H100, recipe.cluster.train)
    return (train_time.update if trains else train_time.forward_pass)(job, count)[1]


def test_parallelism_communicates():
    """Check the bubble of (stages - 1) / microbatches of a stage's work (arXiv 2104.04473, section 2.2), and all-reduces."""
    tokens = "policy.sequence_packing.train_mb_tokens=8192"
    pipeline = (f"{KEY}.pipeline_model_parallel_size=4", tokens)
    parts = passed(Lengths(0.0, 2048, 4096, ""), *pipeline, count=512, trains=True)
    microbatches = 512 / 2 * 2048 / 8192  # 2 data ranks
    assert parts["pipeline bubble"] == pytest.approx(parts["matrix products"] * 3 / microbatches)
    assert parts["pipeline transfers"] == pytest.approx(2 * 512 / 2 * 2048 * 4096 * 2 / 450e9)
    tensor = (f"{KEY}.tensor_model_parallel_size=4", f"{KEY}.sequence_parallel=true")
    parts = passed(Lengths(0.0, 1000, 4096, ""), *tensor, count=100)
    hidden = 100 * 1000 / 2 * 4096 * 2  # bytes of a data rank's
    assert parts["tensor parallelism"] == pytest.approx(32 * 2 * 2 * 3 / 4 * hidden / 450e9)


def test_context_and_replicas_of_fsdp_communicate():
    """Context-parallel ranks gather keys and values, and the optimizer of two replicas is sharded over half of the ranks."""

    def parts(key: str, size: int) -> dict[str, float]:
        phases = train_phases(f"policy.dtensor_cfg.{key}={size}")
        return next(phase.parts for name, phase in phases.items() if "of the policy" in name and "update" in name)

    assert parts("context_parallel_size", 2)["context parallelism"] > 0
    plain, replicated = (parts("data_parallel_replicate_size", size) for size in (1, 2))
    assert replicated["optimizer"] == pytest.approx(2 * plain["optimizer"])


def test_muon_orthogonalizes_on_all_ranks():
    """Five iterations of 4 m^2 n + 2 m^3 FLOPs on each matrix of 32 layers, and bfloat16 to the owners and back."""

    def optimizer(*overrides: str) -> float:
        return train_phases(*overrides)["1 update of the policy"].parts["optimizer"]

    batch = "policy.train_global_batch_size=2048"
    added = optimizer(batch, "policy.optimizer={name: torch.optim.Muon, kwargs: {lr: 0.02}}") - optimizer(batch)
    h, kv, width = 4096, 1024, 14336
    matrices = [(h, h)] * 2 + [(kv, h)] * 2 + [(h, width)] * 3
    work = 32 * sum(4 * m * m * n + 2 * m**3 for m, n in matrices)
    exchanged = 2 * 32 * sum(m * n for m, n in matrices) / 8 * 7 / 8
    assert added == pytest.approx(5 * work / (8 * 0.40 * 989e12) + 2 * exchanged / 450e9, rel=1e-3)
    assert 0.1 < added < 1


def test_links():
    """NVLink ends at the node unless it crosses nodes."""
    links = Rates(H100, 50, 8)
    assert links.ring(8) == 450e9 and links.ring(16) == 400e9  # 8 NICs
    assert links.ring(4, stride=4) == 2 * 50e9  # two of them on a node
    assert links.ring(4, stride=8) == 50e9
    assert links.exchange_seconds(16, 16e9) == pytest.approx(8e9 / 50e9)  # half of it leaves the node
    assert links.exchange_seconds(8, 8e9) == pytest.approx(7e9 / 450e9)
    assert Rates(gpu("gb200"), 50, 72).ring(64) == 900e9
    one = engine(ranks=8)
    apart = replace(one, rates=replace(one.rates, island=4)).parts(64, 1000)["tensor parallelism"]
    assert apart - one.parts(64, 1000)["tensor parallelism"] > 32 * 2 * 2 * 20e-6  # the latency of 64 all-reduces


def test_a_reference_comes_from_the_host():
    """Load the reference in 2 bytes a parameter: once, or with cpu_offload for each microbatch, where the policy takes 4
    bytes.
    """
    every = "grpo.seq_logprob_error_threshold=2"  # for it, old log-probs are those of all samples
    lone = ("cluster.train.gpus_per_node=1", "policy.sequence_packing.logprob_mb_tokens=4096", every)
    before, of_reference = "log-probs before the updates", "log-probs of the reference"
    once, host = train_phases(*lone), 64e9 * 0.3
    copies = 2 * shape("meta-llama/Llama-3.1-8B-Instruct").parameters / host
    assert once[of_reference].seconds - once[before].seconds == pytest.approx(copies)
    each = train_phases(*lone, "policy.dtensor_cfg.cpu_offload=true")
    assert "host copies" not in each[of_reference].parts
    assert each[before].seconds == pytest.approx(2 * each[of_reference].seconds)
    assert each[of_reference].seconds / copies == pytest.approx(round(each[of_reference].seconds / copies))  # microbatches
    megatron = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    assert train_phases(*lone, *megatron)[of_reference].parts["host copies"] == pytest.approx(copies)


def test_the_first_updates_samples_need_no_separate_pass():
    before, many = "log-probs before the updates", 4  # updates of llama8b_grpo
    every = train_phases("grpo.seq_logprob_error_threshold=2")[before].flops
    assert train_phases()[before].flops == pytest.approx((1 - 1 / many) * every)


def test_ppo_trains_two_models():
    phases = train_phases(name="llama8b_ppo")
    updates = {name: phase for name, phase in phases.items() if " of the " in name and "update" in name}
    assert "values of the critic" in phases and len(updates) == 2
    policy, critic = (next(p for name, p in updates.items() if name.endswith(model)) for model in ("policy", "critic"))
    assert critic.flops < policy.flops  # one number a token, not a vocabulary


def test_more_and_faster_gpus_never_take_longer():
    for layout in ((), (*MEGATRON, f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.sequence_parallel=true")):
        found = [train_seconds(*layout, f"cluster.train.nodes={nodes}") for nodes in (1, 2, 4)]
        assert found == sorted(found, reverse=True), layout
    recipe = load(*MEGATRON)
    shapes, spread = {"policy": shape(recipe.policy.model_name)}, lengths.assume(recipe)
    by_gpu = [sum(p.seconds for p in train_time.phases(recipe, shapes, spread, gpu(n))) for n in ("h100", "b200", "gb200")]
    assert by_gpu == sorted(by_gpu, reverse=True)


# ---- generation -----------------------------------------------------------------------------------------------------------


def engine(name: str = "meta-llama/Llama-3.1-8B-Instruct", ranks: int = 1) -> Engine:
    of = shape(name)
    return Engine(of, Rates(H100, 50, 8, mixture=of.experts > 0), ranks, ranks)


def test_a_step_of_an_engine_by_hand():
    llama, parts = shape("meta-llama/Llama-3.1-8B-Instruct"), engine().parts(1, 1000)
    assert parts["reading weights"] == pytest.approx((llama.parameters - 128256 * 4096) * 2 / (0.6 * 3350e9))
    assert parts["reading the KV cache"] == pytest.approx(1000 * 2 * 8 * 128 * 32 * 2 / (0.6 * 3350e9))
    assert parts["engine overhead"] == 3e-3
    full = engine().parts(4096, 1)
    assert full["matrix products"] == pytest.approx((2 * llama.active + flops.attention(llama, 1)) * 4096 / (0.4 * 989e12))
    assert "reading weights" not in full


def test_linear_layers_in_eight_bits():
    plain = engine()
    small = replace(plain, rates=replace(plain.rates, fp8=True))
    assert plain.weights(1) - small.weights(1) == plain.shape.attention + plain.shape.mlp
    assert small.rates.flops == pytest.approx(2 * plain.rates.flops, rel=1e-3) and small.cache_bytes == plain.cache_bytes


def test_windows_and_states_of_a_cache():
    """gpt-oss has a window of 128 in every other layer; Nemotron 3 Nano has 6 layers with attention and 23 with states."""
    windows, states = engine("unsloth/gpt-oss-20b-BF16"), engine("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert windows.read(100) == 100 * 24 * 2 * 8 * 64 * 2
    assert windows.read(4096) == (4096 + 128) * 12 * 2 * 8 * 64 * 2
    convolved, state = 3 * (64 * 64 + 2 * 8 * 128), 64 * 64 * 128
    assert states.read(1000) == 1000 * 6 * 2 * 2 * 128 * 2 + 2 * 23 * (2 * convolved + 4 * state)


def test_only_routed_experts_are_read():
    one = engine("Qwen/Qwen3-30B-A3B")
    model = one.shape
    assert one.weights(1) == pytest.approx(2 * model.active)
    assert one.weights(10_000) == pytest.approx(2 * (model.parameters - model.vocabulary * model.hidden))


def test_tensor_parallelism_divides_the_bytes_read():
    read = [engine(ranks=ranks).weights(1) for ranks in (1, 2, 4, 8)]
    assert read == [read[0], read[0] / 2, read[0] / 4, read[0] / 8]
    cached = [engine(ranks=ranks).cache_bytes for ranks in (1, 8, 16)]
    assert cached[1] == cached[0] / 8 == cached[2]  # 8 key-value heads
    deepseek = [engine("deepseek-ai/DeepSeek-V3", ranks).cache_bytes for ranks in (8, 32)]
    assert deepseek == [576 * 61 * 2] * 2  # the latent is on all


@pytest.mark.parametrize(
    ("mean", "limit", "count", "slots"), [(400, 3800, 256, 256), (400, 3800, 512, 64), (3300, 3896, 128, 128)]
)
def test_an_engine_equals_its_simulation(mean, limit, count, slots):
    """Compare with a queue of sampled lengths, from which a sequence starts when another ends."""
    one, spread = engine(), Lengths(200, mean, limit, "")
    predicted = sum(generate_time.decoding(one, count, slots, spread, count).values())
    simulate_steps = [_play(one, spread, count, slots, seed) for seed in range(5)]
    assert predicted == pytest.approx(sum(simulate_steps) / len(simulate_steps), rel=0.1)


def _play(engine: Engine, lengths: Lengths, count: int, slots: int, seed: int) -> float:
    generator, scale = random.Random(seed), lengths.scale
    waiting = [math.ceil(min(lengths.limit, generator.expovariate(1 / scale))) for _ in range(count)]
    running: list[list[int]] = []
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        context = lengths.prompt + sum(done for _, done in running) / len(running)
        seconds += sum(engine.parts(len(running), context).values())
        running = [[left - 1, done + 1] for left, done in running if left > 1]
    return seconds


def test_a_rollout():
    recipe = load("plan.prompt_tokens=200", "plan.answer_tokens=1000")
    llama, spread = shape(recipe.policy.model_name), lengths.assume(recipe)

    def phases(recipe, tokens=400_000) -> list[train_time.Phase]:
        held = GenerateMemory({}, 0, True, tokens, 0, (), llama)
        return generate_time.phases(recipe, llama, spread, H100, held)

    def seconds(recipe, tokens=400_000) -> float:
        return sum(phase.seconds for phase in phases(recipe, tokens))

    more = replace(recipe, cluster=replace(recipe.cluster, generate=replace(recipe.cluster.generate, nodes=2)))
    assert seconds(more) < seconds(recipe) < seconds(recipe, 50_000)
    prefill, decode = phases(recipe)
    assert prefill.flops == flops.forward(llama, 64 * 200, 64 * 200**2 / 2)  # a prompt is read once
    assert decode.flops == pytest.approx(
        2 * llama.active * 2048 * 1000 + flops.attention(llama, 2048 * (200 * 1000 + spread.squared_answer / 2))
    )
    apart = load("plan.prompt_tokens=200", f"{VLLM}.enable_prefix_caching=false")
    assert phases(apart)[0].flops == pytest.approx(32 * prefill.flops)


def test_log_probs_of_the_engines_take_no_pass():
    loss = ("loss_fn.use_generation_logprobs=true", "loss_fn.use_importance_sampling_correction=false")
    before, after = train_phases(), train_phases(*loss)
    assert set(before) - set(after) == {"log-probs before the updates"}
    assert all(after[name] == before[name] for name in after)


# ---- operations and lengths ---------------------------------------------------------------------------------------------

TINY = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 10}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_dense_model_by_hand():
    tiny = ModelShape.of(TINY)
    matrices = 3 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 24) + 8 * 10  # q and o, k and v, MLP, output
    norms = 3 * 2 * 8 + 8
    assert tiny.active == matrices + norms
    pairs = 5 * 5 / 2
    scores = values = 3 * 2 * 4 * 2 * pairs  # layers x 2 x heads x dimension
    assert flops.forward(tiny, 5, pairs) == 2 * (matrices + norms) * 5 + scores + values


def test_parameters_and_operations_equal_published_numbers():
    """Compare active parameters with the model cards, and operations to train on a token with a paper.

    The operations are those of a sequence of 4096 tokens: "Insights into DeepSeek-V3", table 2 (arXiv 2505.09343).
    """
    assert shape("deepseek-ai/DeepSeek-V3").active == pytest.approx(37e9, rel=0.02)
    assert shape("Qwen/Qwen3-30B-A3B").active == pytest.approx(3.3e9, rel=0.1)
    assert shape("Qwen/Qwen3-235B-A22B").active == pytest.approx(22e9, rel=0.02)
    assert shape("Qwen/Qwen3.5-397B-A17B").active == pytest.approx(17e9, rel=0.05)
    training = 3 * flops.forward(shape("deepseek-ai/DeepSeek-V3"), 4096, 4096**2 / 2) / 4096
    assert training == pytest.approx(250e9, rel=0.05)


def test_decoding_attends_over_the_cached_latent():
    deepseek, llama = shape("deepseek-ai/DeepSeek-V3"), shape("meta-llama/Llama-3.1-8B")
    assert deepseek.latent and not llama.latent
    assert flops.decode_attention(llama, 7) == flops.attention(llama, 7)
    assert flops.decode_attention(deepseek, 1) == 2 * 61 * 128 * (576 + 576)


@pytest.mark.parametrize(("mean", "limit"), [(795, 3831), (3283, 3896), (100, 20000), (512, 512)])
def test_the_length_distribution_equals_its_samples(mean, limit):
    spread = Lengths(100, mean, limit, "")
    generator, scale = random.Random(0), spread.scale
    drawn = [limit if math.isinf(scale) else min(limit, generator.expovariate(1 / scale)) for _ in range(200_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.01)
    assert sum(x * x for x in drawn) / len(drawn) == pytest.approx(spread.squared_answer, rel=0.02)
    sequences = sum((100 + x) ** 2 for x in drawn) / len(drawn)
    assert sequences == pytest.approx(spread.squared_sequence, rel=0.02)
    longest = [max(drawn[i : i + 50]) for i in range(0, len(drawn), 50)]
    assert sum(longest) / len(longest) == pytest.approx(spread.longest(50), rel=0.1)


def test_lengths_of_a_recipe(tmp_path):
    path = str(write_recipe(tmp_path))
    guess = lengths.assume(config.load(path))
    assert (guess.prompt, guess.answer, guess.limit) == (8, 12, 24) and "a guess" in guess.source
    said = lengths.assume(config.load(path, ["plan.answer_tokens=5", "policy.generation.max_new_tokens=10"]), 4, 9, "runs/x")
    assert (said.prompt, said.answer, said.limit) == (4, 5, 10)
    assert "plan.answer_tokens" in said.source and "the mean in runs/x" in said.source
    assert lengths.assume(config.load(path), 8, 500).answer == 24  # a run with another limit
