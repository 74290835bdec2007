"""The choice of the train backend, and what a model's config.json rules out. The configs are real families' sizes."""

import json
import os
from dataclasses import replace

import pytest

from launch.executors import cuda_variables, rank_task
from launch.executors.components import components
from launch.plan import backend_choice
from launch.plan.backend_choice import fsdp_bytes, megatron_bytes
from launch.plan.memory_parts import TrainModel
from launch.preflight import architecture
from launch.recipes.model_files import PendingModel
from launch.runs import run_setup
from pipeline import config
from pipeline.config import PRECISIONS, GenerationConfig, PolicyConfig, RecipeError
from pipeline.models import FAMILIES
from pipeline.models.shape import ModelShape
from pipeline.train.megatron import cpu  # noqa: F401 before Megatron-Core is imported
from tests.launch.model import write_recipe
from tests.problems import named, refused

KEY = "policy.megatron_cfg"


def check(recipe: config.Recipe, pending: list = ()) -> None:
    config.refuse(architecture.problems(recipe, pending))


TINY = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 96}
EXPERTS = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
DELTA_NET = {"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
DELTA_NET |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10}
CONFIGS = {
    "llama": {"intermediate_size": 96},
    "qwen2": {"intermediate_size": 96, "tie_word_embeddings": True},
    "qwen3": {"intermediate_size": 96, "head_dim": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [2]},
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": EXPERTS
    | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
    | {"num_key_value_heads": 8},
    "nemotron_h": EXPERTS
    | {"hybrid_override_pattern": "ME*-ME", "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 48, "head_dim": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 16},
    "mistral": {"intermediate_size": 96},
    "ministral3": {"intermediate_size": 96},
    "gemma3_text": {"intermediate_size": 96, "head_dim": 16},
    "gemma4_text": {"intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    "gpt_oss": {"intermediate_size": 96, "num_local_experts": 8, "head_dim": 16},
    "glm4": {"intermediate_size": 96, "pad_token_id": None},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "attention_bias": True},
    "glm4_moe_lite": EXPERTS
    | {"n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    "glm_moe_dsa": EXPERTS
    | {"n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 8, "first_k_dense_replace": 1}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "index_topk": 4096},
    "minimax_m2": {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "qwen3_5_text": {"intermediate_size": 96, **DELTA_NET},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_NET, "num_experts": 8, "shared_expert_intermediate_size": 48},
}


def sized(family: str, hidden: int, width: int, layers: int, vocabulary: int, heads: int, kv_heads: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {"model_type": family, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


LLAMA_70B = sized("llama", 8192, 28672, 80, 128256, 64, 8)
QWEN3_30B = sized("qwen3_moe", 2048, 6144, 48, 151936, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768)
DEEPSEEK_671B = sized("deepseek_v3", 7168, 18432, 61, 129280, 128, 128, n_routed_experts=256, n_shared_experts=1)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEEPSEEK_671B |= {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512}
DEEPSEEK_671B |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.fixture
def load(tmp_path):
    """Return load(model's config, *overrides): a recipe on 8 train ranks whose model folder has that config.json."""
    path = write_recipe(tmp_path)

    def with_model(model: dict, *overrides: str):
        (tmp_path / "model/config.json").write_text(json.dumps(model))
        ranks = [] if any(o.startswith("cluster.train.") for o in overrides) else ["cluster.train.ranks_per_node=8"]
        batch = ["policy.train_global_batch_size=256", "grpo.num_prompts_per_step=128"]
        return config.load(str(path), [*ranks, *batch, *overrides])

    return with_model


def gpus(nodes: int, per_node: int = 8) -> list[str]:
    return [f"cluster.train.nodes={nodes}", f"cluster.train.gpus_per_node={per_node}"]


def model(family: str, **changes) -> dict:
    return {"model_type": family, **TINY, **CONFIGS[family], **changes}


# ---- the choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "chosen", "reason"),
    [
        ([], "dtensor", "cluster.train has no GPUs"),
        ([f"{KEY}.enabled=true"], "megatron", "policy.megatron_cfg.enabled is true"),
        ([f"{KEY}.enabled=false"], "dtensor", "policy.megatron_cfg.enabled is false"),
        (["policy.dtensor_cfg.enabled=true"], "dtensor", "policy.dtensor_cfg.enabled is true"),
        (["policy.dtensor_cfg.enabled=false"], "megatron", "policy.dtensor_cfg.enabled is false"),
        ([f"{KEY}.enabled=false", "policy.dtensor_cfg.enabled=true"], "dtensor", "policy.dtensor_cfg.enabled is true"),
        ([f"{KEY}.pipeline_model_parallel_size=2"], "megatron", "pipeline_model_parallel_size is set"),
        (["policy.dtensor_cfg.tensor_parallel_size=2"], "dtensor", "policy.dtensor_cfg.tensor_parallel_size is set"),
        (["policy.optimizer.name=torch.optim.Muon"], "dtensor", "Megatron-Core does not have torch.optim.Muon"),
    ],
)
def test_the_recipe_chooses_the_backend(load, overrides, chosen, reason):
    recipe, choice = backend_choice.choose(load(model("llama"), *overrides))
    assert (choice.backend, choice.warning) == (chosen, None)
    assert reason in str(choice) and ("Megatron-Core" if chosen == "megatron" else "FSDP2") in str(choice)
    assert config.uses_megatron(recipe.policy) == (chosen == "megatron")
    assert recipe.policy.megatron_cfg.enabled is not recipe.policy.dtensor_cfg.enabled
    assert backend_choice.choose(recipe)[0] == recipe


def test_both_enabled_is_megatron_with_a_warning(load):
    recipe, choice = backend_choice.choose(load(model("llama"), f"{KEY}.enabled=true", "policy.dtensor_cfg.enabled=true"))
    assert config.uses_megatron(recipe.policy) and recipe.policy.dtensor_cfg.enabled is False
    assert "are both true" in choice.warning


def test_keys_of_both_layouts_need_an_explicit_choice(load):
    keys = (f"{KEY}.tensor_model_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size=4")
    with refused((f"{KEY}.tensor_model_parallel_size", "ambiguous")):
        backend_choice.choose(load(model("llama"), *keys))
    assert backend_choice.choose(load(model("llama"), *keys, f"{KEY}.enabled=true"))[1].backend == "megatron"


def test_the_layout_is_checked_for_the_chosen_backend(load):
    with refused((f"{KEY}.tensor_model_parallel_size", "not-divisible")):
        backend_choice.choose(load(model("llama"), f"{KEY}.tensor_model_parallel_size=3"))
    with refused(("policy.dtensor_cfg.tensor_parallel_size", "not-divisible")):
        backend_choice.choose(load(model("llama"), "policy.dtensor_cfg.tensor_parallel_size=3"))


@pytest.mark.parametrize(
    ("described", "overrides", "chosen", "reason"),
    [
        (model("llama"), gpus(1), "dtensor", "0.0e9 parameters"),
        (LLAMA_70B, gpus(4), "dtensor", "70.6e9 parameters take 40.4 GB on each of 32 GPUs with 84.9"),
        (QWEN3_30B, gpus(2), "dtensor", "30.5e9 parameters (29.0e9 in 128 experts a layer) take 34.3 GB on each of 16 GPUs"),
        (QWEN3_30B, [*gpus(8), "cluster.train.gpu_memory_gb=288"], "megatron", "take 188.9 GB on each of 64 GPUs with 288"),
        ({"model_type": "gemma3"}, gpus(1), "dtensor", "the Megatron backend has no 'gemma3' models"),
        (LLAMA_70B, [*gpus(2), "cluster.train.gpu=b200"], "dtensor", "take 75.7 GB on each of 16 GPUs with 191.5"),
    ],
)
def test_by_size(load, described, overrides, chosen, reason):
    _, choice = backend_choice.choose(load(described, *overrides))
    assert choice.backend == chosen
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("described", "nodes", "key", "says"),
    [
        (DEEPSEEK_671B, 64, KEY, "at least 128 GPUs split the model"),
        (LLAMA_70B, 2, "cluster.train", "under FSDP2 70.6e9 parameters would take 75.7 GB on each of 16 GPUs with 84.9"),
    ],
)
def test_a_model_that_fits_only_with_more_keys_is_refused(load, described, nodes, key, says):
    batch = ["policy.train_global_batch_size=512", "grpo.num_prompts_per_step=256"]
    with refused((key, "out-of-memory")) as error:
        backend_choice.choose(load(described, *gpus(nodes), *batch))
    assert says in str(error.value)
    layout = [f"{KEY}.pipeline_model_parallel_size={nodes // 4 or 1}", f"{KEY}.tensor_model_parallel_size=8"]
    assert backend_choice.choose(load(described, *gpus(nodes), *batch, *layout))[1].backend == "megatron"


def test_the_backend_for_a_model_that_does_not_exist_yet(load, tmp_path):
    recipe = load(model("llama"), *gpus(1), f"policy.model_name={tmp_path}/runs/base/hf")
    _, choice = backend_choice.choose(recipe, [tmp_path / "runs/base"])
    assert choice.backend == "dtensor" and "does not exist yet" in choice.reason
    check(backend_choice.choose(recipe, [tmp_path / "runs/base"])[0], [tmp_path / "runs/base"])


def test_the_model_of_a_needed_run_has_the_size_of_its_initial_model(load, tmp_path):
    """Check also a chain, where that model is itself of another run that has not run yet."""
    folders = [tmp_path / "runs/base", tmp_path / "runs/next"]
    base = load(model("llama"))
    after = replace(base.policy, model_name=f"{folders[0]}/hf")
    pending = [PendingModel(folders[0], base.policy), PendingModel(folders[1], after)]
    here = backend_choice.choose(load(model("llama"), *gpus(1)))[1]
    for folder in folders:
        assert backend_choice.choose(load(model("llama"), *gpus(1), f"policy.model_name={folder}/hf"), pending)[1] == here


def test_a_resumed_run_keeps_its_backend(load, tmp_path):
    begun, _ = backend_choice.choose(load(model("llama"), f"{KEY}.enabled=true"))
    recipe = load(model("llama"), "cluster.train.nodes=2")
    (tmp_path / "run").mkdir()
    config.write(begun, tmp_path / "run/recipe.yaml")
    recipe, choice = backend_choice.choose(recipe, before=run_setup.earlier(recipe))
    assert (choice.backend, choice.reason) == ("megatron", "the run began with it")
    run_setup.check(recipe)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time": 1}\n')
    other, _ = backend_choice.choose(load(model("llama"), f"{KEY}.enabled=false"), before=run_setup.earlier(recipe))
    with pytest.raises(RecipeError, match=r"enabled is (True|False) in the run"):
        run_setup.check(other)


def test_the_written_recipe_has_the_chosen_backend(load, tmp_path):
    recipe, _ = backend_choice.choose(load(model("llama"), f"{KEY}.tensor_model_parallel_size=2"))
    config.write(recipe, tmp_path / "recipe.yaml")
    again = config.read(tmp_path / "recipe.yaml")
    assert again == recipe and config.uses_megatron(again.policy)


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ([f"{KEY}.tensor_model_parallel_size=2"], "1"),
        ([f"{KEY}.context_parallel_size=2"], "1"),
        ([], None),
        ([f"{KEY}.tensor_model_parallel_size=2", "cluster.train.gpu=b200"], None),
        ([f"{KEY}.tensor_model_parallel_size=2", "cluster.train.gpus_per_node=0", "cluster.train.ranks_per_node=2"], None),
        ([f"{KEY}.tensor_model_parallel_size=2", "cluster.train.env_vars={CUDA_DEVICE_MAX_CONNECTIONS: '8'}"], "8"),
    ],
)
def test_megatron_gets_one_connection_where_it_relies_on_the_order_of_kernels(load, overrides, value):
    recipe = load(model("llama"), f"{KEY}.enabled=true", "cluster.train.gpus_per_node=2", *overrides)
    found = components(recipe)
    assert found["train"].env_vars.get("CUDA_DEVICE_MAX_CONNECTIONS") == value
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found["generate"].env_vars
    assert len(list(cuda_variables.notes(recipe))) == (value == "1")
    of_fsdp = components(config.with_backend(recipe, "dtensor"))["train"].env_vars
    assert of_fsdp.get("CUDA_DEVICE_MAX_CONNECTIONS") == recipe.cluster.train.env_vars.get("CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize("family", ["llama", *architecture.NOT_IN_FLOAT16])
def test_families_that_vllm_does_not_serve_in_float16_are_refused(load, family):
    folder = model("llama", model_type=family)
    found = {}
    for backend_name in ("vllm", "transformers"):
        recipe = load(folder, "policy.precision=float16", f"policy.generation.backend={backend_name}")
        found[backend_name] = ("policy.precision", "unsupported") in named(architecture.problems(recipe))
    assert found == {"vllm": family != "llama", "transformers": False}


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_judge_that_vllm_does_not_serve_in_float16_is_refused(load, precision):
    recipe = load(model("llama", model_type="gemma2"), f"policy.precision={precision}")
    found = named(architecture._served_problems(recipe, "evaluate.judge.model_name", recipe.policy, ()))
    assert found == ({("policy.precision", "unsupported")} if precision == "float16" else set())


def test_vllm_names_the_families_that_it_does_not_serve_in_float16():
    table = pytest.importorskip("vllm.config.model")._FLOAT16_NOT_SUPPORTED_MODELS
    assert set(table) == set(architecture.NOT_IN_FLOAT16)


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["policy.precision=float32"], "ieee"),
        (["policy.precision=bfloat16"], None),
        (["policy.precision=float32", "cluster.generate.gpus_per_node=0"], None),
        (["policy.precision=float32", "policy.generation.backend=transformers"], None),
        (["policy.precision=float32", "cluster.generate.env_vars={TRITON_F32_DEFAULT: tf32}"], "tf32"),
    ],
)
def test_engines_in_float32_do_not_round_to_tf32(load, overrides, value):
    """Or the log-probs of tiny recipes on GPUs would exceed the bounds that hold on CPUs, such as those of recipes/sweeps."""
    found = components(load(model("llama"), "cluster.generate.gpus_per_node=1", *overrides))
    assert found["generate"].env_vars.get("TRITON_F32_DEFAULT") == value
    assert "TRITON_F32_DEFAULT" not in found["train"].env_vars


