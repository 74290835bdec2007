"""plan.hardware: measurements of `make gpu-check` in place of assumed values. The measured GPU of these tests is invented."""

import json
from pathlib import Path

import pytest

from launch.plan import gpu_check, shared_gpus, train_time
from launch.plan.lengths import Lengths
from pipeline import config
from pipeline.config.hardware import gpu
from pipeline.models import flops
from tests.gpu_check.check import FORMAT
from tests.gpu_check.measurement import Place
from tests.gpu_check.parts import every
from tests.gpu_check.sizes import SIZES, training_case
from tests.gpu_check.training import STEPS
from tests.launch.plan.plans import planned, table
from tests.problems import named, refused

SAMPLE = Path(__file__).with_name("artificial_gpu_check.json")
MEASURED = f"plan.hardware={SAMPLE}"
EAGER = "policy.dtensor_cfg.compile=false"
OPTIMIZER = gpu_check.TRAINED * 30 / (3350e9 * 0.6)  # seconds, of the H100
EAGER_RATE = 0.25 * 0.5447103672837694 / (0.5447103672837694 - OPTIMIZER)
MEGATRON_RATE = 0.45 * 0.30261687071320525 / (0.30261687071320525 - OPTIMIZER)


@pytest.fixture
def changed(tmp_path):
    """Return a function that writes the sample with other values and returns its path."""

    def write(part: str = "", /, **values) -> str:
        record = json.loads(SAMPLE.read_text())
        target = next(one for one in record["results"] if one["part"] == part) if part else record
        for name, value in values.items():
            target[name] = {**target[name], **value} if isinstance(value, dict) else value
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(record))
        return str(path)

    return write


def test_measured_values_replace_assumed_ones():
    found, before = planned("llama8b_grpo_sync", EAGER, MEASURED), planned("llama8b_grpo_sync", EAGER)
    measured, assumed = gpu_check.gpu(found.recipe, found.recipe.cluster.train).assumed, gpu("h100").assumed
    assert measured.dense_training == pytest.approx(EAGER_RATE) and measured.page_locked == pytest.approx(40 / 64)
    assert 0 < measured.engine_step_ms < 1.6384e3 / 256  # a step's milliseconds, of which the GPU works in some
    assert (measured.bandwidth, measured.mixture_training, measured.host) == (0.6, assumed.mixture_training, assumed.host)
    assert found.recipe.cluster.train.gpu_memory_gb == 84.4  # of the smaller GPU
    one, other = (next(p for p in each.phases if "update" in p.name).parts["matrix products"] for each in (found, before))
    assert one / other == pytest.approx(assumed.dense_training / EAGER_RATE)


@pytest.mark.parametrize("part", ["FSDP2", "FSDP2 eager", "Megatron-Core"])
def test_the_plan_of_the_measured_step_takes_the_measured_seconds(changed, part):
    place, size = Place("cuda", "full", 1, Path("unused")), SIZES["full"]
    keys = STEPS[part]
    case = training_case(place, size, *keys)
    shapes = case.shapes(case.load())
    work = 3 * flops.forward(shapes["policy"], size.sequences * size.length, size.sequences * size.length**2 / 2)
    numbers = {"step, s": 0.5, "MFU": work / 0.5 / (gpu("h100").bf16_tflops * 1e12), "GB": 20.0, "plan's GB": 21.0}
    path = changed(f"train: {part}", outcome="passed", numbers=numbers)
    recipe = training_case(place, size, *keys, f"plan.hardware={path}").load()
    measured = gpu_check.gpu(recipe, recipe.cluster.train)
    planned_step = train_time.phases(recipe, shapes, Lengths(0, size.length, size.length, ""), measured)
    assert sum(phase.seconds for phase in planned_step) == pytest.approx(0.5)


def test_the_share_of_the_peak_is_of_the_backend_that_trains():
    keys = ("policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false")
    recipe = planned("llama8b_grpo_sync", *keys, MEASURED).recipe
    assert gpu_check.gpu(recipe, recipe.cluster.train).assumed.dense_training == pytest.approx(MEGATRON_RATE)
    recipe = planned("llama8b_grpo_sync", MEASURED).recipe  # compiled layers were left out
    assert gpu_check.gpu(recipe, recipe.cluster.train).assumed.dense_training == gpu("h100").assumed.dense_training


