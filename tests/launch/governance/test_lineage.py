"""Lineage follows inputs by their hashes, exports, renamed files, lineage from elsewhere, and the registry."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from launch import lineage as command
from launch import registry
from launch.governance import audit_log, export_lineage, graph, inputs, lineage_drawing, search
from launch.governance.audit_check import verify
from launch.governance.model_registry import ModelRegistry
from launch.runs import suites, waiting_checkpoints
from launch.runs.evaluation_sources import Source
from launch.runs.score_tables import SCORES
from pipeline import config
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig
from pipeline.files import digests
from pipeline.lineage import file_hashes, input_records, lineage_observer
from pipeline.lineage.file_hashes import FileState, HashCache
from pipeline.lineage.input_records import FOLDER, HASHES, MARK
from tests.launch import made_runs
from tests.problems import refused

FILES = {"config.json": "{}", "tokenizer.json": "the same in every model"}


def model(folder: Path, weights: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in {**FILES, "model.safetensors": weights}.items():
        (folder / name).write_text(text)
    return folder


def made(run: Path, recipe: str, *overrides: str) -> Path:
    """Write a run folder as a submission does, and hash its inputs as its job does."""
    made_runs.folder(run, recipe, *overrides)
    inputs.write(config.read(run / "recipe.yaml"), run)
    assert not list(lineage_observer.hash_inputs(run))
    return run


def saved(run: Path, step: int, weights: str):
    checkpoints = Checkpoints(run, "1-0", CheckpointingConfig())
    partial = checkpoints.begin(step)
    model(partial / "hf", weights)
    return checkpoints.commit(partial, step, None, {})


def exported(run: Path, checkpoint, out: Path) -> Path:
    shutil.copytree(checkpoint.folder / "hf", out, ignore=shutil.ignore_patterns(MARK))
    receipt = audit_log.as_record(audit_log.record("export", run, {"out": str(out)}))
    export_lineage.write(run, checkpoint.folder, checkpoint.step, out, "hf", receipt)
    return out


def evaluated(folder: Path, model_name: Path, value: float) -> Path:
    data = folder.parent / "questions.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text('{"input": "1+1="}\n')
    suite = str(Path(__file__).parents[3] / "recipes/suites/tiny.yaml")
    keys = (
        f"policy.model_name={model_name}",
        "cluster.train.ranks_per_node=1",
        f"evaluate.tasks.addition.data.data_path={data}",
    )
    made(folder, suite, *keys)
    metric = {"value": value, "low": value - 0.1, "high": value + 0.1}
    task = {"metric": "score", "metrics": {"score": metric}, "questions": 8, "samples": 8}
    scores = {"suite": "tiny", "model": str(model_name), "step": None, "tasks": {"addition": task}, "warnings": []}
    (folder / SCORES).write_text(json.dumps(scores))
    return folder


@pytest.fixture
def runs(tmp_path):
    """SFT from a base model and data; GRPO from SFT's checkpoint; its export; the export's evaluation."""
    root = tmp_path / "runs"
    (tmp_path / "sums.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+2=", "answer": "3"}\n')
    base = model(tmp_path / "base", "base weights")
    data = f"data.train.data_path={tmp_path / 'sums.jsonl'}"
    sft = made(root / "sft", "tiny_sft", "policy.random_init=false", f"policy.model_name={base}", data)
    first = saved(sft, 10, "sft weights")
    data = f"data.train.data_path={tmp_path / 'prompts.jsonl'}"
    grpo = made(root / "grpo", "tiny_grpo", f"policy.model_name={first.folder / 'hf'}", data)
    out = exported(grpo, saved(grpo, 5, "grpo weights"), tmp_path / "grpo_model")
    evaluated(root / "evaluations/tiny/grpo_model", out, 0.75)
    return root


def labels(nodes) -> list[str]:
    return [f"{node.kind} {node.label}" for node in nodes]


def made_from(root: Path, path: Path) -> list[str]:
    found = graph.read(root)
    begin = search.nodes_at(found, path, HashCache(None), "made_from")
    return labels(each.node for each in search.descendants(found, begin))


EVERYTHING = [
    *("run sft", "checkpoint sft, step 10", "run grpo", "checkpoint grpo, step 5", "export hf of grpo, step 5"),
    "evaluation tiny of " + "{}/grpo_model",
]


def everything(root: Path) -> list[str]:
    return [label.format(root.parent.name) for label in EVERYTHING]


def test_everything_that_was_made_from_a_data_set(runs, tmp_path, capsys):
    assert made_from(runs, tmp_path / "sums.jsonl") == everything(runs)
    assert made_from(runs, tmp_path / "prompts.jsonl") == everything(runs)[2:]
    assert command.main([f"made_from={tmp_path / 'sums.jsonl'}", f"root={runs}"]) == 0
    printed = capsys.readouterr().out
    assert "through sft > sft, step 10 > grpo > grpo, step 5" in printed
    assert "2 runs, 2 checkpoints, 1 export, 1 evaluation" in printed


def test_a_renamed_data_file_is_found(runs, tmp_path):
    renamed = (tmp_path / "sums.jsonl").rename(tmp_path / "other.txt")
    assert made_from(runs, renamed) == everything(runs)
    (tmp_path / "folder").mkdir()
    shutil.copy(renamed, tmp_path / "folder/part-0.jsonl")
    assert made_from(runs, tmp_path / "folder") == everything(runs)
    renamed.write_text('{"input": "another"}\n')
    with refused(("made_from", "file-not-found")):
        made_from(runs, renamed)


def test_code_that_a_recipe_names_is_an_input(runs, tmp_path, monkeypatch):
    """A file by its path, a module by its dotted path, a kind and a reward; not what is installed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scores.py").write_text("def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    (tmp_path / "lengths.py").write_text("def short(completions, **columns): return [1.0]\n")
    entries = "{fn: lengths.short}, {fn: exact_match}, {fn: json.dumps, name: installed}"
    rewards = f"[{{fn: '{tmp_path}/scores.py:compute_score'}}, {entries}]"
    run = made(
        runs / "own", "tiny_grpo", f"env.addition={{_override_: true, rewards: {rewards}}}", f"module_folders=[{tmp_path}]"
    )
    node = f"run {run.name}"
    for name in ("scores.py", "lengths.py"):
        assert made_from(runs, tmp_path / name) == [node]
    roles = [entry["role"] for entry in inputs.of_recipe(config.read(run / "recipe.yaml"))]
    assert roles.count("code") == 2
    renamed = tmp_path / "elsewhere.py"
    shutil.copy(tmp_path / "scores.py", renamed)
    assert made_from(runs, renamed) == [node]
    renamed.write_text("# another\n")
    with refused(("made_from", "file-not-found")):
        made_from(runs, renamed)


