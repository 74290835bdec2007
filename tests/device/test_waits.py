"""No layer of a train rank waits for the GPU, but where libraries do; nor do its microbatches' boundaries."""

import functools

import pytest
import torch
import torch.distributed as dist

from pipeline.train import attention, fsdp_model
from pipeline.train.context_parallel import localize
from pipeline.train.megatron.local_modules import PackedSequences
from pipeline.train.train_backend import ModelRole
from tests.device.pretended import OnGPU, moved, pretended
from tests.device.waits import Waits
from tests.models.cases import write_models
from tests.train import cases, ranks
from tests.train.megatron import layouts

FAMILIES = ("llama", "qwen3", "qwen3_moe", "mixtral")
BATCHES = ([0, 1, 2, 3], [6])
OF_A_MICROBATCH = {"transformers.masking_utils.find_packed_sequence_indices"}  # whether positions restart, before the layers
# Megatron-Core needs the counts of tokens on the host, for its exchange and for one product per expert. Its own permutation
# asks for the number of tokens too; TransformerEngine's does not.
OF_EXPERTS = {
    "megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
    "megatron.core.transformer.moe.moe_utils.permute",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, (*FAMILIES, "deepseek_v3"))
    return folder


@pytest.fixture(autouse=True)
def world(folder, monkeypatch):
    """Join a world of this rank alone, and replace what only a GPU can do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    histogram = torch.histc  # transformers counts integers on a GPU, and there is no such kernel for CPUs
    monkeypatch.setattr(torch, "histc", lambda counted, **options: histogram(counted.float(), **options))
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value, *_, **__: query.new_zeros(query.shape))
    # It assigns to `data`, which a tensor that stands for another cannot follow.
    monkeypatch.setattr("megatron.core.utils._kernel_make_viewless_tensor", lambda tensor, requires_grad: tensor.clone())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    layouts.release()
    dist.destroy_process_group()


def to_gpu(model: torch.nn.Module) -> None:
    """Move a model to the pretended GPU, with the tensors that are plain attributes."""
    for module in model.modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            for name, tensor in kept.items():
                if isinstance(tensor, torch.Tensor):
                    kept[name] = (
                        torch.nn.Parameter(OnGPU(tensor.detach()), False) if kept is module._parameters else OnGPU(tensor)
                    )


def waits(model: torch.nn.Module, run) -> Waits:
    """Return the waits of a forward pass without gradients on a pretended GPU. run: called with (batch, local batch)."""
    with pretended() as device, torch.no_grad():
        to_gpu(model)
        batches = [moved(cases.pack(chosen), device) for chosen in BATCHES]
        with Waits() as found:
            for batch in batches:
                run(localize(batch, 1, 0, 1))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_of_fsdp2s_model(family, folder):
    # A CPU's product of each expert's half-precision rows needs wider ones than these models have.
    policy = cases.policy(folder / family, precision="float32" if family in cases.MIXTURES else "bfloat16")
    model = fsdp_model.build(policy, torch.device("cpu"), None, 7, ModelRole(trained=False))
    found = waits(model, model).found
    assert found == dict.fromkeys(OF_A_MICROBATCH, len(BATCHES))


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_a_forward_pass_of_megatrons_local_modules(family, folder):
    policy = cases.policy(folder / family, precision="bfloat16")
    trained = layouts.backend(policy, role=ModelRole(trained=False))

    def run(local) -> None:
        sequences = PackedSequences.of(local.packing, trained._starts_on_host)
        hidden = trained._stage(local.tokens, local.positions, attention_mask=None, packed_seq_params=sequences)
        weight, shard = trained._stage.head(trained._vocabulary)
        trained._head.outputs(hidden[:, 0], weight, local, shard, 0)

    found = waits(trained._stage, run).found
    assert set(found) == (OF_EXPERTS if family in layouts.MIXTURES else set())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", [ranks.backend, layouts.backend], ids=["FSDP2", "Megatron-Core"])
def test_a_backward_pass(backend, family, folder, monkeypatch):
    """It runs on the CPU: torch computes gradients of a GPU's tensors in a thread of the GPU."""
    trained, found = backend(cases.policy(folder / family)), Waits(everywhere=True)
    backward, times = torch.autograd.backward, []

    @functools.wraps(backward)
    def recorded(*arguments, **options):
        times.append(len(times))
        with found:
            return backward(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "backward", recorded)
    trained.step([cases.pack(chosen) for chosen in BATCHES], cases.loss)
    assert len(times) == len(BATCHES) and not found.found


def test_a_wait_is_noticed():
    with pretended() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        for wait in (
            lambda: there.sum().item(),
            lambda: bool(there.any()),
            lambda: there.tolist(),
            lambda: torch.equal(there, there),
            lambda: there[there > 0],
            lambda: there.nonzero(),
            lambda: torch.tensor([1], device=device),
            lambda: here.to(device),
            lambda: torch.repeat_interleave(there, torch.ones(3, dtype=torch.int64, device=device)),
        ):
            with Waits() as found:
                wait()
            assert found.found.total() >= 1
        with Waits() as found:
            assert here.tolist() and here.sum().item() and there[torch.zeros(1, dtype=torch.int64, device=device)] is not None
            here.to(device, non_blocking=True)
            torch.repeat_interleave(there, there.long(), output_size=3)
        assert not found.found
