"""Compare compiled decoder layers with eager ones, on the CPU with Inductor's C++."""

import json
import sysconfig

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from pipeline.models.shape import ModelShape
from pipeline.node import builds, c_compiler
from pipeline.train import compiled as subject
from pipeline.train import kernels
from pipeline.train.fsdp import FSDPBackend
from tests.train import attention_models, cases, compiled, ranks
from tests.train.ranks import Layout

ONE = Layout(1, 1)

pytestmark = pytest.mark.skipif(not builds.inductor_links(torch.__file__), reason=f"there is no {kernels.PATH}")


@pytest.fixture
def fresh(realm):
    """Reset the compiler."""
    torch._dynamo.reset()


@pytest.mark.full  # Inductor compiles for half a minute
def test_compiled_layers_agree_with_eager_ones(models, fresh):
    compiled.check_agrees(ONE, models / "qwen3")


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_further_families(models, fresh, family):
    compiled.check_agrees(ONE, models / family)


@pytest.mark.full
def test_recomputed_layers(models, fresh):
    compiled.check_agrees(ONE, models / "qwen3", activation_checkpointing=True)


@pytest.mark.full
def test_adapters_and_the_model_without_them(models, fresh):
    compiled.check_adapters(ONE, models)


@pytest.mark.full
def test_the_reference(models, fresh):
    compiled.check_reference(ONE, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 1, context=2)], ids=["dp2", "cp2"])
def test_two_ranks(models, layout):
    ranks.run(compiled.check_two_ranks, layout, models)


@pytest.mark.full
def test_a_resumed_run_equals_the_uninterrupted_one(models, tmp_path):
    (tmp_path / "qwen3").symlink_to(models / "qwen3")
    ranks.run(compiled.train_and_save, ONE, tmp_path)
    ranks.run(compiled.resume, ONE, tmp_path)


def test_too_little_memory_for_the_trial_passes(models, realm, monkeypatch):
    def fail(backend: FSDPBackend) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FSDPBackend, "_run_trial_batches", fail)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        compiled.backend(models / "qwen3", ONE, compiled=True)
    assert "max_total_sequence_length=64 tokens. Try policy.dtensor_cfg.compile=false" in "".join(raised.value.__notes__)


# ---- when to compile ----------------------------------------------------------------------------------------------------


def wanted(value: bool | None, device: str, mixture: bool = False, tensor: int = 1) -> bool:
    policy = cases.policy("unused")
    policy.dtensor_cfg.compile, policy.dtensor_cfg.tensor_parallel_size = value, tensor
    return subject.should_compile(policy, torch.device(device), mixture)


def test_null_compiles_dense_layers_on_gpus(monkeypatch):
    monkeypatch.setattr(subject, "missing_dependency", lambda device: None)
    monkeypatch.setattr(subject, "_first_rank_without", lambda lacking, device: None)
    assert wanted(None, "cuda") and not wanted(None, "cpu") and not wanted(False, "cuda")
    assert not wanted(None, "cuda", mixture=True) and not wanted(None, "cuda", tensor=2)
    assert wanted(True, "cpu") and wanted(True, "cuda", mixture=True)
    with pytest.raises(ValueError, match=r"dtensor_cfg\.compile: got true with .*tensor_parallel_size=2; expected 1"):
        wanted(True, "cuda", tensor=2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_the_plan_knows_which_models_compile(family, models, realm, monkeypatch, tmp_path):
    """A ModelShape says of a model what `should_compile` learns from its modules."""
    attention_models.write(tmp_path, [family] if family not in cases.FAMILIES else [])
    folder = (models if family in cases.FAMILIES else tmp_path) / family
    built = []
    monkeypatch.setattr(subject, "should_compile", lambda policy, device, mixture: built.append(mixture))
    ranks.backend(cases.policy(folder), ONE)
    assert built == [ModelShape.of(json.loads((folder / "config.json").read_text())).mixture] == [family != "llama"]


def test_without_a_compiler():
    none = torch._inductor.config.patch({"cpp.cxx": ("there-is-no-such-compiler",)})
    with none, pytest.raises(ValueError, match=r"compile: got true, but there is no C\+\+ compiler"):
        wanted(True, "cpu")
    assert kernels.missing_dependency(torch.device("cpu")) is None


def test_in_a_folder_with_spaces(monkeypatch):
    monkeypatch.setattr(torch, "__file__", "/home/a b/torch/__init__.py")
    with pytest.raises(ValueError, match="compile: got true, but there is no PyTorch in a folder whose path has no spaces"):
        wanted(True, "cpu")


def test_without_python_h(monkeypatch, tmp_path):
    monkeypatch.setattr("pipeline.train.kernels.has_triton", lambda: True)
    for device in ("cuda", "cpu"):
        assert kernels.missing_dependency(torch.device(device)) is None
        with monkeypatch.context() as patch:
            patch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
            assert kernels.missing_dependency(torch.device(device)) == c_compiler.HEADER
            with pytest.raises(ValueError, match=r"compile: got true, but there is no Python\.h of .*: apt install python3"):
                wanted(True, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a triton")
def test_without_triton():
    assert kernels.missing_dependency(torch.device("cuda")) == kernels.TRITON


@pytest.mark.timeout(120)
def test_null_compiles_on_all_ranks_or_on_none(models):
    ranks.run(compiled.check_ranks_agree, Layout(2, 1), models)
