"""Preflight against real file systems: weight files with real headers, images, mounts, and a disk that is too small."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.executors.containers import apptainer
from launch.executors.containers.runtimes import RUNTIMES
from launch.executors.executor import ROOT
from launch.preflight import architecture, container_images, file_systems, slurm_job
from launch.preflight.container_images import Mount, resolve_inside
from launch.preflight.file_systems import file_system
from launch.terminal.units import size
from pipeline import config
from pipeline.config import ComponentConfig, Problem, Recipe
from pipeline.models.tensors import tensors
from pipeline.models.weight_files import file_fault, read_weight_files
from tests.launch.model import write_recipe
from tests.problems import named

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(architecture, "is_described", lambda recipe: True)  # as of a recipe with GPUs
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def load(folder: Path, *overrides: str) -> Recipe:
    return config.load(str(write_recipe(folder)), ["policy.random_init=false", *overrides])


def write_shards(model: Path) -> None:
    """Write the model's tensors in two files, the output layer in the second, and their index."""
    config = json.loads((model / "config.json").read_text())
    weights = {tensor.name: np.full(tensor.shape, 0.5, np.float32) for tensor in tensors(config)}
    weight_map = {name: SHARDS[name == "lm_head.weight"] for name in weights}
    for shard in SHARDS:
        save_file({name: weights[name] for name, file in weight_map.items() if file == shard}, model / shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def disk(folder):
    """Mount a file system of 8 MiB."""
    path = folder / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def model(folder) -> Path:
    write_recipe(folder)
    write_shards(folder / "model")
    return folder / "model"


def problems(recipe: Recipe) -> list[Problem]:
    return list(file_systems.problems(recipe, on_nodes=recipe.cluster.executor != "local"))


# ---- the key ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "code"),
    [
        (None, 0, "file-not-found"),
        ("ab" * 32, 0o644, "permission-denied"),
        ("ab" * 16, 0o600, "bad-format"),
        ("ab" * 32, 0o600, None),
    ],
)
def test_the_file_with_a_key_is_looked_at(folder, model, content, mode, code):
    key = folder / "run.key"
    if content is not None:
        key.write_text(content)
        key.chmod(mode)
    recipe = load(folder, "checkpointing.encryption.enabled=true", f"checkpointing.encryption.key_file={key}")
    found = [each for each in problems(recipe) if each.key == "checkpointing.encryption.key_file"]
    assert [each.code for each in found] == ([code] if code else [])
    if content is None:  # it may be on the nodes
        notes: list[str] = []
        assert not [each for each in file_systems.problems(recipe, notes=notes, on_nodes=True) if each.key.endswith("key_file")]
        assert any("key_file" in note and "is not on this machine" in note for note in notes)


@pytest.mark.parametrize(
    ("command", "code"), [("cat run.key", None), ("no-such-program run.key", "file-not-found"), ("cat 'run.key", "bad-format")]
)
def test_the_command_that_prints_a_key_is_looked_for(folder, model, command, code):
    recipe = load(folder, "checkpointing.encryption.enabled=true", f'checkpointing.encryption.key_command="{command}"')
    assert [each.code for each in problems(recipe) if each.key.endswith("key_command")] == ([code] if code else [])


# ---- weights ------------------------------------------------------------------------------------------------------------


def test_complete_weights_pass(folder, model):
    assert problems(load(folder)) == []
    found = read_weight_files(model)
    assert list(found.files) == list(SHARDS) and len(found.tensors) == 12
    assert (found.faults, found.notes) == ({}, [])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12345")


def lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n")


def annex(path: Path) -> None:
    path.write_text("/annex/objects/SHA256E-s4976698672--00.safetensors\n")


def annex_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("../.git/annex/objects/aa/bb/SHA256E-s1--00")


def half_downloaded(path: Path) -> None:
    blobs = path.parent / "blobs"
    blobs.mkdir()
    (blobs / "abc.incomplete").write_bytes(b"1")
    path.unlink()
    path.symlink_to("blobs/abc")


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


