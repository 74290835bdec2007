"""Compare bfloat16 with the variable-length kernel on a GPU with Hugging Face eager."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from pipeline.config import LoRAConfig, OptimizerConfig, TokenizerConfig
from pipeline.train.attention import AttentionKind, attend
from pipeline.train.fsdp import _weights
from pipeline.train.hf_export import export
from pipeline.train.sequence_bounds import Packing
from pipeline.train.train_backend import ModelRole
from tests import cuda_world
from tests.end_to_end.runs import ROOT
from tests.train import cases, ranks
from tests.train.test_attention import inputs

pytestmark = pytest.mark.gpu
ALL = list(range(len(cases.LENGTHS)))
eager = functools.partial(ranks.backend, compile=False)
"""test_compiled_cuda.py compares compiled layers with eager ones, and to compile takes most of a test's time."""


@pytest.fixture(autouse=True)
def nccl():
    with cuda_world.alone():
        yield


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_bfloat16_log_probs_and_gradients(models, family):
    trained = eager(cases.policy(models / family, precision="bfloat16"))
    batch = cases.pack(ALL, "cuda")
    with Kernels() as kernels:
        ours = trained.forward([batch])[0].logprobs
    assert any("varlen_attn" in name for name in kernels.seen)
    model = AutoModelForCausalLM.from_pretrained(models / family, dtype=torch.bfloat16, attn_implementation="eager").cuda()
    for i, found in zip(ALL, ours.split(cases.LENGTHS), strict=True):
        tokens = cases.sequences()[i][0].cuda()
        logits = model(tokens[None]).logits[0, :-1].float() / cases.TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert (found[1:] - expected).abs().max() < 0.3 if len(tokens) > 1 else found[0] == 0
    trained.step([batch], cases.loss)
    _, gradients, _ = cases.eager(models / family)
    ranks.assert_near({name: g.cpu() for name, g in ranks.gradients(trained).items()}, gradients, 0.1)


EXACT = {"precision": "bfloat16", "deterministic": True, "max_total_sequence_length": 2048}
RATE_0 = OptimizerConfig(kwargs={"lr": 0.0, "weight_decay": 0.0})


