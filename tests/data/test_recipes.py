"""Every recipe in the repository loads; the data of the tiny ones is encoded up to the items of a step."""

import numpy as np
import pytest

from pipeline import config
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.datasets import load_records
from pipeline.data.mixture import build_streams
from pipeline.data.scratchpad import addition
from pipeline.data.stream import ExampleStream, LabeledStream, PairStream, PromptStream
from pipeline.environments.build_environments import build

FEWER = ["data.train.kwargs.size=2000"]  # all of the 20,000 are encoded at the start


def test_tiny_sft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config.RECIPES.parent)
    recipe = config.load("tiny_sft", FEWER)
    tokenizer = load_tokenizer(recipe.policy.tokenizer)
    encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, recipe.data.train)
    stream = ExampleStream(load_records(recipe.data.train, recipe.sft.seed), encoder, seed=recipe.sft.seed)
    examples = stream.take(recipe.policy.train_global_batch_size)
    assert len(examples) == 64 and stream.dropped_at_start == 0
    for example in examples:
        text = tokenizer.decode(example.tokens[example.loss_mask])
        assert tokenizer.decode(example.tokens[~example.loss_mask]).endswith("=")
        assert text.endswith("</s>") and ";" in text


def test_tiny_grpo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config.RECIPES.parent)
    sft, grpo = config.load("tiny_sft"), config.load("tiny_grpo", FEWER)
    assert grpo.needs == ["tiny_sft"] and grpo.policy.model_name == f"{sft.run_dir}/hf"
    tokenizer = load_tokenizer(sft.policy.tokenizer)
    encoder = Encoder(tokenizer, grpo.policy.tokenizer, grpo.data, grpo.data.train)
    seed = grpo.grpo.seed
    records, longest = load_records(grpo.data.train, seed), grpo.policy.max_total_sequence_length
    prompts = PromptStream(records, encoder, seed=seed, max_length=longest).take(grpo.grpo.num_prompts_per_step)
    solutions = {record["input"]: record["output"] for record in addition("train", 2000, seed, digits=[1, 2])}
    environment = build(grpo.env)["addition"]
    for prompt in prompts:
        text = tokenizer.decode(prompt.tokens, skip_special_tokens=True)
        assert environment.step(prompt, solutions[text]).reward == 1.0
        assert environment.step(prompt, solutions[text] + "0").reward == 0.0
        assert len(prompt.tokens) + grpo.policy.generation.max_new_tokens <= grpo.policy.max_total_sequence_length
    assert np.array_equal([prompt.index for prompt in prompts], np.arange(16))


@pytest.mark.parametrize(
    ("name", "margins"), [pytest.param("tiny_dpo", {0.0}, marks=pytest.mark.full), ("tiny_rm", {1.0, 2.0})]
)
def test_tiny_pairs(name: str, margins: set[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config.RECIPES.parent)
    sft, recipe = config.load("tiny_sft"), config.load(name, FEWER)
    assert recipe.needs == ["tiny_sft"] and recipe.policy.model_name == f"{sft.run_dir}/hf"
    tokenizer = load_tokenizer(sft.policy.tokenizer)
    stream, validation = build_streams(recipe, tokenizer)
    assert isinstance(stream, PairStream) and stream.dropped_at_start == 0 and len(validation) == 256
    pairs = stream.take(recipe.policy.train_global_batch_size)
    for chosen, rejected in pairs:
        texts = [tokenizer.decode(sample.tokens[sample.loss_mask]) for sample in (chosen, rejected)]
        prompts = [tokenizer.decode(sample.tokens[~sample.loss_mask]) for sample in (chosen, rejected)]
        assert prompts[0] == prompts[1] and texts[0] != texts[1]
        assert texts[0].removesuffix("</s>").endswith(f";{eval(prompts[0].removeprefix('<s>').rstrip('='))}")
    assert {chosen.reward for chosen, _ in pairs} == margins


def test_kto_learns_from_both_answers_of_pairs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config.RECIPES.parent)
    sft, recipe = config.load("tiny_sft"), config.load("tiny_dpo", [*FEWER, "algorithm=kto"])
    tokenizer = load_tokenizer(sft.policy.tokenizer)
    stream, validation = build_streams(recipe, tokenizer)
    assert isinstance(stream, LabeledStream) and stream.records == 4000 and len(validation) == 256
    assert [sample.reward for sample in validation[:4]] == [1.0, 0.0, 1.0, 0.0]
    samples = stream.take(recipe.policy.train_global_batch_size)
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    for sample in samples:
        text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
        assert text.endswith(f";{eval(text.partition('=')[0])}") == bool(sample.reward), text


def test_tiny_grpo_rm(monkeypatch: pytest.MonkeyPatch):
    """Each prompt has the columns for its reward model; it needs no answers."""
    monkeypatch.chdir(config.RECIPES.parent)
    recipe = config.load("tiny_grpo_rm", ["data.train.output_key=nothing_like_it"])
    stream, validation = build_streams(recipe, load_tokenizer(config.load("tiny_sft").policy.tokenizer))
    assert stream.take(1)[0].task.keys() == {"text"}
    assert validation[0].task.keys() == {"text", "answer"}
