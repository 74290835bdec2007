"""Check buffers of a checkpoint, here the biases that balance experts: they are read, kept, saved and sent like weights."""

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.models.precision import served_dtype
from pipeline.train.fsdp_model import allocate
from tests.train import attention_models, cases, ranks
from tests.train.ranks import Layout

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def check(layout: Layout, folder) -> None:
    model = folder / "glm4_moe"
    files = load_file(model / "model.safetensors")
    assert files[BIAS].abs().max() > 0.01
    for precision in ("float32", "bfloat16"):
        trained = ranks.backend(cases.policy(model, precision=precision), layout)
        for name, tensor in trained.weights():
            assert tensor.dtype == served_dtype(name, getattr(torch, precision))
            if dist.get_rank() == 0:
                assert torch.equal(tensor, files[name].to(tensor.dtype)), name
        cases.check_all_held(cases.check_layout(trained, files))
    trained = ranks.backend(cases.policy(model), layout)
    ranks.check_against_eager(trained, layout, model, 3e-6)
    trained.shards().write(folder / "saved", dist.get_rank())
    bias = trained._parameters[BIAS]
    assert not bias.requires_grad and torch.equal(ranks.full(bias), files[BIAS])
    with torch.no_grad():
        bias.zero_()
    trained.load(folder / "saved")
    assert torch.equal(ranks.full(bias), files[BIAS])


def test_constants_of_a_checkpoint(tmp_path):
    attention_models.write(tmp_path, ["glm4_moe"])
    ranks.run(check, Layout(2, 1), tmp_path)


def test_parameters_that_are_not_sharded_are_on_the_device_that_computes():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    allocate(model, torch.device("cpu"), torch.device("meta"), ["1.bias"])
    assert {name: p.device.type for name, p in model.named_parameters()} == {
        "0.weight": "cpu",
        "0.bias": "cpu",
        "1.weight": "cpu",
        "1.bias": "meta",
    }