def test_a_model_is_known_by_its_weights_alone(runs, tmp_path):
    assert made_from(runs, model(tmp_path / "copy", "base weights")) == everything(runs)
    with refused(("made_from", "file-not-found")):
        made_from(runs, model(tmp_path / "other", "other weights"))
    by_tokenizer = made_from(runs, tmp_path / "other/tokenizer.json")  # which the export has too
    assert set(by_tokenizer) == set(everything(runs)) - {"export hf of grpo, step 5"}


def test_a_tree_of_ancestors_and_descendants(runs, tmp_path, capsys):
    page = tmp_path / "lineage.html"
    assert command.main([str(runs / "grpo"), f"root={runs}", f"draw={page}"]) == 0
    lines = [line.split("  /")[0] for line in capsys.readouterr().out.splitlines()]
    shape = [line.replace("│", " ").replace("├──", "   ").replace("└──", "   ") for line in lines]
    depth = {line.strip().split("  ")[0]: (len(line) - len(line.lstrip())) // 4 for line in shape}
    assert [depth[label] for label in ("run grpo", "made from", "checkpoint sft, step 10", "run sft")] == [0, 1, 2, 3]
    assert [depth[label] for label in ("data sums.jsonl", "model base", "data prompts.jsonl")] == [4, 4, 2]
    below = ("what was made from it", "checkpoint grpo, step 5", "export hf of grpo, step 5", everything(runs)[-1])
    assert [depth[label] for label in below] == [1, 2, 3, 4]
    text = page.read_text()
    assert all(f">{name}<" in text for name in ("sft", "grpo", "base", "sums.jsonl", "sft, step 10")) and "<svg" in text
    with refused(("draw", "bad-format")):
        lineage_drawing.write(graph.read(runs), [next(iter(graph.read(runs).nodes.values()))], tmp_path / "x.png")


def test_lineage_outlives_removed_checkpoints_and_moved_exports(runs, tmp_path):
    shutil.rmtree(runs / "sft/checkpoints")
    shutil.rmtree(runs / "grpo/checkpoints")
    moved = (tmp_path / "grpo_model").rename(tmp_path / "renamed")
    assert made_from(runs, tmp_path / "sums.jsonl") == everything(runs)
    (moved / MARK).unlink()
    assert made_from(runs, moved) == everything(runs)[-1:]


def test_an_export_knows_its_lineage_elsewhere(runs, tmp_path):
    """Only the exported folder and the data went to another cluster, where a run begins with it."""
    elsewhere = tmp_path / "elsewhere"
    copy = shutil.copytree(tmp_path / "grpo_model", elsewhere / "downloaded")
    assert str(tmp_path) not in (copy / MARK).read_text()  # nobody's paths
    made(elsewhere / "runs/dpo", "tiny_dpo", f"policy.model_name={copy}", "needs=[]")
    shutil.rmtree(runs)
    assert made_from(elsewhere / "runs", tmp_path / "sums.jsonl") == [*everything(runs)[:-1], "run dpo"]


def test_an_export_whose_mark_was_removed_is_known_by_its_weights(runs, tmp_path):
    copy = shutil.copytree(tmp_path / "grpo_model", tmp_path / "copy", ignore=shutil.ignore_patterns(MARK))
    made(runs / "dpo", "tiny_dpo", f"policy.model_name={copy}", "needs=[]")
    assert "run dpo" in made_from(runs, tmp_path / "prompts.jsonl")


def test_other_weights_beside_a_lineage_are_told(runs, tmp_path):
    copy = shutil.copytree(tmp_path / "grpo_model", tmp_path / "copy")
    (copy / "model.safetensors").write_text("other weights")
    made(runs / "dpo", "tiny_dpo", f"policy.model_name={copy}", "needs=[]")
    found = graph.read(runs)
    assert [node.facts["warning"] for node in found.nodes.values() if "warning" in node.facts] == [graph.DIFFERS]


def test_a_model_that_did_not_exist_at_the_submission_is_found_in_the_job(tmp_path):
    made_runs.folder(tmp_path / "runs/grpo", "tiny_grpo", f"policy.model_name={tmp_path}/later")
    run = tmp_path / "runs/grpo"
    inputs.write(config.read(run / "recipe.yaml"), run)
    model(tmp_path / "later", "weights")
    assert not list(lineage_observer.hash_inputs(run))
    paths = [Path(state.path).name for state, _ in file_hashes.read_hashes(run / FOLDER / HASHES)]
    assert sorted(paths) == sorted([*FILES, "model.safetensors"])


def test_an_evaluation_of_a_checkpoint_that_is_gone(runs, tmp_path):
    """The checkpoint was kept by hard links for its evaluation, and removed with the links."""
    folder = runs / "sft/evaluations/tiny/step_000010"
    linked = waiting_checkpoints.keep(runs / "sft/checkpoints/step_000010", folder / "kept")
    suite = str(Path(__file__).parents[3] / "recipes/suites/tiny.yaml")
    values = {"policy": {"model_name": str(tmp_path / "base")}, "evaluate": {"run": str(runs / "sft")}}
    values["evaluate"] |= {"checkpoint": str(linked), "step": 10}
    recipe = suites.inspect(suite, Source(values, "", folder, ""), (), {}).recipe
    config.write(recipe, folder / "recipe.yaml")
    inputs.write(recipe, folder)
    shutil.rmtree(folder / "kept")
    shutil.rmtree(runs / "sft/checkpoints")
    found = graph.read(runs)
    (begin,) = search.nodes_at(found, folder, HashCache(None))
    above = labels(found.nodes[key] for key in found.beyond([begin.key], down=False))
    assert {"checkpoint sft, step 10", "run sft", "data sums.jsonl"} <= set(above)
    assert f"evaluation {folder.name}" in made_from(runs, tmp_path / "sums.jsonl")


def test_the_scores_of_a_checkpoint_are_not_those_of_the_model_that_its_run_began_with(runs, tmp_path):
    (base,) = Checkpoints(runs / "sft", "1-0", CheckpointingConfig()).all()
    export = exported(runs / "sft", base, tmp_path / "sft_model")
    folder = evaluated(runs / "grpo/evaluations/tiny/step_000005", base.folder / "hf", 0.5)
    entries = json.loads((folder / FOLDER / inputs.INPUTS).read_text())
    checkpoint = runs / "grpo/checkpoints/step_000005"
    own = {"key": "evaluate.checkpoint", "role": "checkpoint", "name": str(checkpoint), "path": str(checkpoint)}
    entries["inputs"].append(input_records.complete_entry(own | {"files": [], "origin": None}))
    (folder / FOLDER / inputs.INPUTS).write_text(json.dumps(entries))
    scores = json.loads((folder / SCORES).read_text())
    (folder / SCORES).write_text(json.dumps(scores | {"run": str(runs / "grpo"), "step": 5}))
    assert ModelRegistry(runs / "registry").add("sft", export, root=runs).scores == []
    added = ModelRegistry(runs / "registry").add("grpo", tmp_path / "grpo_model", root=runs)
    assert sorted(each["value"] for each in added.scores) == [0.5, 0.75]
    assert "evaluation tiny of grpo, step 5" in made_from(runs, checkpoint)


def test_the_consolidated_model_of_a_checkpoint_is_found_under_another_name(runs, tmp_path):
    renamed = shutil.copy(runs / "sft/checkpoints/step_000010/hf/model.safetensors", tmp_path / "renamed.safetensors")
    assert made_from(runs, Path(renamed)) == everything(runs)[2:]


def test_runs_of_sweeps_are_found(runs, tmp_path):
    data = f"data.train.data_path={tmp_path / 'sums.jsonl'}"
    trial = made(runs / "ada/sweeps/suite/2026-01-01/runs/trial-0000", "tiny_dpo", data, "needs=[]")
    assert "run trial-0000" in made_from(runs, tmp_path / "sums.jsonl")
    receipt = audit_log.as_record(audit_log.record("submit", trial))
    (trial / "manifest.json").write_text(json.dumps([{"audit": receipt}]))
    before = verify(runs).receipts
    (runs / audit_log.LOG).write_text("")  # nor does the log name the run now
    assert before == verify(runs).receipts == 2


def test_an_export_is_understood_without_its_run(runs, tmp_path):
    shutil.rmtree(runs)
    found = graph.read(runs)
    (begin,) = search.nodes_at(found, tmp_path / "grpo_model", HashCache(None))
    above = labels(found.nodes[key] for key in found.beyond([begin.key], down=False))
    assert {"checkpoint grpo, step 5", "run grpo", "run sft", "data sums.jsonl"} <= set(above)
    (tmp_path / "grpo_model/model.safetensors").write_text("other weights")
    (begin,) = search.nodes_at(graph.read(runs), tmp_path / "grpo_model", HashCache(None))
    assert begin.facts["warning"] == graph.DIFFERS


def test_a_hash_is_computed_once(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("content")
    cache = tmp_path / ".hashes.jsonl"
    state, own = HashCache(cache).sha256(path)
    monkeypatch.setattr(digests, "sha256", None)
    assert HashCache(cache).sha256(path) == (state, own)
    monkeypatch.undo()
    cache.write_text(cache.read_text() + "{half of a li\n")
    os.utime(path, ns=(1, 1))
    assert HashCache(cache).get(FileState.of(path)) is None
    assert HashCache(cache).sha256(path)[1] == own
    cache.unlink()
    cache.symlink_to(tmp_path / "elsewhere")
    assert HashCache(cache).get(state) is None  # a link is not followed


def test_a_file_that_changed_after_the_submission_is_told(tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text('{"input": "1+1=", "output": "2"}\n')
    run = made_runs.folder(tmp_path / "runs/sft", "tiny_sft", f"data.train.data_path={data}")
    inputs.write(config.read(run / "recipe.yaml"), run)
    data.write_text('{"input": "1+1=", "output": "two"}\n')
    assert [message for message in lineage_observer.hash_inputs(run) if "changed since the submission" in message]


def test_a_file_rewritten_between_two_starts_is_told_with_both_hashes(tmp_path):
    """As many records, so that the position in the stream says nothing."""
    data = tmp_path / "sums.jsonl"
    data.write_text('{"input": "1+1=", "output": "2"}\n')
    run = made_runs.folder(tmp_path / "runs/sft", "tiny_sft", f"data.train.data_path={data}")
    recipe = config.read(run / "recipe.yaml")
    assert inputs.write(recipe, run) == [] and not list(lineage_observer.hash_inputs(run))
    first = digests.sha256(data)
    assert inputs.write(recipe, run) == []
    data.write_text('{"input": "1+1=", "output": "3"}\n')
    os.utime(data, (1e9, 1e9))
    (at_submission,) = inputs.write(recipe, run)
    assert first[:16] in at_submission and "2001-09-0" in at_submission and str(data) in at_submission
    (in_job,) = lineage_observer.hash_inputs(run)
    assert first[:16] in in_job and digests.sha256(data)[:16] in in_job
    assert not list(lineage_observer.hash_inputs(run)) and inputs.write(recipe, run) == []  # told once
    os.utime(data, (2e9, 2e9))  # touched
    inputs.write(recipe, run)
    assert not list(lineage_observer.hash_inputs(run))


def test_a_file_without_a_recorded_hash_is_hashed_when_asked_for(tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text('{"input": "1+1=", "output": "2"}\n')
    run = made_runs.folder(tmp_path / "runs/sft", "tiny_sft", f"data.train.data_path={data}")
    inputs.write(config.read(run / "recipe.yaml"), run)
    copy = shutil.copy(data, tmp_path / "copy.jsonl")
    assert made_from(tmp_path / "runs", Path(copy)) == ["run sft"]


def test_another_programs_lineage_json_is_no_origin(tmp_path):
    base = model(tmp_path / "base", "weights")
    for text in ('{"kind": "table"}', "[]", "{"):
        (base / MARK).write_text(text)
        assert input_records.origin_of(base) is None
    made(tmp_path / "runs/sft", "tiny_sft", "policy.random_init=false", f"policy.model_name={base}")
    assert made_from(tmp_path / "runs", base) == ["run sft"]


def test_files_that_cannot_be_read_are_left_out(runs, tmp_path):
    (runs / "sft" / FOLDER / HASHES).unlink()
    (runs / "sft" / FOLDER / HASHES).mkdir()  # as unreadable as another user's, for whoever runs this test
    exports = input_records.exports_of(runs / "grpo")
    exports.write_text(f"\0\n[]\n{exports.read_text()}" + '{"half": "of a li')
    assert made_from(runs, tmp_path / "prompts.jsonl") == everything(runs)[2:]
    exported(runs / "grpo", saved(runs / "grpo", 9, "later weights"), tmp_path / "later_model")
    assert "export hf of grpo, step 9" in made_from(runs, tmp_path / "prompts.jsonl")


def test_an_export_in_its_run_moves_with_it(runs, tmp_path):
    exported(runs / "sft", saved(runs / "sft", 20, "later weights"), runs / "sft/hf_step_20")
    runs.rename(tmp_path / "moved")
    found = graph.read(tmp_path / "moved")
    (node,) = (node for node in found.nodes.values() if node.label == "hf of sft, step 20")
    assert node.path == str(tmp_path / "moved/sft/hf_step_20")


def _export_often(run: Path, checkpoint, out: Path) -> None:
    for _ in range(10):
        export_lineage.write(run, checkpoint.folder, checkpoint.step, out, "hf", None)


def test_exports_of_a_run_at_once_all_count(tmp_path):
    run = made_runs.folder(tmp_path / "runs/sft", "tiny_sft")
    given = (run, saved(run, 1, "weights"), model(tmp_path / "out", "weights"))
    writers = [multiprocessing.get_context("fork").Process(target=_export_often, args=given) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(list(input_records.read_exports(run))) == input_records.exports_of(run).read_text().count("\n") == 30


def test_an_export_that_lists_its_digests_is_not_read_again(tmp_path, monkeypatch):
    run = made_runs.folder(tmp_path / "runs/sft", "tiny_sft")
    inputs.write(config.read(run / "recipe.yaml"), run)
    checkpoint, out = saved(run, 1, "weights"), model(tmp_path / "out", "weights")
    (out / "README.md").write_text("a card")
    listed = digests.add_manifest(out, {}, ("README.md",))
    monkeypatch.setattr(digests, "sha256", None)
    export_lineage.write(run, checkpoint.folder, checkpoint.step, out, "hf", None)
    assert json.loads((out / MARK).read_text())["files"] == listed and len(listed) == 4
    assert len(HashCache(tmp_path / f"runs/.hashes-{os.geteuid()}.jsonl").sha256(out / "config.json")[1]) == 64


def test_an_export_with_the_weights_of_its_base_is_drawn(tmp_path):
    """A learning rate of 0 makes a circle."""
    root, base = tmp_path / "runs", model(tmp_path / "base", "weights")
    run = made(root / "sft", "tiny_sft", "policy.random_init=false", f"policy.model_name={base}")
    exported(run, saved(run, 1, "weights"), tmp_path / "out")
    assert command.main([str(run), f"root={root}", f"draw={tmp_path}/lineage.svg"]) == 0
    assert (tmp_path / "lineage.svg").read_text().count(">hf of sft, step 1<") == 1
    assert set(made_from(root, base)) == {"run sft", "checkpoint sft, step 1"}


# ---- registry -----------------------------------------------------------------------------------------------------------


def test_versions_stages_and_scores(runs, tmp_path, capsys):
    folder = runs / "registry"
    first = ModelRegistry(folder).add("adder", tmp_path / "grpo_model", root=runs)
    assert (first.version, first.stage, first.run, first.step) == (1, "candidate", "grpo", 5)
    assert [(each["task"], each["value"], each["questions"]) for each in first.scores] == [("addition", 0.75, 8)]
    checkpoint = saved(runs / "grpo", 9, "later weights")
    exported(runs / "grpo", checkpoint, tmp_path / "later_model")
    assert registry.main(["add", "name=adder", f"export={tmp_path / 'later_model'}", f"registry={folder}", f"root={runs}"]) == 0
    for number, stages in ((1, ["production", "candidate"]), (2, ["retired", "production"])):
        assert registry.main(["promote", "name=adder", f"version={number}", "stage=production", f"registry={folder}"]) == 0
        assert [each.stage for each in ModelRegistry(folder).versions("adder")] == stages
    assert ModelRegistry(folder).show("adder").version == 2
    assert ModelRegistry(folder).show("adder", 1).history[-1]["why"] == "version 2 took its place"
    actions = [(entry["action"], entry["details"].get("version")) for entry in map(json.loads, (runs / "audit.jsonl").open())]
    assert actions[1:] == [("add", 1), ("export", None), ("add", 2), ("promote", 1), ("promote", 2)]
    assert not verify(runs).findings and verify(runs).receipts == 6
    capsys.readouterr()
    assert registry.main(["list", f"registry={folder}"]) == 0
    assert [line.split("  ")[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["retired", "adder", "1"],
        ["production", "adder", "2"],
    ]
    assert registry.main(["list", f"registry={tmp_path / 'other'}"]) == 0
    assert capsys.readouterr().out == f"no versions of any model in {tmp_path / 'other'}\n"


def test_a_registry_refuses_what_is_not_as_it_was_exported(runs, tmp_path):
    own = ModelRegistry(runs / "registry")
    out = tmp_path / "grpo_model"
    own.add("adder", out, root=runs)
    with refused(("export", "already-exists")):
        own.add("adder", out, root=runs)
    (out / "chat_template.jinja").write_text("another prompt")
    with refused(("version", "tampered")):
        own.promote("adder", 1, "production")
    (out / "chat_template.jinja").unlink()
    (out / "README.md").write_text("people may edit the card")
    own.add("third", out, root=runs)
    (out / "model.safetensors").write_text("other weights")
    with refused(("version", "tampered")):
        own.promote("adder", 1, "production")
    with refused(("export", "tampered")):
        own.add("other", out, root=runs)
    (out / MARK).unlink()
    with refused(("export", "file-not-found")):
        own.add("other", out, root=runs)
    with refused(("stage", "contradiction")):
        own.promote("adder", 1, "candidate")
    with refused(("version", "file-not-found")):
        own.promote("adder", 7, "retired")
    with refused(("name", "bad-format")):
        own.add("../adder", out, root=runs)
    assert [each.stage for each in own.versions("adder")] == ["candidate"]


def test_a_promotion_that_cannot_be_recorded_is_refused(runs, tmp_path):
    own = ModelRegistry(runs / "registry")
    own.add("adder", tmp_path / "grpo_model", root=runs)
    (runs / audit_log.HEAD).unlink()
    with refused(("cluster.audit", "tampered")):
        own.promote("adder", 1, "production")
    assert own.show("adder").stage == "candidate"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["add", "name=x"], "export"), (["promote", "name=x", "version=1"], "stage"), (["list", "version=1"], "version")],
)
def test_the_command_names_missing_and_unread_keys(arguments, key, capsys):
    assert registry.main(arguments) == 2
    assert f"error: {key}: " in capsys.readouterr().err
