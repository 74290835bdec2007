"""Recipes with several faults of different kinds: the real command names all of them at once."""

import json

import pytest

from tests.launch.model import write_model, write_recipe
from tests.launch.submission.test_bad_recipes import refuse, told

MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

# (overrides, changes to files by name, key and code of each problem)
BROKEN = {
    "keys, types, choices and layout": (
        [
            "grpo.max_num_step=5",
            "policy.train_micro_batch_size=four",
            "policy.precision=fp4",
            "loss_fn.reference_policy_kl_type=k9",
            f"{VLLM}.tensor_parallel_size=3",
            "policy.dtensor_cfg.tensor_parallel_size=2",
        ],
        {},
        [
            ("grpo.max_num_step", "unknown-key"),
            ("policy.train_micro_batch_size", "wrong-type"),
            ("policy.precision", "not-a-choice"),
            ("loss_fn.reference_policy_kl_type", "not-a-choice"),
            (f"{VLLM}.tensor_parallel_size", "not-divisible"),
            ("policy.dtensor_cfg.tensor_parallel_size", "not-divisible"),
            (f"{VLLM}.tensor_parallel_size", "not-divisible"),
        ],
    ),
    "the files": (
        ["data.train.prompt_file=no.txt", "policy.max_total_sequence_length=65", "policy.random_init=false"],
        {"model/tokenizer.json": None, "data.jsonl": '{"input": "1"}\n[1]\n{"input": \n{"input": "2"}\n'},
        [
            ("policy.max_total_sequence_length", "too-large"),
            ("policy.model_name", "file-not-found"),
            ("policy.tokenizer.name", "file-not-found"),
            ("data.train.prompt_file", "file-not-found"),
            ("data.train.data_path", "bad-record"),
            ("data.train.data_path", "bad-record"),
            ("data.train.data_path", "bad-record"),
        ],
    ),
    "megatron": (
        [
            f"{MEGATRON}.enabled=true",
            "cluster.train.ranks_per_node=6",
            f"{MEGATRON}.tensor_model_parallel_size=4",
            f"{MEGATRON}.mtp_num_layers=1",
            f"{MEGATRON}.recompute_num_layers=1",
            f"{MEGATRON}.model_overrides={{num_layers: 3, masked_softmax_fusio: true}}",
            f"{MEGATRON}.scheduler.lr_warmup_iters=2",
        ],
        {},
        [
            (f"{MEGATRON}.tensor_model_parallel_size", "not-divisible"),
            (f"{MEGATRON}.mtp_num_layers", "unsupported"),
            (f"{MEGATRON}.recompute_num_layers", "has-no-effect"),
            (f"{MEGATRON}.model_overrides.num_layers", "contradiction"),
            (f"{MEGATRON}.model_overrides.masked_softmax_fusio", "unknown-key"),
            (f"{MEGATRON}.scheduler", "contradiction"),
        ],
    ),
    "a mixture of experts": (
        [
            f"{MEGATRON}.enabled=true",
            "cluster.train.ranks_per_node=4",
            f"{MEGATRON}.expert_model_parallel_size=4",
            f"{MEGATRON}.moe_router_bias_update_rate=0.1",
            f"{MEGATRON}.pipeline_model_parallel_size=4",
            "cluster.generate.ranks_per_node=4",
            f"{VLLM}.tensor_parallel_size=4",
            f"{VLLM}.expert_parallel_size=4",
        ],
        {"model/config.json": json.dumps(EXPERTS)},
        [
            (f"{MEGATRON}.expert_model_parallel_size", "not-divisible"),
            (f"{MEGATRON}.moe_router_bias_update_rate", "has-no-effect"),
            (f"{MEGATRON}.pipeline_model_parallel_size", "not-divisible"),
            (f"{MEGATRON}.expert_model_parallel_size", "not-divisible"),
            (f"{VLLM}.expert_parallel_size", "not-divisible"),
        ],
    ),
    "libraries": (
        [
            "policy.generation.vllm_kwargs={kv_cache_memory_byte: 3, load_format: auto, max_model_len: 8}",
            "policy.optimizer.kwargs={lr: fast, decay: 1}",
            "policy.scheduler={name: torch.optim.lr_scheduler.NoneLR}",
            "policy.hf_config_overrides={hidden_sizes: 3, rope_parameters: {}, num_key_value_heads: two}",
            "cluster.train.env_vars={A: true}",
        ],
        {},
        [
            ("policy.generation.vllm_kwargs.kv_cache_memory_byte", "unknown-key"),
            ("policy.generation.vllm_kwargs.load_format", "contradiction"),
            ("policy.generation.vllm_kwargs.max_model_len", "contradiction"),
            ("policy.optimizer.kwargs.lr", "wrong-type"),
            ("policy.optimizer.kwargs.decay", "unknown-key"),
            ("policy.scheduler.name", "not-a-choice"),
            ("policy.hf_config_overrides.hidden_sizes", "unknown-key"),
            ("policy.hf_config_overrides.num_key_value_heads", "wrong-type"),
            ("cluster.train.env_vars.A", "wrong-type"),
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_all_problems_are_named_at_once_and_no_others(tmp_path, name):
    overrides, files, says = BROKEN[name]
    write_recipe(tmp_path)
    for path, text in files.items():
        (tmp_path / path).unlink()
        if text is not None:
            (tmp_path / path).write_text(text)
    problems = told(refuse(tmp_path, *overrides, count=len(says)))
    for key, code in says:
        problems.remove(next(line for line in problems if f"{key}: " in line and line.endswith(f"[{code}]")))
    assert problems == []


def test_a_model_named_by_several_keys_is_one_problem(tmp_path):
    write_recipe(tmp_path)
    (problem,) = told(refuse(tmp_path, "policy.model_name=./none"))
    assert problem.startswith(f"policy.model_name: there is no folder {tmp_path}/none. Try a folder that exists, such as")


def test_a_file_of_bad_lines_is_reported_by_a_few_lines(tmp_path):
    write_model(tmp_path / "model")
    lines = [json.dumps({"input": str(n)}) for n in range(3000)] + ["{"] * 2000 + [json.dumps([n]) for n in range(10)]
    lines += [json.dumps(value) for value in ("a", 1, None, True, {})]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    write_recipe(tmp_path)
    problems = told(refuse(tmp_path, count=6))
    assert "data.jsonl:1: no column 'output'" in problems[0]
    assert "data.jsonl:3001: not JSON" in problems[1]
    assert "(and in 1999 more: lines 3002, 3003, 3004, 3005, 3006 ...)" in problems[1]
    assert "2 more lines have other faults" in problems[-1]
