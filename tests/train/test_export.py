"""Export Hugging Face checkpoints from a backend and from a checkpoint, in one file or several, bitwise."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.data.stop_tokens import stop_tokens
from pipeline.train.hf_export import export, export_checkpoint
from tests.data.made_tokenizers import with_marks
from tests.data.test_chat import CHATML
from tests.end_to_end.runs import ROOT
from tests.problems import refused
from tests.train import cases, ranks

TINY = str(ROOT / "recipes/tiny")


class Backend:
    """Yields a model's weights as a train backend does: through one buffer, valid until the next one."""

    def __init__(self, model):
        self.model = model

    def weights(self, model=False):
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
def test_transformers_loads_an_exported_checkpoint(tmp_path, model, shard_bytes, files):
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


@pytest.mark.parametrize("given", [{"temperature": 0.6}, {"top_p": 0.95, "pad_token_id": -1, "eos_token_id": [2, 7]}, None])
def test_the_generation_config_lists_the_tokens_that_end_an_answer(tmp_path, model, given):
    """transformers loads these configs, and refuses to save some of them."""
    shutil.copytree(TINY, tmp_path / "base")
    tokenizer = with_marks(["<|im_start|>", "<|im_end|>"])
    tokenizer.save_pretrained(tmp_path / "base")
    if given is not None:
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps(given))
    tokens = TokenizerConfig(name=str(tmp_path / "base"), chat_template=CHATML)
    policy = PolicyConfig(model_name=str(tmp_path / "base"), tokenizer=tokens, precision="float32")
    export(Backend(model), policy, tmp_path / "hf", writes=True)
    written = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    taught = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = [taught, *dict.fromkeys([2, *((given or {}).get("eos_token_id") or [])])]
    assert written == {**(given or {}), "eos_token_id": ends}
    alone = PolicyConfig(model_name=str(tmp_path / "hf"), tokenizer=TokenizerConfig(name=str(tmp_path / "hf")))
    assert stop_tokens(alone).ids == tuple(sorted(ends))


def test_a_rank_that_does_not_write_takes_part(tmp_path, model):
    policy = PolicyConfig(model_name=TINY, tokenizer=TokenizerConfig(name=TINY))
    export(Backend(model), policy, tmp_path / "hf", writes=False)
    assert not (tmp_path / "hf").exists()


@pytest.fixture(scope="module")
def saved(models):
    """Return what two ranks saved of every family of `cases.EXPORTED`."""
    ranks.run(ranks.train_and_save, ranks.Layout(2, 1), models)
    return models


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("family", cases.EXPORTED)
def test_a_checkpoint_of_two_ranks_is_exported_offline(saved, family, shard_bytes, tmp_path):
    precision = cases.EXPORTED[family]
    policy = cases.policy(saved / family, precision=precision, tokenizer=TokenizerConfig(TINY, chat_template="{{ messages }}"))
    (tmp_path / ".hf.partial").mkdir()
    (tmp_path / ".hf.partial" / "stale.safetensors").write_text("of an attempt that was killed")
    folder = saved / "exported" / family
    export_checkpoint(folder / "checkpoint", policy, tmp_path / "hf", shard_bytes=shard_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1 if shard_bytes == 20_000 else len(files) == 1
    assert not (tmp_path / "hf" / "stale.safetensors").exists()

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(folder / "weights.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == tensors[name].dtype == getattr(torch, precision)
        assert torch.equal(tensors[name], tensor), name

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.dtype == getattr(torch, precision)
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())  # the model has one
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == "{{ messages }}"
    if precision == "float32":
        theirs, _, _ = cases.eager(tmp_path / "hf")
        assert (load_file(folder / "logprobs.safetensors")["logprobs"] - torch.cat(theirs)).abs().max() < 1e-5


def test_a_checkpoint_of_another_model_is_not_exported(saved, tmp_path):
    with refused(("policy.model_name", "contradiction")):
        export_checkpoint(saved / "exported" / "qwen3_tied" / "checkpoint", cases.policy(saved / "qwen3"), tmp_path / "hf")
    assert not list(tmp_path.iterdir())
