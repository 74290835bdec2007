"""The language model of a multimodal checkpoint trains as the model of text alone does; its other parts stay as they are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma4Config, Mistral3Config, PreTrainedConfig, Qwen3_5Config

from pipeline.config import LoRAConfig
from pipeline.models.hugging_face import auto_model, language_model
from tests.train import attention_models, cases, ranks

pytestmark = pytest.mark.usefixtures("realm")
PICTURES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def config(text: PreTrainedConfig) -> PreTrainedConfig:
    if text.model_type == "gemma4_text":
        heads = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32, "pooling_kernel_size": 1}
        return Gemma4Config(text_config=text.to_dict(), vision_config={**PICTURES, **heads})
    if text.model_type == "qwen3_5_text":
        seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": text.hidden_size}
        return Qwen3_5Config(text_config=text.to_dict(), vision_config=seen, tie_word_embeddings=False)
    pictures = {"model_type": "pixtral", **PICTURES, "image_size": 8}
    return Mistral3Config(text_config=text.to_dict(), vision_config=pictures, tie_word_embeddings=False)


def write(folder: Path, name: str) -> None:
    """Write `both`, a multimodal checkpoint, and `text`, the same language model alone."""
    attention_models.write(folder, [name])
    text = AutoModelForCausalLM.from_pretrained(folder / name)
    torch.manual_seed(4)
    of = config(text.config)
    both = auto_model("logprobs", of).from_config(of, dtype=torch.float32)
    language_model(both).load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(folder / "both")


@pytest.mark.parametrize("name", ["gemma4_per_layer", "qwen3_5_text", pytest.param("ministral3", marks=pytest.mark.full)])
def test_the_language_model_trains_alone(name, tmp_path):
    write(tmp_path, name)
    trained = ranks.backend(cases.policy(tmp_path / "both"))
    ranks.check_weights_are_the_files(trained, tmp_path / "both")
    logprobs, gradients, _ = cases.eager(tmp_path / name)
    batch = cases.pack(list(range(len(cases.LENGTHS))))
    assert (trained.forward([batch])[0].logprobs - torch.cat(logprobs)).abs().max() < 1e-5
    trained.step([batch], cases.loss)
    ours = {n.replace("model.language_model.", "model."): gradient for n, gradient in ranks.gradients(trained).items()}
    ranks.assert_near(ours, gradients, 3e-6)
    files, after = load_file(tmp_path / "both/model.safetensors"), ranks.weights(trained)
    same = {n for n, tensor in after.items() if torch.equal(tensor, files[n])}
    assert (
        same == {n for n in files if "vision" in n or "projector" in n or "visual" in n or n.endswith("layer_scalar")} != set()
    )
    adapted = ranks.backend(cases.policy(tmp_path / "both"), lora_cfg=LoRAConfig(True, dim=3, alpha=7))
    assert all("language_model" in n for n in adapted._trained)
