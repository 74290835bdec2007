"""Check Liger's kernels and FlashAttention-3: clear errors without them, results on a GPU with them."""

import importlib.util

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from pipeline.models.hugging_face import meta_model
from pipeline.train.kernels import use_kernels
from tests import cuda_world
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.ranks import Layout

ALL = list(range(len(cases.LENGTHS)))
KEYS = [("use_liger_kernel", True, "liger_kernel"), ("flash_attention", 3, "flash_attn_interface")]


@pytest.mark.parametrize("key, value", [(key, value) for key, value, _ in KEYS])
def test_a_cpu_has_no_kernels(models, realm, key, value):
    with refused((f"policy.dtensor_cfg.{key}", "needs-gpu")):
        ranks.backend(cases.policy(models / "qwen3"), Layout(1, 1), **{key: value})


@pytest.mark.parametrize("key, value, package", KEYS)
def test_a_missing_kernel_is_named(key, value, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    policy = cases.policy("unused")
    setattr(policy.dtensor_cfg, key, value)
    with refused((f"policy.dtensor_cfg.{key}", "not-installed")):
        use_kernels(policy, meta_model(cases.configs()["qwen3"]), torch.device("cuda"))


@pytest.fixture
def nccl():
    with cuda_world.alone():
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("key, value, package", KEYS)
def test_on_a_gpu_kernels_agree_with_torchs(models, nccl, key, value, package):
    pytest.importorskip(package)
    if key == "flash_attention" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention-3 is for Hopper")
    batch, found = cases.pack(ALL, "cuda"), []
    try:
        for settings in ({"compile": False}, {"compile": False, key: value}):
            trained = ranks.backend(cases.policy(models / "qwen3", precision="bfloat16"), Layout(1, 1), **settings)
            logprobs = trained.forward([batch])[0].logprobs
            trained.step([batch], cases.loss)
            found.append((logprobs, ranks.gradients(trained)))
        assert (current_flash_attention_impl() == "FA3") == (key == "flash_attention")
    finally:
        if current_flash_attention_impl():
            restore_flash_attention_impl()
    (theirs, gradients), (ours, of_ours) = found
    assert (ours - theirs).abs().max() < 0.3
    ranks.assert_near(of_ours, gradients, 0.1)
