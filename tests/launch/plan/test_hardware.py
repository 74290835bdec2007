"""Descriptions of GPUs, and the values that a recipe without memory and network takes from them."""

import pytest
import yaml

from pipeline import config
from pipeline.config import ComponentConfig, hardware
from pipeline.config.hardware import HARDWARE, gpu
from tests.launch.model import write_recipe
from tests.problems import named, refused


@pytest.fixture
def described(tmp_path):
    """Return the path of an H100's description with other keys; None removes one."""

    def write(**changes) -> str:
        keys = yaml.safe_load((HARDWARE / "h100.yaml").read_text()) | changes
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
        gpu.cache_clear()
        return str(path)

    return write


@pytest.mark.parametrize("name", sorted(path.stem for path in HARDWARE.glob("*.yaml")))
def test_every_description_is_complete(name):
    found = gpu(name)
    assert found.name == name
    assert found.memory_gb >= 80 and found.bf16_tflops < found.fp8_tflops <= 2.01 * found.bf16_tflops
    assert found.nic_gb_per_s < found.nvlink_gb_per_s < found.hbm_gb_per_s
    assert found.assumed.mixture_training <= found.assumed.dense_training < 1
    assert 0 < found.assumed.shortest_step < found.assumed.longest_step < 10


def test_nvlink_spans_the_rack():
    def reached(name: str, ranks: int | None = None) -> int:
        return hardware.nvlink_gpus(ComponentConfig(nodes=18, gpus_per_node=4, gpu=name, ranks_per_node=ranks))

    assert gpu("gb200").nvlink_gpus == 72 and gpu("b200").nvlink_gpus == 8
    assert (reached("gb200"), reached("b200"), reached("b200", ranks=2)) == (72, 4, 2)
    assert hardware.nvlink_gpus(ComponentConfig(gpus_per_node=16, gpu="h200")) == 8


def test_memory_and_network_come_from_the_gpu(tmp_path, described):
    path = str(write_recipe(tmp_path))
    recipe = config.load(path, ["cluster.train.gpu=gb200", "cluster.generate.gpu=h200"])
    assert (recipe.cluster.network.node_gb_per_s, recipe.cluster.network.nic_gb_per_s) == (900, 50)
    assert hardware.memory_gb(recipe.cluster.train) == 197.9 and hardware.memory_gb(recipe.cluster.generate) == 150.1
    own = [
        f"cluster.train.gpu={described(nic_gb_per_s=12.5)}",
        "cluster.network.node_gb_per_s=7",
        "cluster.train.gpu_memory_gb=40",
    ]
    recipe = config.load(path, own)
    assert (recipe.cluster.network.node_gb_per_s, recipe.cluster.network.nic_gb_per_s) == (7, 12.5)
    assert hardware.memory_gb(recipe.cluster.train) == 40


def test_the_ranks_get_numbers_instead_of_the_description(tmp_path, described):
    """Check that the description need not exist where the job runs."""
    recipe = config.load(str(write_recipe(tmp_path)), [f"cluster.train.gpu={described(nic_gb_per_s=12.5)}"])
    config.write(recipe, tmp_path / "written.yaml")
    assert yaml.safe_load((tmp_path / "written.yaml").read_text())["cluster"]["network"]["nic_gb_per_s"] == 12.5


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"bf16_tflops": None}, ["missing-value"]),
        ({"compute_capability": None}, ["missing-value"]),
        ({"memory": 80, "tflops": 3}, ["unknown-key"]),
        ({"memory_gb": "80GB"}, ["wrong-type"]),
        ({"hbm_gb_per_s": 0}, ["too-small"]),
        ({"nvlink_crosses_nodes": 1}, ["wrong-type"]),
        ({"nvlink_gpus": 7.5}, ["wrong-type"]),
        ({"assumed": None}, ["missing-value"]),
        ({"assumed": {"bandwidth": 60}}, ["missing-value", "too-large"]),
    ],
)
def test_a_wrong_description_is_refused(described, changes, codes):
    path = described(**changes)
    with refused(*(("cluster.train.gpu", code) for code in codes)):
        gpu(path)


def test_a_gpu_without_a_description_is_refused(tmp_path):
    loaded = config.inspect(str(write_recipe(tmp_path)), ["cluster.train.gpu=h10", "cluster.generate.gpu=mi300x"])
    assert named(loaded.problems) == {(f"cluster.{name}.gpu", "file-not-found") for name in ("train", "generate")}
    assert "did you mean 'h100'?" in str(loaded.problems[0])
    assert loaded.recipe.cluster.network.nic_gb_per_s == gpu("h100").nic_gb_per_s  # so that other checks go on


@pytest.mark.parametrize(("value", "code"), [("5", "file-not-found"), ("null", "wrong-type"), ("{a: 1}", "wrong-type")])
def test_a_gpu_that_is_not_a_name_is_refused(tmp_path, value, code):
    loaded = config.inspect(str(write_recipe(tmp_path)), [f"cluster.train.gpu={value}"])
    assert named(loaded.problems) == {("cluster.train.gpu", code)}
