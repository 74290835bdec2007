"""Planned refits between real backends and real vLLM engines: see `matrix`."""

import pytest

from tests.end_to_end.fresh_vllm import greedy
from tests.refit import matrix


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    matrix.write_models(folder)
    return folder


def check(chosen, folder, transport="planned"):
    fresh = {model: greedy(folder / model, matrix.PROMPTS, matrix.MAX_TOKENS) for model in {case.model for case in chosen}}
    for case, found in zip(chosen, matrix.run(chosen, folder, transport), strict=True):
        assert found["rounds"] > 3
        for rank in found["generate"]:
            padding = 8 * 4 if case.model.startswith("gemma4") else 0  # a layer's factor takes a whole word
            assert 0 <= rank["received"] - rank["owned"] <= padding, case
            assert rank["wrong"] == [], case
            assert rank["completions"] == fresh[case.model], case


@pytest.mark.full  # by default: test_transfer.py, tests/generate/test_vllm.py, and the runs in tests/end_to_end
def test_refits_between_a_few_layouts(models):
    train = ("fsdp2 dp2", "megatron tp2 pp2")
    check(matrix.cases(("llama",), train, ("tp2 x 2",)) + matrix.cases(("qwen3_moe",), ("megatron tp2 ep2",), ("ep2",)), models)


@pytest.mark.full
def test_refits_between_ranks_that_share_key_value_heads(models):
    check(matrix.cases(("llama",), ("fsdp2 tp4", "megatron tp4"), ("tp4", "tp1")), models)


@pytest.mark.full
def test_refits_of_layers_that_differ(models):
    """Keys that are values too, shared keys and values, and embeddings for each layer."""
    check(matrix.cases(("gemma4_moe", "gemma4_per_layer"), ("fsdp2 dp2", "fsdp2 dp2 tp2"), ("tp2",)), models)


@pytest.mark.long
@pytest.mark.timeout(4800)
def test_refits_between_all_layouts(models):
    check(matrix.cases(), models)
