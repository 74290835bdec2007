"""Compare packed log-probs and gradients on a GPU with Hugging Face, with TransformerEngine if available."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.train.megatron.model import transformer_engine
from pipeline.train.train_backend import ModelRole
from tests import cuda_world
from tests.train import cases, ranks
from tests.train.megatron import heads, layouts
from tests.train.ranks import assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TransformerEngine does not import")]
ALL = list(range(len(cases.LENGTHS)))


@pytest.fixture(autouse=True)
def nccl(models, monkeypatch):
    with cuda_world.alone():
        yield
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_bfloat16_log_probs_and_gradients(models, family):
    """Check that they are near Hugging Face's eager model, which also uses bfloat16 for the log-probs."""
    trained = layouts.backend(cases.policy(models / family, precision="bfloat16"))
    batch = cases.pack(ALL, "cuda")
    ours = trained.forward([batch])[0].logprobs
    model = AutoModelForCausalLM.from_pretrained(models / family, dtype=torch.bfloat16, attn_implementation="eager").cuda()
    for i, found in zip(ALL, ours.split(cases.LENGTHS), strict=True):
        tokens = cases.sequences()[i][0].cuda()
        logits = model(tokens[None]).logits[0, :-1].float() / cases.TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert (found[1:] - expected).abs().max() < 0.5 if len(tokens) > 1 else found[0] == 0
    trained.step([batch], cases.loss)
    assert_near(layouts.gradients(trained)[0], layouts.expected(models / family).gradients, 0.1)


@pytest.fixture(scope="module")
def head_models(models):
    heads.write(models)
    return models


@pytest.mark.parametrize("family", heads.FAMILIES)
def test_bfloat16_values_and_gradients(head_models, family):
    """The value head is a plain layer, whatever module the last norm is."""
    model = heads.value_models(head_models) / family
    trained = layouts.backend(cases.policy(model, precision="bfloat16"), role=ModelRole("values"))
    batch, expected = cases.pack(ALL, "cuda"), heads.expected(model)
    values = trained.forward([batch])[0].values
    assert values.dtype == torch.float32 and (values.cpu() - expected.of("values", ALL)).abs().max() < 0.5
    trained.step([batch], heads.value_loss)
    assert_near(layouts.gradients(trained)[0], expected.gradients, 0.1)


def test_bfloat16_entropy_and_likely_tokens(head_models):
    policy = cases.policy(head_models / "qwen3_moe", precision="bfloat16")
    trained = layouts.backend(policy, role=ModelRole(entropy=True))
    expected = heads.expected(head_models / "qwen3_moe")
    found = trained.forward([cases.pack(ALL, "cuda")], top_k=heads.K)[0]
    assert (found.entropy.cpu() - expected.of("entropy", ALL)).abs().max() < 0.5
    assert (found.top_k.logprobs.cpu() - expected.of("likely_logprobs", ALL)).abs().max() < 0.5


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_offloaded_models_weights_are_on_the_gpu_only_while_it_computes(models, family):
    policy = cases.policy(models / family, precision="bfloat16")
    kept = layouts.backend(policy, role=ModelRole(trained=False))
    before = torch.cuda.memory_allocated()
    offloaded = layouts.another(policy, role=ModelRole(trained=False, offload=True))
    weights = sum(local.tensor.nbytes for local in offloaded._local.values())
    assert torch.cuda.memory_allocated() - before < weights / 4
    assert all(local.tensor.device.type == "cpu" and local.tensor.is_pinned() for local in offloaded._local.values())
    for _ in range(2):
        ours, theirs = (model.forward([cases.pack(ALL, "cuda")])[0].logprobs for model in (offloaded, kept))
        assert torch.equal(ours, theirs)
        assert all(local.tensor.device.type == "cpu" for local in offloaded._local.values())


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_a_reference_is_in_host_memory_and_computes_beside_the_policy(models, family):
    policy = cases.policy(models / family, precision="bfloat16")
    trained = layouts.backend(policy, role=ModelRole(reference=True))
    batches, places = [cases.pack(ALL, "cuda")], [local.tensor.data_ptr() for local in trained._local.values()]
    expected = trained.forward(batches)[0].logprobs
    trained.step(batches, cases.loss)
    ours, before = trained.forward(batches)[0].logprobs, torch.cuda.memory_allocated()
    assert trained._reference._block.is_pinned()
    for _ in range(2):
        assert torch.equal(trained.forward(batches, "reference")[0].logprobs, expected)
        assert torch.cuda.memory_allocated() == before
        assert [local.tensor.data_ptr() for local in trained._local.values()] == places
        assert torch.equal(trained.forward(batches)[0].logprobs, ours)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_float32(models, family):
    """TransformerEngine's attention has no float32."""
    if transformer_engine():
        pytest.skip("TransformerEngine's packed attention is for half precision")
    trained = layouts.backend(cases.policy(models / family))
    expected = layouts.expected(models / family)
    batch = cases.pack(ALL, "cuda")
    assert (trained.forward([batch])[0].logprobs.cpu() - torch.cat(expected.logprobs)).abs().max() < 1e-4
    trained.step([batch], cases.loss)
    assert_near(layouts.gradients(trained)[0], expected.gradients, 1e-4)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_resumes_to_the_last_bit(models, tmp_path, deterministic, family):
    def fresh():
        exact = {"precision": "bfloat16", "deterministic": True, "max_total_sequence_length": 2048}
        return layouts.backend(cases.policy(models / family, **exact))

    trained = fresh()
    batch = cases.pack_long()
    trained.step([batch], cases.loss)
    trained.shards().write(tmp_path, dist.get_rank())
    drawn = torch.rand(2, device="cuda")
    metrics = [trained.step([batch], cases.loss).metrics for _ in range(2)]
    resumed = fresh()
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(2, device="cuda"), drawn)
    assert [resumed.step([batch], cases.loss).metrics for _ in range(2)] == metrics


def test_weights_are_the_files_rounded(models):
    trained = layouts.backend(cases.policy(models / "qwen3_moe", precision="bfloat16"))
    files = load_file(models / "qwen3_moe" / "model.safetensors")
    found = ranks.weights(trained)
    assert found.keys() == files.keys()
    assert all(tensor.is_cuda and torch.equal(tensor.cpu(), files[name].bfloat16()) for name, tensor in found.items())