MODEL = "policy.model_name"


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (cut, "unreadable", "is cut off: it has"),
        (cut_header, "unreadable", "is cut off: it has 20 bytes, and its header alone"),
        (lengthen, "unreadable", "has 5 bytes more than its header says"),
        (lfs, "unreadable", "is a Git LFS pointer, not the file; run `git lfs pull`"),
        (annex, "unreadable", "is a git-annex pointer, not the file; run `git annex get`"),
        (annex_link, "file-not-found", "is a git-annex link without its content"),
        (half_downloaded, "file-not-found", "has not been downloaded completely"),
        (dangling, "file-not-found", "is a link to"),
        (Path.unlink, "file-not-found", "is missing; fetch it again"),
        (lambda path: path.write_bytes(b""), "unreadable", "is empty"),
        (lambda path: path.write_bytes(b"x" * 200), "unreadable", "is not a safetensors file"),
        (lambda path: path.write_bytes((9).to_bytes(8, "little") + b'{"a": 12}'), "unreadable", "is not a safetensors file"),
        (lambda path: save_file({"other": np.zeros(8, np.float32)}, path), "unreadable", "lacks 1 of the 1 tensors"),
    ],
)
def test_damaged_weights_are_refused(folder, model, spoil, code, says):
    """A file's faults have one code, and messages that distinguish them."""
    spoil(model / SHARDS[1])
    (problem,) = problems(load(folder))
    assert named([problem]) == {(MODEL, code)}
    assert problem.message.startswith(f"{model / SHARDS[1]} {says}")


def test_every_bad_file_is_named(folder, model):
    cut(model / SHARDS[0])
    lfs(model / SHARDS[1])
    lfs(model / "tokenizer.json")
    said = problems(load(folder))
    assert [Path(problem.message.split()[0]).name for problem in said] == ["tokenizer.json", *SHARDS]
    assert problems(load(folder, "policy.random_init=true")) == said[:1]  # which needs no weights


def test_missing_weights_and_an_invalid_index_are_refused(folder, model):
    index = model / "model.safetensors.index.json"
    index.write_text("{}")
    assert named(problems(load(folder))) == {(MODEL, "unreadable")}
    lfs(index)
    assert named(problems(load(folder))) == {(MODEL, "unreadable")}
    index.unlink()
    assert named(problems(load(folder))) == {(MODEL, "file-not-found")}
    (model / "pytorch_model.bin").write_bytes(b"1")
    assert named(problems(load(folder))) == {(MODEL, "unsupported")}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be someone else")
def test_unreadable_weights_are_refused(folder, model, monkeypatch):
    (model / SHARDS[0]).chmod(0)
    monkeypatch.chdir(folder)
    os.seteuid(65534)
    try:
        said = file_fault(Path(f"model/{SHARDS[0]}"))
    finally:
        os.seteuid(0)
    assert said == "cannot be read: Permission denied"