@pytest.mark.parametrize(
    ("component", "variables", "value"),
    [
        ("train", {}, "expandable_segments:True"),
        ("reward", {"CUDA_VISIBLE_DEVICES": "0,1"}, "expandable_segments:True"),
        ("train", {"CUDA_VISIBLE_DEVICES": ""}, None),
        ("train", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("train", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("generate", {}, None),
        ("judge", {}, None),
    ],
)
def test_memory_of_train_ranks_does_not_fragment(monkeypatch, component, variables, value):
    """The new name of the variable overrides the old one, so a rank sets it only where neither is: an image may have either."""
    for name in (*rank_task.ALLOCATORS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, given in ({"HETSTEP_COMPONENT": component} | variables).items():
        monkeypatch.setenv(name, given)
    rank_task.set_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == value
    os.environ.pop("PYTORCH_ALLOC_CONF", None)


def test_the_launcher_sets_no_allocator(load):
    """The variable would override what the image or the node sets under the old name."""
    found = components(load(model("llama"), f"{KEY}.enabled=true", "cluster.train.gpus_per_node=2"))
    assert not {*rank_task.ALLOCATORS} & {name for component in found.values() for name in component.env_vars}


# ---- sizes ----------------------------------------------------------------------------------------------------------------


BIASED = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), *BIASED])
def test_parameter_counts_equal_transformers(family, changes, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = {key: value for key, value in model(family, **changes).items() if key != "model_type"}
    hf = AutoConfig.for_model(family, **described)
    hf.save_pretrained(tmp_path)  # the keys as transformers writes them
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(hf)
    written = json.loads((tmp_path / "config.json").read_text())
    shape = ModelShape.of(written)
    assert shape == ModelShape.of(model(family, **changes))
    named = {name: parameter.numel() for name, parameter in whole.named_parameters()}

    def of(*parts: str) -> int:
        return sum(numel for name, numel in named.items() if any(part in name for part in parts))

    assert shape.parameters == sum(named.values())
    assert shape.embedding == of("embed_tokens", "embeddings", "lm_head")
    assert shape.routed == of("mlp.experts.", "block_sparse_moe.experts.", "mixer.experts.")
    layers = [of(f"layers.{layer}.") for layer in range(6)]
    assert max(layers) == shape.largest_layer


@pytest.mark.parametrize(("precision", "cut", "each"), [("bfloat16", 1, 6 + 12 / 8), ("float32", 4, (8 + 8 / 2) / 4)])
def test_bytes(precision, cut, each):
    """Check Megatron-Core's bytes of a parameter by its guide to the distributed optimizer, on 8 GPUs; the model is split by
    `cut`.
    """
    shape = ModelShape.of(LLAMA_70B)
    assert shape.parameters == 70_553_706_496  # Llama 3 70B
    held = [TrainModel(PolicyConfig(precision=precision, generation=GenerationConfig(temperature=1.0)), shape)]
    assert megatron_bytes(held, 8, cut) == pytest.approx(each * shape.parameters, rel=1e-4)
    in_use = 3 * PRECISIONS[precision] * shape.largest_layer
    assert fsdp_bytes(held, 4) == pytest.approx(16 * shape.parameters / 4 + in_use)


# ---- limits of Megatron-Core ----------------------------------------------------------------------------------------------


def sizes(**given: int) -> list[str]:
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model", "etp": "expert_tensor"}
    return [f"{KEY}.{names[name]}_parallel_size={size}" for name, size in given.items()]


SP = f"{KEY}.sequence_parallel=true"
PEFT = f"{KEY}.peft.enabled=true"
LORA_REFIT = "policy.generation.lora_refit"
LORA = "policy.dtensor_cfg.lora_cfg"
FSDP_LORA = ["policy.dtensor_cfg.enabled=true", f"{LORA}.enabled=true", f"{LORA}.match_all_linear=false"]
FSDP_LORA += [f"{LORA}.target_modules=[o_proj]"]
SERVED = (f"{LORA_REFIT}=adapter", "policy.generation.backend=vllm", "policy.random_init=false")
FIRST, LAST = (f"{KEY}.num_layers_in_{which}_pipeline_stage" for which in ("first", "last"))


MODEL = "policy.model_name"
TP, PP, EP, ETP = (
    f"{KEY}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)


@pytest.mark.parametrize(
    ("described", "overrides", "key", "code"),
    [
        (model("llama", model_type="gemma3"), [], MODEL, "unsupported"),
        (model("llama", quantization_config={"quant_method": "awq"}), [], MODEL, "unsupported"),
        (model("llama", attention_bias=True), [], MODEL, "unsupported"),
        (model("qwen3", hidden_act="gelu"), [], MODEL, "unsupported"),
        (
            model("llama", rope_scaling={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
            [],
            MODEL,
            "unsupported",
        ),
        (model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), [], MODEL, "unsupported"),
        (model("deepseek_v3", rope_scaling={"type": "linear", "factor": 2.0}), [], MODEL, "unsupported"),
        (model("gpt_oss", attention_bias=False), [], MODEL, "unsupported"),
        (model("gemma3_text", attn_logit_softcapping=50.0), [], MODEL, "unsupported"),
        (model("llama", num_key_value_heads=3, num_attention_heads=6, hidden_size=96), sizes(tp=2), TP, "not-divisible"),
        (model("llama", intermediate_size=98), sizes(tp=4), TP, "not-divisible"),
        (model("deepseek_v3", moe_intermediate_size=33), [*sizes(tp=4, ep=2), SP], TP, "not-divisible"),
        (model("llama"), sizes(pp=4), PP, "not-divisible"),
        (model("llama"), [*sizes(pp=4), f"{FIRST}=1"], FIRST, "not-divisible"),
        (model("llama"), [*sizes(pp=2), f"{FIRST}=2", f"{LAST}=3"], FIRST, "not-divisible"),
        (model("llama"), [*sizes(pp=4), f"{FIRST}=3", f"{LAST}=3"], FIRST, "not-divisible"),
        (model("llama"), sizes(ep=2), EP, "too-large"),
        (model("llama"), sizes(tp=2, etp=2), ETP, "too-large"),
        (model("mixtral"), sizes(ep=8), EP, "not-divisible"),
        (model("qwen3_moe", moe_intermediate_size=33), [*sizes(tp=2), SP], ETP, "not-divisible"),
        (model("qwen3_moe"), [*sizes(tp=2, etp=1), SP], ETP, "unsupported"),
        (model("qwen3_moe"), sizes(etp=2), ETP, "unsupported"),
        (model("gpt_oss"), [*sizes(tp=2), SP], ETP, "unsupported"),
        (model("nemotron_h", mamba_num_heads=12), sizes(cp=8), f"{KEY}.context_parallel_size", "not-divisible"),
        (model("qwen3_5_text", linear_num_key_heads=2), sizes(tp=4), TP, "not-divisible"),
        (model("qwen3_5_text", linear_num_value_heads=12), sizes(cp=8), f"{KEY}.context_parallel_size", "not-divisible"),
        (model("qwen3_moe"), sizes(tp=2), f"{KEY}.sequence_parallel", "unsupported"),
        (model("gemma4_text"), sizes(tp=4), TP, "not-divisible"),
        (model("gemma4_text", hidden_size_per_layer_input=8), [], MODEL, "unsupported"),
        (model("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2, **EXPERTS), [], MODEL, "unsupported"),
        (model("glm_moe_dsa", index_topk=16), [], MODEL, "unsupported"),
        (model("glm_moe_dsa", index_topk_freq=2), [], MODEL, "unsupported"),
        (model("nemotron_h", tie_word_embeddings=True), [], MODEL, "unsupported"),
        (model("llama"), [PEFT, f"{KEY}.peft.target_modules=[q_proj]"], f"{KEY}.peft.target_modules", "not-a-choice"),
        (model("gpt_oss"), [PEFT], f"{KEY}.peft.exclude_modules", "unsupported"),
        (model("qwen3_moe"), [PEFT, f"{KEY}.moe_grouped_gemm=true"], f"{KEY}.moe_grouped_gemm", "contradiction"),
        (model("qwen3_moe"), [PEFT, *SERVED], LORA_REFIT, "unsupported"),  # experts
        (model("deepseek_v3"), [PEFT, *SERVED, f"{KEY}.peft.target_modules=[linear_kv_up_proj]"], LORA_REFIT, "unsupported"),
        (
            model("qwen3_moe"),
            [f"{KEY}.moe_router_bias_update_rate=0.001"],
            f"{KEY}.moe_router_bias_update_rate",
            "has-no-effect",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_by_key(load, described, overrides, key, code):
    recipe, _ = backend_choice.choose(load(described, f"{KEY}.enabled=true", *overrides))
    with refused((key, code)):
        check(recipe)


@pytest.mark.parametrize(
    "described",
    [
        model("mistral", sliding_window=16),
        model("mixtral", sliding_window=16),
        model("qwen2", sliding_window=16, use_sliding_window=True),
        model("gemma3_text", sliding_window=16),
        model("gemma4_text", sliding_window=16),
        model("gpt_oss", sliding_window=16),
        model("glm4"),
        model("glm4_moe", use_qk_norm=True),
        model("minimax_m2"),
        {"model_type": "qwen3_5", "text_config": model("qwen3_5_text")},
    ],
    ids=lambda described: described["model_type"],
)
def test_windows_sinks_partial_rope_and_multimodal_checkpoints_are_accepted(load, described):
    check(backend_choice.choose(load(described, f"{KEY}.enabled=true"))[0])


@pytest.mark.parametrize("section", [KEY, "policy.dtensor_cfg"])
def test_quantized_checkpoints_that_ranks_do_not_read_are_refused(load, section):
    for quantization, refuses in (
        ({"quant_method": "mxfp4"}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ({"quant_method": "fp8"}, False),  # one scale for a whole matrix
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, True),
        ({"quant_method": "awq"}, True),
    ):
        recipe, _ = backend_choice.choose(load(model("llama", quantization_config=quantization), f"{section}.enabled=true"))
        for checked in (recipe, replace(recipe, algorithm="evaluate")):
            problems = [problem for problem in architecture.against_layout(checked) if "quantized" in problem.message]
            assert [problem.code for problem in problems] == (["unsupported"] if refuses else [])


@pytest.mark.parametrize("adapters", [[f"{KEY}.enabled=true", PEFT, f"{KEY}.peft.target_modules=[linear_proj]"], FSDP_LORA])
def test_adapters_that_engines_serve_wrongly_are_refused(load, adapters):
    recipe, _ = backend_choice.choose(load(model("gpt_oss"), *SERVED, *adapters))
    with pytest.raises(RecipeError, match=f"gpt_oss, whose LoRA in vLLM differs .* Try {LORA_REFIT}=merged"):
        check(recipe)


def test_layers_of_the_first_stage_are_no_problem_of_the_model_without_stages(load):
    """The recipe's own check refuses the key already."""
    recipe, _ = backend_choice.choose(load(model("llama"), f"{KEY}.enabled=true"))
    megatron = replace(recipe.policy.megatron_cfg, num_layers_in_first_pipeline_stage=1)
    check(replace(recipe, policy=replace(recipe.policy, megatron_cfg=megatron)))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sequences_beyond_the_learned_positions(load, family):
    """Models compute them with RoPE, but not with a table of positions, and engines refuse them."""
    described = {**model("llama"), "model_type": family, "max_position_embeddings": 16}
    sampled = load(described, "policy.max_total_sequence_length=64")
    trained = replace(sampled, algorithm="sft")
    for recipe, is_refused in ((sampled, True), (trained, family == "opt")):
        problems = named(architecture.against_layout(recipe))
        assert (("policy.max_total_sequence_length", "too-large") in problems) == is_refused
        assert len([*architecture.notes(recipe)]) == (not is_refused)


def test_the_only_size_that_divides_is_named(load):
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    recipe, _ = backend_choice.choose(load(model("llama", **heads), f"{KEY}.enabled=true", *sizes(tp=2)))
    with pytest.raises(RecipeError, match="expected 1, which fits the model's 1 attention heads and 1 key-value"):
        check(recipe)


def test_sizes_that_would_divide_are_named(load):
    heads = {"num_attention_heads": 24, "num_key_value_heads": 3}
    recipe, _ = backend_choice.choose(load(model("llama", hidden_size=96, **heads), f"{KEY}.enabled=true", *sizes(tp=8)))
    expected = "got 8; expected one of 1, 3, 6, 12, 24, which fit the model's 24 attention heads and 3 key-value heads"
    with pytest.raises(RecipeError, match=expected):
        check(recipe)


@pytest.mark.parametrize("keys", [(f"{KEY}.enabled=true", *sizes(tp=8)), ("policy.dtensor_cfg.tensor_parallel_size=8",)])
def test_more_ranks_than_key_value_heads_are_accepted(load, keys):
    check(backend_choice.choose(load(model("llama"), *keys))[0])


def test_joint_projections_do_not_share_heads(load):
    phi3 = {**model("llama"), "model_type": "phi3", "pad_token_id": 0}
    recipe = load(phi3, "policy.dtensor_cfg.tensor_parallel_size=8", *gpus(1))
    assert ("policy.dtensor_cfg.tensor_parallel_size", "not-divisible") in named(architecture.against_layout(recipe))


@pytest.mark.parametrize(
    ("described", "overrides"),
    [
        (model("llama", rope_scaling=LLAMA3), [*sizes(tp=2, pp=2, cp=2), SP]),
        (model("llama"), [*sizes(pp=4), f"{FIRST}=1", f"{LAST}=1"]),
        (model("llama"), [*sizes(pp=2), f"{FIRST}=2"]),
        (model("qwen2", sliding_window=16, use_sliding_window=False), sizes(tp=4)),
        (model("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=6), []),
        (model("qwen2", sliding_window=16, use_sliding_window=True, layer_types=["full_attention"] * 6), []),
        (model("qwen2", sliding_window=32, use_sliding_window=True), []),
        (model("mixtral"), [*sizes(tp=2), SP]),
        (model("qwen3_5_text"), [*sizes(tp=2, pp=2, cp=2), SP]),
        (model("qwen3_5_moe_text"), [*sizes(tp=2, ep=4), SP]),
        (model("qwen3_moe"), [*sizes(tp=2, ep=4), SP]),
        (model("deepseek_v3"), [*sizes(pp=2, ep=4), f"{KEY}.moe_router_bias_update_rate=0.001"]),
    ],
)
def test_a_valid_layout_passes(load, described, overrides):
    check(backend_choice.choose(load(described, f"{KEY}.enabled=true", *overrides))[0])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ALLOWS = "{VLLM_ALLOW_LONG_MAX_MODEL_LEN: '1'}"


@pytest.mark.parametrize(
    ("changes", "overrides", "told"),
    [
        ({"max_position_embeddings": 16}, [], True),
        ({"max_position_embeddings": 32}, [], False),
        ({"max_position_embeddings": 16}, ["policy.hf_config_overrides.max_position_embeddings=64"], False),
        ({"max_position_embeddings": 16}, [f"cluster.generate.env_vars={ALLOWS}"], False),
        ({"max_position_embeddings": 16}, [f"cluster.generate.env_vars={ALLOWS}"], False),
        ({"max_position_embeddings": 16}, ["policy.generation.backend=transformers"], False),
        ({"max_position_embeddings": 16, "model_max_length": 64}, [], False),
    ],
)
def test_vllm_limits_yarn_to_the_configs_length(load, monkeypatch, changes, overrides, told):
    """The train backends stretch 16 positions to 64."""
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    found = list(architecture.problems(load(model("llama", rope_scaling=YARN, **changes), *overrides)))
    assert named(found) == ({("policy.generation.vllm_cfg.max_model_len", "too-large")} if told else set())
    assert all("expected at most 16" in problem.message for problem in found)


def test_stages_are_accepted_as_megatron_core_accepts_them(load):
    """Stages that we accept, Megatron-Core's own configuration accepts too; those we refuse, it refuses."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    for stages, first, last in [
        (2, 2, None),
        (2, None, 5),
        (2, 2, 3),
        (3, 1, 1),
        (3, 2, 2),
        (4, 1, None),
        (4, 3, 3),
        (4, 2, 2),
    ]:
        keys = [f"{FIRST}={first if first else 'null'}", f"{LAST}={last if last else 'null'}"]
        recipe, _ = backend_choice.choose(
            load(model("llama"), f"cluster.train.nodes={stages}", f"{KEY}.enabled=true", *sizes(pp=stages), *keys)
        )
        options = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "pipeline_model_parallel_size": stages}
        options |= {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        try:
            TransformerConfig(**options, pipeline_dtype="float32")
        except ValueError:
            with refused((LAST if first is None else FIRST, "not-divisible")):
                check(recipe)
        else:
            check(recipe)


def test_more_models_take_more_room(load):
    """A model of 8e9 parameters trains under FSDP2 on 8 GPUs of 40 GB; with a critic of that size no layout fits."""
    llama = sized("llama", 4096, 14336, 32, 128256, 32, 8)
    small = [*gpus(1), "cluster.train.gpu_memory_gb=40"]
    assert backend_choice.choose(load(llama, *small))[1].backend == "dtensor"
    ppo = ["algorithm=ppo", "ppo.num_prompts_per_step=256"]
    with refused(("cluster.train", "out-of-memory")):
        backend_choice.choose(load(llama, *small, *ppo))
    assert backend_choice.choose(load(llama, *gpus(1), *ppo))[1].backend == "dtensor"  # an H100 does


def test_a_frozen_model_in_host_memory_takes_little(load, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text(json.dumps(LLAMA_70B))
    distill = ["algorithm=distillation", "distillation.num_prompts_per_step=256", f"teacher.model_name={tmp_path / 'teacher'}"]
    llama = sized("llama", 4096, 14336, 32, 128256, 32, 8)
    offloaded = load(llama, *gpus(1, 8), "cluster.train.gpu_memory_gb=40", *distill)
    assert backend_choice.choose(offloaded)[1].backend == "dtensor"
    with refused(("cluster.train", "out-of-memory")):
        backend_choice.choose(replace(offloaded, teacher=replace(offloaded.teacher, cpu_offload=False)))


def test_adapters_choose_fsdp2(load):
    llama = sized("llama", 4096, 14336, 32, 128256, 32, 8)
    choice = backend_choice.choose(load(llama, *gpus(1), "policy.dtensor_cfg.lora_cfg.enabled=true"))[1]
    assert (choice.backend, choice.reason) == ("dtensor", "policy.dtensor_cfg.lora_cfg is set")
