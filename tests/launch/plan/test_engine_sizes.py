"""The sequences and tokens that an engine takes if the recipe leaves them open: those of vLLM's own function."""

from types import SimpleNamespace

import pytest
import yaml
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from launch.plan import generate_time
from launch.plan.engine_sizes import engine_sizes
from pipeline import config
from pipeline.config import RECIPES, hardware
from pipeline.config.generation import MOST_SEQUENCES
from tests.launch.plan.plans import planned, table
from tests.launch.plan.test_memory import HYBRID, LLAMA, recipe

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