@pytest.mark.parametrize(
    ("name", "key", "compiled"),
    [
        ("llama8b_sft", "policy.dtensor_cfg.compile=null", True),
        ("llama8b_sft", "policy.dtensor_cfg.tensor_parallel_size=2", False),
        ("llama8b_sft", "policy.dtensor_cfg.recompute_granularity=selective", False),
        ("llama8b_sft", "policy.dtensor_cfg.use_liger_kernel=true", False),
        ("llama8b_sft", "policy.model_name=Qwen/Qwen3.5-9B", False),  # delta nets
        ("llama8b_sft", "policy.model_name=Qwen/Qwen3-30B-A3B", False),
        ("llama8b_lora", "policy.dtensor_cfg.lora_cfg.dropout=0.1", False),
    ],
)
def test_the_rate_of_compiled_layers_is_taken_where_a_run_compiles_them(changed, name, key, compiled):
    numbers = {"MFU": 0.5, "step, s": 0.3, "GB": 19.0, "plan's GB": 20.0}
    path = changed("train: FSDP2", outcome="passed", numbers=numbers)
    recipe = config.load(name, ["run_dir=runs/none", key, f"plan.hardware={path}"])
    (rate,) = (v for v in gpu_check.values(recipe, recipe.cluster.train) if v.field == "dense_training")
    assert rate.part == ("train: FSDP2" if compiled else "train: FSDP2 eager")


def test_turns_take_the_measured_rates():
    keys = ("policy.generation.colocated.enabled=true", "cluster.generate.nodes=1")
    found, before = planned("llama8b_grpo_sync", *keys, MEASURED), planned("llama8b_grpo_sync", *keys)
    named_turn = "the trainer takes the GPUs"
    one, other = (next(p.seconds for p in each.phases if p.name == named_turn) for each in (found, before))
    assert one / other == pytest.approx(0.8 / (40 / 64))
    assert "62% of the host link's 64 GB/s" in shared_gpus.assumed_rates(found.recipe)


@pytest.mark.parametrize("by", ["ipc", "host"])
def test_the_plan_of_the_measured_refit_takes_the_measured_seconds(by):
    """Two processes share the GPU there: each gets half of the bytes, and copies of both pass the one link to the host."""
    keys = ("policy.generation.colocated.enabled=true", "cluster.generate.nodes=1")
    recipe = planned("llama8b_grpo_sync", *keys, f"policy.generation.colocated.refit={by}", MEASURED).recipe
    parts = shared_gpus.refit(recipe, 1e9).parts
    if by == "ipc":
        assert parts == {"CUDA IPC": pytest.approx(1 / 100)}
    else:
        assert parts["gloo"] / 2 + parts["to and from the host"] == pytest.approx(1 / 6)


def test_a_refit_that_is_faster_than_its_copies_measures_no_gloo(changed):
    path = changed("refit: shared GPU", numbers={"host GB/s": 21.0})
    recipe = planned("llama8b_grpo_sync", f"plan.hardware={path}").recipe
    assert gpu_check.gpu(recipe, recipe.cluster.train).assumed.gloo_gb_per_s == gpu("h100").assumed.gloo_gb_per_s


def test_the_report_says_what_is_measured_and_what_is_assumed():
    told = table(planned("llama8b_grpo_sync", EAGER, MEASURED))
    assert f"measured h100 by {SAMPLE} of 2000-01-01, with small models: dense_training 0.261 (train: FSDP2 eager);" in told
    assert "Still assumed: mixture_training, bandwidth, host, all_reduce_us" in told
    assert "published steps" not in told  # their range is of assumed values
    assert "measured h100" not in table(planned("llama8b_grpo_sync"))


@pytest.mark.parametrize("outcome", ["failed", "cut"])
def test_a_part_that_failed_leaves_the_others(changed, outcome):
    path = changed("train: Megatron-Core", outcome=outcome, numbers={"MFU": None})
    found = planned("llama8b_grpo_sync", EAGER, f"plan.hardware={path}")
    assert gpu_check.gpu(found.recipe, found.recipe.cluster.train).assumed.dense_training == pytest.approx(EAGER_RATE)