@pytest.mark.parametrize("name", ["all keys", "window", "sinks", "soft cap", "float32"])
def test_backward_passes_of_attention_are_equal_to_the_last_bit(deterministic, name):
    kind = {"window": AttentionKind(window=700), "soft cap": AttentionKind(softcap=2.0)}.get(name, AttentionKind())
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    query, key, value, sinks = (x.detach().cuda().requires_grad_() for x in inputs(2 * cases.LONG, 4, 2, 64, 64, dtype))
    lengths = (cases.LONG, cases.LONG)
    packed = Packing.of_lengths(lengths, torch.tensor([0, cases.LONG, 2 * cases.LONG], dtype=torch.int32, device="cuda"))
    leaves, found = [query, key, value, *([sinks] if name == "sinks" else [])], []
    for _ in range(3):
        out = attend(query, key, value, packed, kind, sinks if name == "sinks" else None)
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), leaves)])
    assert len(found) == 3 and len(found[0]) == 1 + len(leaves)
    assert all(torch.equal(ours, theirs) for again in found[1:] for ours, theirs in zip(again, found[0], strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_backward_passes_are_equal_to_the_last_bit(models, deterministic, family):
    trained, batch = eager(cases.policy(models / family, optimizer=RATE_0, **EXACT)), cases.pack_long()
    found = []
    for _ in range(3):
        metrics = trained.step([batch], cases.loss).metrics
        found.append((metrics, {name: gradient.clone() for name, gradient in ranks.gradients(trained).items()}))
    assert len(found) == 3 and found[0][1]
    for metrics, gradients in found[1:]:
        assert metrics == found[0][0]
        assert all(torch.equal(gradient, found[0][1][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("offload", [False, True])
def test_resumes_to_the_last_bit(models, tmp_path, deterministic, offload):
    trained = eager(cases.policy(models / "qwen3_tied", **EXACT), cpu_offload=offload)
    assert {p.device.type for p in trained._model.parameters()} == {"cpu" if offload else "cuda"}
    batch = cases.pack_long()
    trained.step([batch], cases.loss)
    trained.shards().write(tmp_path, dist.get_rank())
    drawn = torch.rand(2, device="cuda")
    metrics = trained.step([batch], cases.loss).metrics
    trained.load(tmp_path)
    assert torch.equal(torch.rand(2, device="cuda"), drawn)
    assert trained.step([batch], cases.loss).metrics == metrics


@pytest.mark.parametrize("head", ["logprobs", "values"])
def test_a_frozen_model_computes_on_the_gpu_wherever_its_weights_are(models, head):
    batch = cases.pack(ALL, "cuda")
    found = []
    for offload in (False, True):
        frozen = eager(
            cases.policy(models / "qwen3", precision="bfloat16"), role=ModelRole(head, trained=False, offload=offload)
        )
        found += frozen.forward([batch])
        assert {p.device.type for p in frozen._model.parameters()} == {"cpu" if offload else "cuda"}
        assert {p.dtype for p in frozen._model.parameters()} == {torch.bfloat16}
    assert torch.equal(getattr(found[0], head), getattr(found[1], head))


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_is_in_host_memory_or_stays_on_the_gpu(models, monkeypatch, offload):
    """Between two passes it leaves CUDA's cache unchanged; in both cases it is offloaded with the rest."""
    policy = cases.policy(models / "qwen3", precision="bfloat16")
    trained = eager(policy, role=ModelRole(reference=True), reference_cpu_offload=offload)
    assert (trained._offloaded is not None) == offload
    batches, weights, emptied = [cases.pack(ALL, "cuda")], _weights(trained._reference), []
    expected = trained.forward(batches)[0].logprobs
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        for _ in range(2):
            assert torch.equal(trained.forward(batches, "reference")[0].logprobs, expected)
            assert {t.device.type for t in weights} == {"cuda"}
            assert {bool(t.untyped_storage().nbytes()) for t in weights} == {not offload}
    assert not emptied
    trained.offload()
    assert not any(t.untyped_storage().nbytes() for t in weights)
    trained.reload()
    assert torch.equal(trained.forward(batches, "reference")[0].logprobs, expected)


@pytest.mark.parametrize("offload", [False, True])
def test_adapters(models, tmp_path, deterministic, offload):
    """Check that exported weights are those that compute, and that training resumes to the last bit."""
    policy = cases.policy(models / "qwen3", tokenizer=TokenizerConfig(str(ROOT / "recipes/tiny")), **EXACT)
    trained = eager(policy, cpu_offload=offload, lora_cfg=LoRAConfig(True))
    batch, short = cases.pack_long(), cases.pack(ALL, "cuda")
    trained.layout()  # from here on, adapters are merged after each step
    trained.step([batch], cases.loss)
    trained.shards().write(tmp_path / "saved", dist.get_rank())
    metrics = trained.step([batch], cases.loss).metrics
    trained.load(tmp_path / "saved")
    expected = trained.forward([short])[0].logprobs
    export(trained, policy, tmp_path / "hf", writes=True)
    merged = eager(cases.policy(tmp_path / "hf", precision="bfloat16"), role=ModelRole(trained=False))
    assert (merged.forward([short])[0].logprobs - expected).abs().max() < 0.3
    assert trained.step([batch], cases.loss).metrics == metrics


def test_float32_uses_the_other_path(models):
    trained = eager(cases.policy(models / "llama"))
    logprobs, _, _ = cases.eager(models / "llama")
    ours = trained.forward([cases.pack(ALL, "cuda")])[0].logprobs
    assert (ours.cpu() - torch.cat(logprobs)).abs().max() < 1e-4
