"""The language model of a multimodal checkpoint trains as the model of text alone does; its other parts stay as they are."""

import pytest
import torch

from pipeline.config import LoRAConfig
from tests.train import attention_models, cases, multimodal, ranks

pytestmark = pytest.mark.usefixtures("realm")
SHORT, LONG = ("gemma4_per_layer", "qwen3_5_moe_text"), ("gemma3_text", "qwen3_5_text", "ministral3")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.full) for name in LONG)])
def test_the_language_model_trains_alone(name, tmp_path):
    attention_models.write(tmp_path, [name])
    saved = multimodal.write(tmp_path / name, tmp_path / "both")
    trained = ranks.backend(cases.policy(tmp_path / "both"))
    assert all(torch.equal(tensor, saved[n]) for n, tensor in ranks.weights(trained).items())
    cases.check_all_held(cases.check_layout(trained, saved))
    logprobs, gradients, _ = cases.eager(tmp_path / name)
    batch = cases.pack(list(range(len(cases.LENGTHS))))
    assert (trained.forward([batch])[0].logprobs - torch.cat(logprobs)).abs().max() < 1e-5
    trained.step([batch], cases.loss)
    ours = {multimodal.in_text(n): gradient for n, gradient in ranks.gradients(trained).items()}
    ranks.assert_near(ours, gradients, 3e-6)
    same = {n for n, tensor in ranks.weights(trained).items() if torch.equal(tensor, saved[n])}
    assert same == multimodal.of_pictures(saved.keys()) | {n for n in saved if n.endswith("layer_scalar")} != set()
    adapted = ranks.backend(cases.policy(tmp_path / "both"), lora_cfg=LoRAConfig(True, dim=3, alpha=7))
    assert all("language_model" in n for n in adapted._trained)