def test_only_the_components_of_the_measured_gpu_take_it():
    found = planned("llama8b_grpo_sync", EAGER, "cluster.generate.gpu=h200", MEASURED)
    cluster = found.recipe.cluster
    assert gpu_check.gpu(found.recipe, cluster.train).assumed.dense_training == pytest.approx(EAGER_RATE)
    assert gpu_check.gpu(found.recipe, cluster.generate) == gpu("h200") and cluster.generate.gpu_memory_gb is None
    with refused(("plan.hardware", "contradiction")):
        planned("llama8b_grpo_sync", "cluster.train.gpu=b200", "cluster.generate.gpu=h200", MEASURED)


@pytest.mark.parametrize(
    ("part", "values", "why"),
    [
        ("", {"device": "cpu"}, "device: 'cpu'"),
        ("", {"size": "tiny"}, "size: 'tiny'"),
        ("", {"format": 2}, "format: 2"),
        ("", {"format": None}, "format: None"),
        ("", {"machine": {"gpus": []}}, "machine.gpus"),
        ("", {"machine": {"gpus": ["NVIDIA H100", "NVIDIA H200"]}}, "machine.gpus"),
        ("", {"machine": {"gpus": ["NVIDIA A10", "NVIDIA A10"]}}, "machine.gpus ['NVIDIA A10']"),
        ("", {"machine": {"memory_gb": []}}, "machine.memory_gb: []"),
        ("", {"results": []}, "no measurement that a plan uses"),
        ("", {"results": [3]}, "results.0: 3"),
        ("", {"date": 3}, "date: 3"),
        ("decode: vllm", {"outcome": "late"}, "outcome: 'late'"),
        ("decode: vllm", {"numbers": {"s": float("nan")}}, "s: nan"),
        ("decode: vllm", {"details": {"model": {}}}, "a model that cannot be planned"),
        ("decode: vllm", {"details": {"answer": 0}}, "answer: 0"),
        ("train: FSDP2 eager", {"numbers": {"MFU": None}}, "MFU: None"),
        ("train: FSDP2 eager", {"numbers": {"MFU": 1.5}}, "MFU 1.5"),
        ("train: FSDP2 eager", {"numbers": {"step, s": 0.02}}, "step, s 0.02 with MFU 0.25"),
    ],
)
def test_a_file_that_is_no_such_measurement_is_refused(changed, part, values, why):
    with pytest.raises(config.RecipeError) as error:
        planned("llama8b_grpo_sync", f"plan.hardware={changed(part, **values)}")
    (problem,) = error.value.problems
    assert (problem.key, problem.code) == ("plan.hardware", "bad-format") and why in problem.message, problem.message


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_file_without_a_record_is_refused(tmp_path, text):
    (tmp_path / "broken.json").write_text(text)
    with refused(("plan.hardware", "bad-format")):
        planned("llama8b_grpo_sync", f"plan.hardware={tmp_path}/broken.json")
    with refused(("plan.hardware", "file-not-found")):
        planned("llama8b_grpo_sync", f"plan.hardware={tmp_path}/absent.json")


def test_a_run_is_refused_before_it_is_submitted(changed):
    from launch.submission.prepare import examine

    found = examine("tiny_sft", [f"plan.hardware={changed(device='cpu')}"], dry=True, wants_plan=True)
    assert ("plan.hardware", "bad-format") in named(found.problems)


def test_the_program_has_these_parts_and_this_format(tmp_path):
    names = {part.name for part in every(Place("cpu", "tiny", 0, tmp_path))}
    assert names >= gpu_check.NUMBERS.keys() and FORMAT == gpu_check.FORMAT


@pytest.mark.full
def test_the_program_writes_what_is_read(tmp_path):
    """Run it on the CPU, without the numbers that only a GPU has."""
    from tests.gpu_check.__main__ import main

    out = tmp_path / "cpu.json"
    main(["device=cpu", "size=tiny", "parts=offload,train: FSDP2 eager,decode: transformers", f"out={out}"])
    record = json.loads(out.read_text())
    results = {one["part"]: one for one in record["results"]}
    assert results["offload"]["numbers"].keys() >= {*gpu_check.NUMBERS["offload"]}
    assert results["decode: transformers"]["details"].keys() == {"model", "requests", "prompt", "answer"}
    assert gpu_check._Decoded.model_validate(results["decode: transformers"]["details"]).requests == 4
    with refused(("plan.hardware", "bad-format")):
        gpu_check.read(str(out))