def test_a_snapshot_in_the_hub_cache(folder, model):
    """Its files are links to blobs."""
    repository = folder / "hf/hub/models--org--name"
    snapshot = repository / "snapshots/0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123")
    for i, path in enumerate(sorted(model.iterdir())):
        path.rename(repository / f"blobs/{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    recipe = load(folder, "policy.model_name=org/name")
    assert problems(recipe) == []
    blob = (snapshot / SHARDS[0]).resolve()
    blob.rename(blob.with_name(f"{blob.name}.0a1b.incomplete"))
    (problem,) = problems(recipe)
    assert named([problem]) == {(MODEL, "file-not-found")} and str(snapshot / SHARDS[0]) in problem.message
    assert file_fault(snapshot / SHARDS[1]) is None


# ---- folders ------------------------------------------------------------------------------------------------------------


def test_unwritable_folders_are_refused(folder, model, disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    (folder / "run").mkdir()
    (folder / "run/checkpoints").symlink_to(disk)
    assert named(problems(load(folder))) == {("run_dir", "permission-denied")}


def test_the_type_of_a_file_system():
    assert file_system(Path("/proc/self/no/such/file")) == ("proc", "/proc")


def test_a_job_on_a_file_system_of_one_machine_is_noted(folder, model, monkeypatch):
    monkeypatch.setattr(file_systems, "LOCAL", {file_system(folder)[0]})
    notes: list[str] = []
    assert list(file_systems.problems(load(folder), [], notes, on_nodes=True)) == []
    assert "run_dir (" in notes[0] and "all nodes of the job must see it" in notes[0]
    assert list(file_systems.problems(load(folder), [], notes := [])) == []
    assert notes == []


# ---- containers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def contained(folder, model):
    """Return check(keys of cluster.train and cluster.generate): the problems of a job in containers."""
    image = folder / "train.sqsh"
    image.write_bytes(b"hsqs" + bytes(36) + (200).to_bytes(8, "little") + bytes(152))

    def check(*overrides: str, **keys) -> list[Problem]:
        recipe = load(folder, "cluster.executor=slurm", *overrides)
        recipe.cluster.train = ComponentConfig(**{"container_image": str(image), "python": "python3", **keys})
        return problems(recipe)

    return check


MOUNTS = "cluster.train.container_mounts"


def test_a_container_needs_mounts_for_its_files(folder, contained):
    said = contained(container_mounts=[f"{ROOT}:{ROOT}"])
    assert named(said) == {(MOUNTS, "not-mounted")}
    assert [problem.message.partition(", is not mounted")[0] for problem in said] == [
        f"the run folder, {folder / 'run'}",
        f"the model of policy.model_name, {folder / 'model'}",
        f"data.train.data_path, {folder / 'data.jsonl'}",
    ]
    assert contained(container_mounts=[str(ROOT), f"{folder}:{folder}:rw+rprivate"]) == []
    (said,) = contained(container_mounts=[f"{ROOT}:{ROOT}:ro", f"{folder}:{folder}:ro"])
    assert named([said]) == {(MOUNTS, "permission-denied")} and "the run folder" in said.message
    said = contained(container_mounts=[f"{ROOT}:{ROOT}", f"{folder}:/data"])  # it has another name there
    assert len(said) == 3


def test_links_that_leave_a_mount_are_refused(folder, contained):
    (folder / "far").mkdir()
    (folder / "model").rename(folder / "far/model")
    (folder / "model").symlink_to(folder / "far/model")
    near = [f"{path}:{path}" for path in (ROOT, folder / "run", folder / "data.jsonl", folder / "model")]
    (folder / "run").mkdir()
    assert contained(container_mounts=near) == []  # a mount follows the link that it is given
    (folder / "near").mkdir()
    (folder / "near/model").symlink_to(folder / "far/model")
    recipe_of = [*near[:3], f"{folder / 'near'}:{folder / 'near'}"]
    (folder / "model").unlink()
    (folder / "model").symlink_to(folder / "near/model")
    (said,) = contained(container_mounts=recipe_of)
    assert f"and {folder / 'far/model'}:{folder / 'far/model'}, the target of the link" in said.message


def test_every_link_of_a_chain_must_be_mounted(folder, contained):
    """Link model -> near/model -> middle/model -> far/model; an unmounted folder is noticed at every place."""
    for name in ("far", "middle", "near", "run"):
        (folder / name).mkdir()
    (folder / "model").rename(folder / "far/model")
    (folder / "middle/model").symlink_to("../far/model")
    (folder / "near/model").symlink_to(folder / "middle/model")
    (folder / "model").symlink_to(folder / "near/model")
    mounts = [f"{ROOT}:{ROOT}", f"{folder}:{folder}"]
    assert contained(container_mounts=mounts) == []
    for name in ("near", "middle", "far"):
        (said,) = contained(container_mounts=[*mounts, f"tmpfs:{folder / name}"])
        assert f"link to {folder / name / 'model'}, which is not mounted in the container. Try {folder / name}" in said.message
    (folder / "data").mkdir()
    (folder / "run").rename(folder / "data/run")
    (folder / "run").symlink_to("data/run")
    said = contained(container_mounts=[*mounts, f"{folder / 'data'}:{folder / 'data'}:ro"])
    assert named(said) == {(MOUNTS, "permission-denied")}
    (folder / "elsewhere").mkdir()
    (said,) = contained(container_mounts=[*mounts, f"{folder / 'elsewhere'}:{folder / 'middle'}"])  # another one of that name
    assert f"link to {folder / 'middle/model'}, which is not mounted" in said.message


def test_a_cycle_of_links_and_a_link_to_a_folder_on_the_path(folder):
    (folder / "real").mkdir()
    (folder / "real/file").write_text("")
    (folder / "first").symlink_to("second")
    (folder / "second").symlink_to(folder / "real")
    everything = [Mount(folder, folder, False)]
    assert resolve_inside(folder / "first/file", everything) == (folder / "real/file", True)
    hidden = Mount(Path("tmpfs"), folder / "real", False)
    assert resolve_inside(folder / "first/file", [*everything, hidden]) == (folder / "real/file", False)
    (folder / "second").unlink()
    (folder / "second").symlink_to("first")
    assert not resolve_inside(folder / "first/file", everything)[1]


@pytest.mark.parametrize(
    ("keys", "key", "code"),
    [
        ({"container_mounts": ["/nowhere:/data"]}, "container_mounts", "file-not-found"),
        ({"container_mounts": ["tmp:/data"]}, "container_mounts", "bad-format"),
        ({"container_mounts": ["/tmp:data"]}, "container_mounts", "bad-format"),
        ({"container_mounts": ["/tmp:"]}, "container_mounts", "bad-format"),
        ({"container_image": "train.sqsh"}, "container_image", "ambiguous"),
        ({"container_image": "/no/train.sqsh"}, "container_image", "file-not-found"),
        ({"container_image": str(ROOT / "README.md")}, "container_image", "bad-format"),
        ({"python": None}, "python", "not-mounted"),
        ({"container_workdir": "here"}, "container_workdir", "bad-format"),
        ({"container_workdir": "/a\n/b"}, "container_workdir", "bad-format"),
        ({"container_image": "an image"}, "container_image", "bad-format"),
        ({"container_image": "x --container-writable"}, "container_image", "bad-format"),
        ({"container_mounts": ["/tmp:/x:ro rw"]}, "container_mounts", "bad-format"),
        ({"container_mounts": ["/tmp:/x:/y"]}, "container_mounts", "bad-format"),
        ({"srun_args": ["--container-image=/y.sqsh"]}, "srun_args", "contradiction"),
        ({"srun_args": ["--container-mou=/x"]}, "srun_args", "contradiction"),
        ({"container_mounts": ["tmpfs:/scratch:size=1g+noexec"], "srun_args": ["--no-container-mount-home"]}, None, None),
        (
            {
                "container_image": "user@nvcr.io#nvidia/pytorch:26.07-py3",
                "srun_args": ["--container-env=A", "--container-writable"],
            },
            None,
            None,
        ),
    ],
)
def test_containers_that_cannot_start_are_refused(folder, contained, keys, key, code):
    given = [f"{ROOT}:{ROOT}", f"{folder}:{folder}"]
    problems = contained(**{**keys, "container_mounts": given + keys.get("container_mounts", [])})
    assert named(problems) == ({(f"cluster.train.{key}", code)} if key else set())


SIF = bytes(32) + b"SIF_MAGIC" + bytes(71) + (150).to_bytes(8, "little") + (50).to_bytes(8, "little") + bytes(72)
"""A SIF file of 200 bytes, whose header says that the data begin at byte 150 and have 50 bytes."""
APPTAINER = "cluster.container_runtime=apptainer"


@pytest.mark.parametrize(
    ("runtime", "keys", "key", "code", "says"),
    [
        ("apptainer", {}, None, None, ""),
        ("apptainer", {"container_image": "train.sqsh"}, None, None, ""),  # as enroot makes them
        ("apptainer", {"container_image": "sandbox", "container_args": ["--nvccli"]}, None, None, ""),
        ("apptainer", {"container_image": "empty"}, "container_image", "bad-format", "has no bin/bash"),
        ("apptainer", {"container_image": "data.jsonl"}, "container_image", "bad-format", "expected a SIF file"),
        ("apptainer", {"container_image": "cut.sif"}, "container_image", "unreadable", "199 of 200 bytes"),
        ("apptainer", {"container_image": "no.sif"}, "container_image", "file-not-found", "give the path of a SIF file"),
        (
            "apptainer",
            {"container_image": "docker://nvcr.io/nvidia/pytorch:26.07-py3"},
            *("container_image", "unsupported"),
            "every rank would pull and convert as it starts; expected a SIF file that all nodes see. Try `apptainer pull"
            " /SHARED/pytorch_26_07_py3.sif docker://nvcr.io/nvidia/pytorch:26.07-py3` once, and",
        ),
        (
            "apptainer",
            {"container_image": "oras://ghcr.io/me/x"},
            "container_image",
            "unsupported",
            "x.sif oras://ghcr.io/me/x",
        ),
        ("apptainer", {"container_image": "nvcr.io#nvidia/x"}, "container_image", "unsupported", "docker://nvcr.io/nvidia/x`"),
        ("apptainer", {"container_image": ":train.sif"}, "container_image", "ambiguous", "Try /"),
        ("apptainer", {"container_mounts": ["/tmp:/x:ro+rprivate"]}, "container_mounts", "bad-format", "expected ro or rw"),
        ("apptainer", {"container_mounts": ["tmpfs:/x"]}, "container_mounts", "bad-format", "expected /from"),
        ("apptainer", {"srun_args": ["--container-writable"]}, "srun_args", "contradiction", "an option of pyxis"),
        ("apptainer", {"container_args": ["--bind=/x"]}, "container_args", "contradiction", "container_mounts instead"),
        ("apptainer", {"container_args": ["--nv"]}, "container_args", "contradiction", "gpus_per_node instead"),
        ("pyxis", {}, "container_image", "bad-format", "It is a SIF image: try cluster.container_runtime=apptainer"),
        (
            "pyxis",
            {"container_image": "train.sqsh", "container_args": ["--nvccli"]},
            *("container_args", "has-no-effect", "Try cluster.train.srun_args"),
        ),
        ("none", {}, "container_image", "contradiction", "expected null, because cluster.container_runtime is none"),
    ],
)
def test_what_each_runtime_starts(folder, contained, runtime, keys, key, code, says):
    (folder / "train.sif").write_bytes(SIF)
    (folder / "cut.sif").write_bytes(SIF[:-1])
    (folder / "empty").mkdir()
    (folder / "sandbox/bin").mkdir(parents=True)
    (folder / "sandbox/bin/bash").symlink_to("/usr/bin/bash")
    image = keys.get("container_image", "train.sif")
    image = image.removeprefix(":") if set(":#") & set(image) else str(folder / image)
    given = [f"{ROOT}:{ROOT}", f"{folder}:{folder}", *keys.get("container_mounts", [])]
    found = contained(f"cluster.container_runtime={runtime}", **{**keys, "container_image": image, "container_mounts": given})
    assert named(found) == ({(f"cluster.train.{key}", code)} if key else set())
    assert all(says in problem.message for problem in found)


@pytest.mark.parametrize(("image", "code"), [("docker://x/y", "unsupported"), ("/on/the/cluster.sif", None)])
def test_a_machine_without_the_clusters_files_checks_what_the_recipe_says(folder, model, image, code):
    recipe = load(folder, "cluster.executor=slurm", "cluster.container_runtime=apptainer")
    recipe.cluster.train = ComponentConfig(container_image=image, python="python3")
    found = list(container_images.problems_anywhere(recipe, ()))
    assert named(found) == ({("cluster.train.container_image", code)} if code else set())


@pytest.mark.parametrize(
    ("switch", "device", "setuid", "says"),
    [
        ("0", "", 0, "lets users make no namespaces (user.max_user_namespaces is 0), which"),
        ("1", "x", 0, "lets users mount no SIF files, since they may not open"),
        ("1", "", 0, None),
        ("0", "x", 1, None),
    ],
)
def test_a_machine_whose_users_can_start_no_container_is_noted(tmp_path, monkeypatch, switch, device, setuid, says):
    """The program only tells whether it has its setuid part. Root may open each device, so `access` is replaced."""
    (tmp_path / "apptainer").write_text(f"#!/bin/sh\necho APPTAINER_SUID_INSTALL={setuid}\n")
    (tmp_path / "apptainer").chmod(0o755)
    (tmp_path / "switch").write_text(f"{switch}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(apptainer, "SWITCHES", {str(tmp_path / "switch"): "user.max_user_namespaces"})
    monkeypatch.setattr(apptainer, "FUSE", str(tmp_path / (device or "none")))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode, access=os.access: path != f"{tmp_path}/x" and access(path, mode))
    (tmp_path / "x").touch()
    notes: list[str] = []
    assert [*RUNTIMES["apptainer"].installation_problems(["key"], notes)] == []
    assert len(notes) == bool(says) and all(says in note for note in notes)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert [*RUNTIMES["apptainer"].installation_problems(["key"], notes)] == []
    assert "key: whether nodes have Apptainer was not checked: there is no apptainer or singularity in PATH here" in notes[-1]


def test_a_sites_own_mounts_count(folder, contained, monkeypatch):
    (folder / "train.sif").write_bytes(SIF)
    image, mounts = str(folder / "train.sif"), [f"{ROOT}:{ROOT}"]
    found = contained(APPTAINER, container_image=image, container_mounts=mounts)
    assert named(found) == {(MOUNTS, "not-mounted")}
    monkeypatch.setenv("APPTAINER_BIND", f"/nowhere,{folder}")
    assert contained(APPTAINER, container_image=image, container_mounts=mounts) == []


def test_container_keys_without_an_image_have_no_effect(contained):
    found = contained(container_image=None, python=None, container_mounts=["/tmp"], container_workdir="/tmp")
    assert named(found) == {(f"cluster.train.container_{key}", "has-no-effect") for key in ("mounts", "workdir")}


def test_a_folder_that_pyxis_cannot_mount(folder, contained):
    (folder / "with:colon").mkdir()
    run_dir, mounts = (
        f"run_dir={folder}/with:colon/run",
        [str(path) for path in (ROOT, folder / "model", folder / "data.jsonl")],
    )
    (problem,) = contained(run_dir, container_mounts=mounts)
    assert named([problem]) == {(MOUNTS, "not-mounted")}
    assert "a colon or a comma. Try to mount a folder above it" in problem.message
    assert contained(run_dir, container_mounts=[str(ROOT), str(folder)]) == []


def test_an_empty_folder_over_the_run_folder_and_pyxiss_own_variables(folder, contained, monkeypatch):
    mounts = [str(ROOT), str(folder)]
    assert named(contained(container_mounts=[*mounts, f"tmpfs:{folder}/run"])) == {(MOUNTS, "not-mounted")}
    monkeypatch.setenv("PYXIS_CONTAINER_WRITABLE", "1")
    assert named(contained(container_mounts=mounts)) == {("cluster", "contradiction")}


def test_an_image_that_ranks_wait_for_is_noted(folder):
    recipe, notes = load(folder), []
    image = "nvcr.io#nvidia/pytorch:26.01-py3"
    for part in (recipe.cluster.train, recipe.cluster.generate):
        part.container_image = image
    list(slurm_job.container_problems(recipe, notes))
    assert notes[0].startswith(
        f"cluster.train.container_image, cluster.generate.container_image: each node imports {image} from"
    )
    assert f"at most 600 s (cluster.timeouts.join). Try `enroot import docker://{image}` once" in notes[0]
    recipe.cluster.train.container_image = "/images/train.sqsh"
    assert [note.partition(":")[0] for note in container_images.import_notes(recipe)] == ["cluster.generate.container_image"]
    recipe.cluster.generate.container_image = None
    assert list(container_images.import_notes(recipe)) == []


def test_a_truncated_image_is_refused(folder, contained):
    cut(folder / "train.sqsh")
    problems = contained(container_mounts=[f"{ROOT}:{ROOT}", f"{folder}:{folder}"])
    assert named(problems) == {("cluster.train.container_image", "unreadable")}


def test_paths_from_where_the_job_is_submitted_are_absolute_in_the_container(folder, contained, monkeypatch):
    monkeypatch.chdir(folder)
    recipe = load(folder, "cluster.executor=slurm", "policy.model_name=./model", "data.train.data_path=data.jsonl")
    assert (recipe.policy.model_name, recipe.data.train.data_path) == (str(folder / "model"), str(folder / "data.jsonl"))
    mounts = [f"{ROOT}:{ROOT}", f"{folder}:{folder}"]
    image = str(folder / "train.sqsh")
    recipe.cluster.train = ComponentConfig(container_image=image, python="python3", container_mounts=mounts)
    assert problems(recipe) == []


def test_python_without_a_container(folder, contained):
    problems = contained(container_image=None, python="/no/python")
    assert named(problems) == {("cluster.train.python", "file-not-found")}


# ---- free space ---------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": False}
PARAMETERS = 2 * 1000 * 64 + 64 + 2 * (2 * 64 * (64 + 32) + 3 * 64 * 128 + 2 * 64)


def llama(folder: Path, *overrides: str) -> Recipe:
    recipe = load(folder, "policy.random_init=true", "checkpointing.save_period=1", "grpo.max_num_steps=100", *overrides)
    (folder / "model/config.json").write_text(json.dumps(LLAMA))
    return recipe


def test_checkpoints_that_do_not_fit_are_refused(folder, model, disk):
    one = PARAMETERS * 12  # a float32 weight, and Adam's two of the same
    assert 3 * one < 8 << 20 < 4 * one
    run = f"run_dir={disk / 'run'}"
    (problem,) = problems(llama(folder, run))
    assert named([problem]) == {("run_dir", "no-space")}
    assert f"this run will write {size(4 * one)} there: 4 checkpoints of {size(one)} at once" in problem.message
    assert problem.message.endswith("checkpointing.keep_top_k=2, which fits, or another run_dir")
    assert problems(llama(folder, run, "checkpointing.keep_top_k=2")) == []
    (problem,) = problems(llama(folder, run, "checkpointing.keep_top_k=2", "checkpointing.metric_name=train:reward"))
    assert "checkpointing.keep_top_k=1, which fits" in problem.message  # the latest is kept besides
    (problem,) = problems(llama(folder, run, "checkpointing.keep_top_k=null"))
    assert "100 checkpoints" in problem.message and "keep_top_k=2, which fits" in problem.message
    epochs, notes = llama(folder, run, "checkpointing.keep_top_k=null", "grpo.max_num_steps=1000000"), []
    assert list(file_systems.problems(epochs, [], notes)) == []
    assert [n for n in notes if "keep_top_k" in n or "num_rollouts" in n] == [
        f"checkpointing.keep_top_k: null keeps every checkpoint, {size(one)} each, and their number is not known"
        " without grpo.max_num_steps; room was checked for 2"
    ]
    assert problems(llama(folder, run, "checkpointing.enabled=false")) == []
    assert problems(llama(folder, run, "grpo.max_num_steps=3")) == []  # three are all there will be
    assert problems(llama(folder, run, "policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs={lr: 1}")) == []
    (problem,) = problems(llama(folder, run, "checkpointing.keep_top_k=2", "checkpointing.save_consolidated=true"))
    assert f"3 checkpoints of {size(one + 2 * PARAMETERS)}" in problem.message


def test_existing_checkpoints_are_counted(folder, model, disk):
    step = disk / "run/checkpoints/step_000001"
    step.mkdir(parents=True)
    (step / "train-rank00000.safetensors").write_bytes(bytes(PARAMETERS * 12))
    recipe = llama(folder, f"run_dir={disk / 'run'}", "checkpointing.keep_top_k=2")
    assert problems(recipe) == []  # it will be removed in time
    (disk / "other").write_bytes(bytes(1 << 20))
    assert problems(recipe) == []
    (disk / "more").write_bytes(bytes(1 << 20))
    (problem,) = problems(recipe)
    assert f", of which {size(PARAMETERS * 12)} are on the disk" in problem.message


def test_a_model_too_large_for_the_disk_is_refused(folder, model):
    recipe = llama(folder)
    (model / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 10**12}))
    (problem,) = problems(recipe)
    assert problem.message.endswith("another run_dir, or checkpointing.enabled=false")
