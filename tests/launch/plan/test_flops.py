"""Operations and lengths against closed forms and sampling."""

import math
import random

import pytest

from launch.plan.lengths import Lengths, assume
from launch.recipes.model_files import planning_config
from pipeline import config
from pipeline.config import PolicyConfig
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from tests.launch.model import write_recipe

TINY = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 10}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def shape(name: str) -> ModelShape:
    return ModelShape.of(planning_config(PolicyConfig(model_name=name)))


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


# ---- lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "limit"), [(795, 3831), (3283, 3896), (100, 20000), (512, 512)])
def test_the_length_distribution_equals_its_samples(mean, limit):
    lengths = Lengths(100, mean, limit, "")
    generator, scale = random.Random(0), lengths.scale
    drawn = [limit if math.isinf(scale) else min(limit, generator.expovariate(1 / scale)) for _ in range(200_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.01)
    assert sum(x * x for x in drawn) / len(drawn) == pytest.approx(lengths.squared_answer, rel=0.02)
    sequences = sum((100 + x) ** 2 for x in drawn) / len(drawn)
    assert sequences == pytest.approx(lengths.squared_sequence, rel=0.02)
    longest = [max(drawn[i : i + 50]) for i in range(0, len(drawn), 50)]
    assert sum(longest) / len(longest) == pytest.approx(lengths.longest(50), rel=0.1)


def test_lengths_of_a_recipe(tmp_path):
    path = str(write_recipe(tmp_path))
    guess = assume(config.load(path))
    assert (guess.prompt, guess.answer, guess.limit) == (8, 12, 24) and "a guess" in guess.source
    said = assume(config.load(path, ["plan.answer_tokens=5", "policy.generation.max_new_tokens=10"]), 4, 9, "runs/x")
    assert (said.prompt, said.answer, said.limit) == (4, 5, 10)
    assert "plan.answer_tokens" in said.source and "the mean in runs/x" in said.source
    assert assume(config.load(path, ["plan.answer_tokens=500"])).answer == 24  # not beyond the limit
