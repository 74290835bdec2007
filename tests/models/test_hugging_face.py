"""Compare the tensors of checkpoints and their layout in memory with what transformers saves and loads."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch.recipes.model_files import planning_config
from pipeline.boxes import whole
from pipeline.config import PolicyConfig
from pipeline.models import hugging_face
from pipeline.models.recorded_layout import copy_pieces
from pipeline.models.shape import ModelShape
from tests.models.cases import configs
from tests.train import cases


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    cases.write_models(folder)
    return folder


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_shapes_equal_the_files(models, family):
    shapes, tied = hugging_face.checkpoint_shapes(AutoConfig.from_pretrained(models / family))
    files = load_file(models / family / "model.safetensors")
    assert shapes == {name: tuple(tensor.shape) for name, tensor in files.items()}
    assert tied == ({"lm_head.weight": "model.embed_tokens.weight"} if family == "qwen3_tied" else {})


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_tensors_in_memory_equal_those_that_transformers_loads(models, family):
    files = load_file(models / family / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(models / family)
    layout = hugging_face.layout(hugging_face.meta_model(loaded.config))
    assert layout.keys() == dict(loaded.named_parameters()).keys()
    for name, parameter in loaded.named_parameters():
        ours = torch.full_like(parameter, torch.nan, requires_grad=False)
        copy_pieces(ours, layout[name], lambda name, box: files[name][box.within(whole(tuple(files[name].shape)))])
        assert torch.equal(ours, parameter), name
    fused = [name for name, pieces in layout.items() if [piece.name for piece in pieces] != [name]]
    assert any("experts" in name for name in fused) == (family in cases.MIXTURES)


def test_a_type_that_transformers_does_not_know_is_its_model_s(tmp_path):
    """Kimi-K2 is DeepSeek-V3's model under a name of its own."""
    configs()["deepseek_v3_plain"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    config = hugging_face.model_config(PolicyConfig(model_name=str(tmp_path)))
    assert config.model_type == "deepseek_v3"
    assert type(hugging_face.meta_model(config)).__name__ == "DeepseekV3ForCausalLM"
    assert ModelShape.of(planning_config(PolicyConfig(model_name=str(tmp_path)))).family == "deepseek_v3"


@pytest.mark.parametrize(
    ("convert", "named"),
    [
        (lambda state: {"turned": state["lm_head.weight"].mT}, "transposes"),
        (
            lambda state: {"joined": torch.cat([state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"]])},
            "joined",
        ),
        (lambda state: {"lost": state["model.norm.weight"]}, "model.embed_tokens.weight"),
    ],
    ids=["transposed", "joined", "lost"],
)
def test_parameters_not_made_of_whole_tensors_are_refused(monkeypatch, convert, named):
    model = hugging_face.meta_model(cases.configs()["llama"])
    monkeypatch.setattr(hugging_face, "on_disk", lambda model, state: convert(state))
    with pytest.raises(ValueError, match=f"policy.model_name: LlamaForCausalLM .*{named}"):
        hugging_face.layout(model)
