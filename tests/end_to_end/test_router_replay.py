"""Whole runs with router replay: log-probs of engine and trainer differ less."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.end_to_end.runs import LOCAL, Run, submit
from tests.end_to_end.test_megatron import SHAPE, megatron

pytestmark = pytest.mark.full
BACKENDS = {"fsdp2": (), "megatron": megatron(freeze_moe_router="false")}
# Many experts with nearly equal scores, in half precision: the routers often choose otherwise.
MIXTURE = Qwen3MoeConfig(
    **{**SHAPE, "num_hidden_layers": 4}, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(MIXTURE, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.mul_(4.0 if "experts" in name else 1.0)  # so that the choice matters
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def run(folder, model, *keys: str) -> Run:
    of_model = ("policy.random_init=false", f"policy.model_name={model}", "policy.tokenizer.name=recipes/tiny")
    engine = ("policy.generation.backend=vllm", "policy.precision=bfloat16", "cluster.timeouts.silence=300")
    steps = ("grpo.max_num_steps=2", "checkpointing.enabled=false")
    done = submit(folder, *LOCAL, *of_model, *engine, *steps, *keys)
    assert done.status == 0, done.output
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_and_trainer_differ_less(tmp_path, model, backend):
    errors = []
    for replays in ("false", "true"):
        done = run(tmp_path / replays, model, *BACKENDS[backend], f"policy.router_replay.enabled={replays}")
        errors.append(done.metrics()[-1]["train/token_mult_prob_error"] - 1)
    without, replayed = errors
    print(f"{backend}: token_mult_prob_error - 1: {without:.4f} without, {replayed:.4f} with router replay")
    assert 0 < replayed < without / 2
