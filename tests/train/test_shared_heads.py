"""More tensor-parallel ranks than key-value heads: each backend agrees with Hugging Face's eager model and resumes elsewhere.

By default two ranks share the only head; marked `full`, four ranks share two. `python -m tests.train.parity tp4 tp4-sp` has the
differences of all families, with adapters too.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.config import TokenizerConfig
from pipeline.train.hf_export import export_checkpoint
from tests.models.cases import configs
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import Layout as Megatron
from tests.train.ranks import Layout as FSDP
from tests.train.test_export import TINY

FAMILIES = ("qwen2", "qwen3_moe", "qwen3_5_text")  # biases; norms of heads and experts; gates
TOLERANCE = 5e-6  # of gradients, as for each backend's other layouts


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a folder with models that have one key-value head, in `1/`, and two, in `2/`, with Hugging Face's outputs."""
    folder = tmp_path_factory.mktemp("shared-heads")
    for heads in (1, 2):
        for family in FAMILIES:
            config = configs()[family]
            config.num_key_value_heads = heads
            if family == "qwen3_5_text":
                config.linear_num_key_heads = 4  # of delta nets, which ranks do not share
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            model.save_pretrained(folder / f"{heads}/{family}")
            layouts.write_expected(folder / f"{heads}/{family}")
    return folder


def trained_by(layout: FSDP | Megatron, model: Path):
    policy = cases.policy(model, scheduler=ranks.SCHEDULER, tokenizer=TokenizerConfig(TINY, chat_template="{{ messages }}"))
    return layout.backend(policy), policy


def check_ranks(layout: FSDP | Megatron, folder: Path) -> None:
    """Check a step of each family, and save what two more steps continue."""
    for family in FAMILIES:
        trained, policy = trained_by(layout, folder / family)
        ranks.check_weights_are_the_files(trained, folder / family)
        expected = layouts.expected(folder / family)
        theirs = expected.gradients if isinstance(layout, Megatron) else cases.eager(folder / family)[1]
        ranks.check_step(trained, layout, (expected.logprobs, theirs, torch.tensor(expected.loss)), TOLERANCE)
        packed = ranks.batches(trained, layout)
        saved = folder / f"saved-{layout.name}-{type(layout).__module__}" / family
        trained.shards().write(saved, dist.get_rank())
        weights = ranks.weights(trained)
        after = [cases.learn(trained, packed) for _ in range(2)]
        dist.barrier()
        if dist.get_rank() == 0:
            if isinstance(layout, FSDP):  # tensor-parallel ranks of Megatron-Core all write norms
                ranks.check_written_once(saved)
            (saved / "after.json").write_text(json.dumps(after))
            export_checkpoint(saved, policy, saved / "hf")
            exported = load_file(saved / "hf/model.safetensors")
            assert exported.keys() == weights.keys()
            assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
        layouts.release()


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        pytest.param(FSDP(1, 2), 1, id="fsdp-tp2"),
        pytest.param(Megatron(tp=2, sp=True), 1, id="megatron-tp2-sp"),
        pytest.param(FSDP(1, 4, sequence=True), 2, id="fsdp-tp4-sp", marks=pytest.mark.full),
        pytest.param(Megatron(tp=4, sp=True), 2, id="megatron-tp4-sp", marks=pytest.mark.full),
    ],
)
def test_ranks_share_heads(models, layout, heads, realm):
    folder = models / str(heads)
    ranks.run(check_ranks, layout, folder)
    alone = Megatron() if isinstance(layout, Megatron) else FSDP(1, 1)
    for family in FAMILIES:
        trained, _ = trained_by(alone, folder / family)
        ranks.check_goes_on(trained, alone, folder / f"saved-{layout.name}-{type(layout).__module__}" / family)
        layouts.release()
