"""The Hugging Face export: one file or several, names that transformers finds, values to the bit."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.train.export import export
from tests.end_to_end.runs import ROOT

TINY = str(ROOT / "recipes/tiny")


class Backend:
    """Hands out a model's weights as a train backend does: through one buffer, good until the next is asked for."""

    def __init__(self, model):
        self.model = model

    def weights(self):
        tied = self.model.config.tie_word_embeddings
        for name, tensor in self.model.named_parameters():
            assert not (tied and name == "lm_head.weight")
            buffer = tensor.detach().clone()
            yield name, buffer
            buffer.fill_(torch.nan)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32)


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 30, 1), (1 << 20, 4)])
def test_transformers_loads_what_was_exported(tmp_path, model, shard_bytes, files):
    policy = PolicyConfig(model_name=TINY, tokenizer=TokenizerConfig(name=TINY), precision="float32")
    export(Backend(model), policy, tmp_path / "hf", writes=True, shard_bytes=shard_bytes)
    shards = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) == files
    assert not list((tmp_path / "hf").glob("*.partial"))
    if files > 1:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == shards
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == AutoTokenizer.from_pretrained(TINY).eos_token_id


def test_a_rank_that_does_not_write_takes_part(tmp_path, model):
    policy = PolicyConfig(model_name=TINY, tokenizer=TokenizerConfig(name=TINY))
    export(Backend(model), policy, tmp_path / "hf", writes=False)
    assert not (tmp_path / "hf").exists()
