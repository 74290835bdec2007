"""Translate verl's generative reward model, which the user's own score asks: here the judge of the job.

verl serves it, and the score posts to http://{reward_router_address}/v1/chat/completions (docs/advance/reward_loop.rst). A
reward model without such a score classifies sequences, which no recipe of verl combines with the environments here.
"""

from __future__ import annotations

from launch.recipes.translation.rules import Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator
from launch.recipes.verl.rollout_section import REPLICAS, translate_engine, translate_experts

SECTIONS = {"reward.reward_model": "model_path", "reward_model": "model.path"}
"""verl's section, in its present and its older form -> key of the model in it."""
COPIED = {  # key of `rollout` -> ours
    "tensor_model_parallel_size": "judge.vllm_cfg.tensor_parallel_size",
    "pipeline_model_parallel_size": "judge.vllm_cfg.pipeline_parallel_size",
    "gpu_memory_utilization": "judge.vllm_cfg.gpu_memory_utilization",
    "enforce_eager": "judge.vllm_cfg.enforce_eager",
    "enable_prefix_caching": "judge.vllm_cfg.enable_prefix_caching",
    "max_num_seqs": "judge.max_num_seqs",
    "max_num_batched_tokens": "judge.vllm_kwargs.max_num_batched_tokens",
}
DEFAULTS = {"tensor_model_parallel_size": 2, "prompt_length": 2048, "response_length": 2048}
"""verl's defaults that differ from ours (verl/trainer/config/reward/reward.yaml)."""
PRECISIONS = ("bfloat16", "float16", "float32")
TIMEOUT_S = 600.0
"""Time of one turn of the environment that asks the judge; verl has no limit."""


def translate(t: Translator, scored: bool) -> None:
    """Translate the reward model. scored: whether the recipe has a score of the user's own."""
    for section, path in SECTIONS.items():
        if t.get(f"{section}.enable") is not True:
            continue
        if not scored:
            instead = "false, or with a generative one reward.custom_reward_function.path=FILE.py"
            t.lacks(f"{section}.enable", True, "a reward model beside a score", instead)
            continue
        _serve(t, section, f"{section}.{path}")
    for section in SECTIONS:
        rules = (Done("enable"), Ignored("model_path model.* rollout.* n_gpus_per_node nnodes enable_resource_pool _target_"))
        apply(t, under(section, rules))


def _serve(t: Translator, section: str, model: str) -> None:
    rollout = f"{section}.rollout"
    t.put("judge.model_name", t.consume(model), model)
    t.put("env.reward.timeout_s", TIMEOUT_S, f"{section}.enable")
    for name, ours in COPIED.items():
        if (value := t.consume(f"{rollout}.{name}", DEFAULTS.get(name))) is not None:
            t.put(ours, value, f"{rollout}.{name}")
    lengths = [t.consume(f"{rollout}.{name}", DEFAULTS[name]) for name in ("prompt_length", "response_length")]
    longest = t.consume(f"{rollout}.max_model_len")
    if longest is None and all(isinstance(length, int) for length in lengths):
        longest = sum(lengths)
    t.put("judge.vllm_cfg.max_model_len", longest, f"{rollout}.max_model_len")
    if (precision := t.consume(f"{rollout}.dtype")) in PRECISIONS:
        t.put("judge.precision", precision, f"{rollout}.dtype")
    tensor, stages = (t.get_layer(f"judge.vllm_cfg.{name}_parallel_size") for name in ("tensor", "pipeline"))
    _place(t, section, tensor * stages if isinstance(tensor, int) and isinstance(stages, int) else tensor)
    translate_engine(t, rollout, "judge")
    translate_experts(t, rollout, "judge.vllm_cfg", tensor)
    text = "a request without a temperature gets a greedy reply; in verl it has this temperature, 1 by default"
    t.change(f"{rollout}.temperature", text)
    done = Done("name expert_parallel_size temperature")
    apply(t, under(rollout, (Only("quantization", (None,), "a judge in this precision", "null"), REPLICAS, done)))


def _place(t: Translator, section: str, parallel: object) -> None:
    """Give the judge its GPUs. In verl it may take turns with the policy; here its GPUs are its own."""
    pool = t.consume(f"{section}.enable_resource_pool") is True
    nodes, gpus = t.consume(f"{section}.nnodes"), t.consume(f"{section}.n_gpus_per_node", 8)
    if not pool:
        nodes, gpus = 1, parallel
        t.change(f"{section}.enable_resource_pool", f"the judge has {gpus} GPUs of its own; in verl those of the policy")
    t.put("cluster.judge.nodes", nodes or 1, f"{section}.nnodes")
    t.put("cluster.judge.gpus_per_node", gpus, f"{section}.n_gpus_per_node")
