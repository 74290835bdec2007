"""Check the backend on one rank: log-probs and gradients, errors, reference weights, checkpoints."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    RwkvConfig,
)

from pipeline.config import OptimizerConfig
from pipeline.train.fsdp import FSDPBackend, _weights
from pipeline.train.offload import Offload
from pipeline.train.train_backend import ModelRole
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
ALL = list(range(len(cases.LENGTHS)))


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_agrees_with_eager(models, family):
    trained = ranks.backend(cases.policy(models / family))
    ranks.check_weights_are_the_files(trained, models / family)
    ranks.check_against_eager(trained, Layout(1, 1), models / family, cases.tolerance(family))


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])  # one rank in bfloat16 is sharded, in float32 not
def test_one_rank_passes_the_checks_of_several(models, family, precision, tmp_path):
    (tmp_path / family).symlink_to(models / family)
    if precision == "bfloat16":
        ranks.check_bfloat16(Layout(1, 1), tmp_path, family)
    else:
        ranks.check_random_weights(Layout(1, 1), tmp_path, family)
        ranks.check_save_and_load(Layout(1, 1), tmp_path, family)


def test_one_rank_checkpoints_activations_clips_and_refuses(models):
    ranks.check_activation_checkpointing(Layout(1, 1), models)
    ranks.check_clipping_and_refusal(Layout(1, 1), models)


@pytest.mark.parametrize("batches", [1, 4, 8])
def test_gradient_does_not_depend_on_microbatches(models, batches):
    _, expected, _ = cases.eager(models / "qwen3")
    trained = ranks.backend(cases.policy(models / "qwen3"))
    trained.step([cases.pack(ALL[i::batches]) for i in range(batches)], cases.loss)
    ranks.assert_near(ranks.gradients(trained), expected, 2e-6)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000, None])
def test_gradient_does_not_depend_on_chunks(models, chunk):
    _, expected, _ = cases.eager(models / "qwen3_tied")
    trained = ranks.backend(cases.policy(models / "qwen3_tied", logprob_chunk_size=chunk))
    trained.step([cases.pack(ALL)], cases.loss)
    ranks.assert_near(ranks.gradients(trained), expected, 2e-6)


def test_a_sequence_does_not_see_its_neighbours(models):
    trained = ranks.backend(cases.policy(models / "llama"))
    together = trained.forward([cases.pack(ALL)])[0].logprobs.split(cases.LENGTHS)
    for i in ALL:
        alone = trained.forward([cases.pack([i])])[0].logprobs
        assert (alone - together[i]).abs().max() < 1e-5
        assert alone[0] == 0


def test_sharded_checkpoint_and_half_precision_files(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    trained = ranks.backend(cases.policy(tmp_path))
    for name, tensor in trained.weights():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.get_parameter(name).float())


def test_reference_is_the_initial_policy(models):
    trained = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(reference=True))
    batches = [cases.pack(ALL)]
    before = trained.forward(batches)[0].logprobs
    assert torch.equal(trained.forward(batches, "reference")[0].logprobs, before)
    trained.step(batches, cases.loss)
    weights = ranks.weights(trained)
    after = trained.forward(batches)[0].logprobs
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(trained.forward(batches, "reference")[0].logprobs, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trained.weights())
    assert torch.equal(trained.forward(batches)[0].logprobs, after)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_the_reference_in_half_precision_equals_the_initial_float32_weights(models, family):
    """The float32 weights are rounded before they compute, so the log-probs are the same to the last bit."""
    trained = ranks.backend(cases.policy(models / family, precision="bfloat16"), role=ModelRole(reference=True))
    batches = [cases.pack(ALL[:4]), cases.pack(ALL[4:])]
    before = [out.logprobs for out in trained.forward(batches)]
    trained.step(batches, cases.loss)
    weights = _weights(trained._reference)
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
    # As on a GPU, where they are in host memory between two passes.
    trained._offload_reference(trained._reference, Offload(trained.device))
    for _ in range(2):
        assert not any(tensor.untyped_storage().nbytes() for tensor in weights)
        reference = [out.logprobs for out in trained.forward(batches, "reference")]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(reference, before, strict=True))
    trained.offload()
    trained.reload()
    assert all(torch.equal(o.logprobs, b) for o, b in zip(trained.forward(batches, "reference"), before, strict=True))
    assert not torch.equal(trained.forward(batches)[0].logprobs, before[0])


class NotLocked(torch.cuda.CudaError):
    def __init__(self):
        RuntimeError.__init__(self, "out of memory")


def test_the_key_is_named_where_the_reference_cannot_be_page_locked(models, monkeypatch):
    def host_memory(size: int, page_locked: bool) -> torch.Tensor:
        raise NotLocked

    trained = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(reference=True))
    monkeypatch.setattr("pipeline.train.offload.host_memory", host_memory)
    with refused(("policy.dtensor_cfg.reference_cpu_offload", "out-of-memory")):
        trained._offload_reference(trained._reference, Offload(trained.device))


def test_a_reference_on_the_device_is_offloaded_with_the_rest(models):
    trained = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(reference=True))
    batches = [cases.pack(ALL)]
    before = trained.forward(batches, "reference")[0].logprobs
    trained.offload(keep_weights=True)
    assert not any(tensor.untyped_storage().nbytes() for tensor in _weights(trained._reference))
    trained.reload()
    assert torch.equal(trained.forward(batches, "reference")[0].logprobs, before)


def test_reference_must_have_been_kept(models):
    trained = ranks.backend(cases.policy(models / "qwen3"))
    with pytest.raises(ValueError, match=r"ModelRole\(reference=True\)"):
        trained.forward([cases.pack(ALL)], "reference")
    with pytest.raises(ValueError, match="policy, reference"):
        trained.forward([cases.pack(ALL)], "old")


def test_overrides_reach_the_model(models):
    trained = ranks.backend(cases.policy(models / "llama", random_init=True, hf_config_overrides={"num_hidden_layers": 1}))
    assert not any("layers.1." in name for name, _ in trained.weights())
    with refused(("policy.hf_config_overrides", "unknown-key")):
        ranks.backend(cases.policy(models / "llama", hf_config_overrides={"num_layerz": 1}))


# ---- refusals -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "recurrent, by its layers": (RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1), "attention"),
    "attention of its own": (BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4), "attention"),
    "dynamic rotary": (
        LlamaConfig(**cases.SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type dynamic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case, tmp_path):
    config, message = REFUSED[case]
    config.save_pretrained(tmp_path)
    with refused(("policy.model_name", "unsupported")) as error:
        ranks.backend(cases.policy(tmp_path, random_init=True))
    assert message in str(error.value)


def test_contradicting_batches_are_refused(models):
    trained = ranks.backend(cases.policy(models / "llama"))
    good = cases.pack([0, 3])
    continued = torch.arange(len(good.tokens))
    for change, message in [
        ({"positions": continued}, "positions"),
        ({"cu_seqlens": torch.tensor([0, 14], dtype=torch.int32)}, "cu_seqlens"),
        ({"cu_seqlens": good.cu_seqlens.long()}, "cu_seqlens"),
        ({"lengths": (9, 5)}, "cu_seqlens"),
        ({"lengths": (14,)}, "cu_seqlens"),
        ({"lengths": (5, 8)}, "tokens has shape"),
        ({"lengths": (5, 0, 9)}, "no empty"),
        ({"tokens": good.tokens + cases.VOCABULARY}, "vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            trained.step([good, dataclasses.replace(good, **change)], cases.loss)
    with pytest.raises(ValueError, match="at least one batch"):
        trained.step([], cases.loss)


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def saved(models, folder, **settings) -> FSDPBackend:
    trained = ranks.backend(cases.policy(models / "qwen3", **settings))
    trained.step([cases.pack(ALL)], cases.loss)
    trained.shards().write(folder, dist.get_rank())
    return trained


def test_random_states_are_restored(models, tmp_path):
    trained = saved(models, tmp_path)
    drawn = [(torch.rand(2).tolist(), random.random(), random.gauss(), np.random.rand(), np.random.randn()) for _ in range(2)]
    trained.load(tmp_path)
    again = [(torch.rand(2).tolist(), random.random(), random.gauss(), np.random.rand(), np.random.randn()) for _ in range(2)]
    assert drawn == again


def test_random_states_of_another_layout_are_not_restored(models, tmp_path):
    """Tensor-parallel peers drop the same activations, and data-parallel ranks others."""
    trained = ranks.backend(cases.policy(models / "qwen3"))
    trained.shards().write(tmp_path, 0)
    index = tmp_path / "train-rank00000.json"
    record = json.loads(index.read_text())
    index.write_text(json.dumps({**record, "layout": {**record["layout"], "tensor": 2}}))
    torch.manual_seed(5)
    trained.load(tmp_path)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_a_checkpoint_is_tensors_and_json(models, tmp_path):
    saved(models, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-rank00000.json", "train-rank00000.safetensors"]
    index = json.loads((tmp_path / "train-rank00000.json").read_text())["tensors"]
    assert index["optimizer.exp_avg.lm_head.weight"] == {
        "name": "optimizer.exp_avg.lm_head.weight",
        "shape": [61, 32],
        "dtype": "float32",
        "offset": [0, 0],
        "size": [61, 32],
    }


def test_a_checkpoint_that_does_not_fit_is_not_loaded(models, tmp_path):
    trained = saved(models, tmp_path)
    before = ranks.weights(trained)
    with refused(("policy.model_name", "contradiction")):
        ranks.backend(cases.policy(models / "llama")).load(tmp_path)
    with pytest.raises(ValueError, match=r"lr 0\.001 -> 0\.002"):
        optimizer = OptimizerConfig(kwargs={"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1})
        ranks.backend(cases.policy(models / "qwen3", optimizer=optimizer)).load(tmp_path)
    (tmp_path / "train-rank00000.json").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="got 0 train-rank"):
        trained.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.weights())


@pytest.mark.parametrize("name, kwargs", [("torch.optim.SGD", {"lr": 0.1}), ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9})])
def test_other_optimizers_resume_to_the_last_bit(models, tmp_path, name, kwargs):
    trained = saved(models, tmp_path, optimizer=OptimizerConfig(name=name, kwargs=kwargs))
    trained.step([cases.pack(ALL)], cases.loss)
    expected = ranks.weights(trained)
    trained.load(tmp_path)
    trained.step([cases.pack(ALL)], cases.loss)
    assert expected
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained.weights())


def test_the_realm_must_be_the_default_group(models):
    class Larger:
        def size(self):
            return dist.get_world_size() + 1

    with pytest.raises(ValueError, match="2 ranks but the default group 1"):
        FSDPBackend(cases.policy(models / "llama"), Larger(), seed=0, role=ModelRole())
