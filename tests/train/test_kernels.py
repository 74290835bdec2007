"""Check Liger's kernels and FlashAttention-3: clear errors without them, results on a GPU with them."""

import importlib.util

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from pipeline.models.hugging_face import meta_model
from pipeline.train import kernels
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


@pytest.mark.parametrize(
    ("capability", "installed", "deterministic", "taken"),
    [((9, 0), True, False, 1), ((10, 0), True, False, 0), ((9, 0), False, False, 0), ((9, 0), True, True, 0)],
)
def test_flash_attention_3_is_taken_where_it_is_installed(monkeypatch, caplog, capability, installed, deterministic, taken):
    """On Hopper, unless the run is to be deterministic. A build that does not load leaves PyTorch's own, with a warning."""
    calls = []

    def activate(name: str) -> None:
        calls.append(name)
        raise ImportError("undefined symbol")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(kernels, "activate_flash_attention_impl", activate)
    policy = cases.policy("unused", deterministic=deterministic)
    use_kernels(policy, meta_model(cases.configs()["qwen3"]), torch.device("cuda"))
    assert calls == ["FA3"] * taken
    assert caplog.text.count("policy.dtensor_cfg.flash_attention: 2, because FlashAttention-3 does not load: undef") == taken


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
        for settings in ({"flash_attention": 2}, {"flash_attention": 2, key: value}):
            trained = ranks.backend(
                cases.policy(models / "qwen3", precision="bfloat16"), Layout(1, 1), compile=False, **settings
            )
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
