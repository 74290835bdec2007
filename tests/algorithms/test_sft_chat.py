"""SFT on packed conversations of several turns equals transformers, on both train backends.

Loss and gradient are compared with transformers' on one conversation after the other, with labels only in the assistant's
turns.
"""

import re

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline import train
from pipeline.algorithms.loss import sft_loss
from pipeline.config import DTensorConfig, MegatronConfig, MegatronDDPConfig, PolicyConfig
from pipeline.data.batches import split_batch
from pipeline.data.packing import pack
from pipeline.data.stream import ExampleStream
from pipeline.train.megatron import cpu  # noqa: F401 before Megatron-Core is imported
from pipeline.train.train_backend import ModelRole
from pipeline.types import DataParallelRank
from tests.data.test_chat import CHATML, MARKED, encoder


def conversation(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


RECORDS = [
    conversation("one", "uno", "two", "dos"),
    conversation("what is three in spanish?", "tres"),
    conversation("a", "b", "c", "d", "e", "f"),
    conversation("say no more", "no more, and then some more"),
]
ANSWERS = {"ChatML": r"assistant\n(.*?<\|im_end\|>)", "generation marks": r"assistant: (.*?<\|im_end\|>)"}
TEMPLATES = {"ChatML": CHATML, "generation marks": MARKED}


@pytest.fixture
def realm(monkeypatch, tmp_path):
    """Return a train realm of this process alone, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def expected(model: torch.nn.Module, tokenizer, answer: str) -> tuple[float, float, int]:
    """Return the mean over all labels, the gradient's norm, and the number of labels."""
    total, labels_seen = torch.zeros(()), 0
    for record in RECORDS:
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
        labels = torch.full_like(encoded.input_ids, -100)
        for match in re.finditer(answer, text, re.DOTALL):
            for i, (begin, end) in enumerate(encoded.offset_mapping[0].tolist()):
                if match.start(1) <= begin and end <= match.end(1):
                    labels[0, i] = encoded.input_ids[0, i]
        counted = int((labels[:, 1:] != -100).sum())
        total = total + model(encoded.input_ids, labels=labels).loss * counted
        labels_seen += counted
    loss = total / labels_seen
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    return loss.item(), norm.item(), labels_seen


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_packed_conversations_equal_transformers(backend, template, realm, tmp_path):
    encodes = encoder(TEMPLATES[template], max_input_seq_length=100)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(encodes.tokenizer), **shape, num_key_value_heads=2, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(tmp_path / "model")
    loss, norm, labels = expected(model, encodes.tokenizer, ANSWERS[template])

    examples = ExampleStream(RECORDS, encodes, seed=0).take(len(RECORDS))
    policy = PolicyConfig(
        model_name=str(tmp_path / "model"),
        precision="float32",
        dtensor_cfg=DTensorConfig(enabled=backend == "fsdp"),
        megatron_cfg=MegatronConfig(enabled=backend == "megatron", distributed_data_parallel_config=MegatronDDPConfig()),
    )
    policy.sequence_packing.train_mb_tokens = 128
    ((update,),) = split_batch(examples, policy, [DataParallelRank(0, 1)], len(examples))
    assert max(map(len, update.train)) > 1 < len(update.train), "several microbatches, and several conversations in one"
    assert update.counts.tokens == labels
    made = train.build(policy, dist.group.WORLD, 0, ModelRole())
    batches = [pack([update.samples[i] for i in members], made.device) for members in update.train]
    metrics = made.step(batches, lambda outputs, batch: sft_loss(outputs, batch, update.counts)).metrics
    assert metrics["loss"] == pytest.approx(loss, rel=2e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=2e-5)
