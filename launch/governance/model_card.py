"""Write the model card of an exported checkpoint: where the weights come from, and what they score.

The card has no secrets. It shows only the last part of a local path, so it does not tell who trained where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.runs import evaluation_folder as evaluations
from launch.runs.evaluation_folder import EvaluationFolder
from launch.runs.run_folder import RunFolder
from pipeline.algorithms import read_by
from pipeline.recipe import secrets

FILE = "README.md"
ABSOLUTE = re.compile(r"(?<![\w:/.])~?(?:/[\w.@+-]+)+")
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
SETTINGS = ("loss_fn", "policy.optimizer", "policy.train_global_batch_size", "policy.max_total_sequence_length")
"""Keys of the recipe that the card shows, besides the algorithm's section."""


def text(run: RunFolder, step: int) -> str:
    """Return the model card of a run's checkpoint, as Markdown with the front matter of the Hugging Face Hub."""
    scored = [each for each in evaluations.of_run(run.folder) if each.step == step]
    card = "\n".join([*_front_matter(run), *_lineage(run, step), *_scores(scored), *_recipe(run)])
    return secrets.redact(card) + "\n"


def _front_matter(run: RunFolder) -> Iterator[str]:
    names = [str(each.get("dataset_name")) for each in _data(run).values()]
    published = [name for name in dict.fromkeys(names) if _is_hub_name(name)]
    values: dict[str, Any] = {"library_name": "transformers", "tags": ["hetstep", run.algorithm]}
    if _is_hub_name(run.model) and not run.value("policy.random_init"):
        values["base_model"] = run.model
    if published:
        values["datasets"] = published
    yield f"---\n{yaml.safe_dump(values, sort_keys=False).strip()}\n---\n"


def _lineage(run: RunFolder, step: int) -> Iterator[str]:
    submission = run.submissions[-1] if run.submissions else {}
    git, versions = submission.get("git"), submission.get("versions", {})
    steps = f"{step} of {run.max_steps}" if run.max_steps else str(step)
    commit = f"{git['commit']}{', with changes' if git['dirty'] else ''}" if git else ""
    facts = {
        "base model": "random weights, of the shape of " * bool(run.value("policy.random_init")) + _short_name(run.model),
        "algorithm": run.algorithm,
        "recipe": run.name,
        "steps": steps,
        "teacher": ", ".join(_teachers(run)),
        "judge": _short_name(str(run.value("judge.model_name"))) if "judge" in run.components else "",
        "precision": str(run.value("policy.precision", "")),
        "hardware": run.layout,
        "submitted": submission.get("time", ""),
        "Hetstep's commit": commit,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    yield f"# {run.name}, step {step}\n"
    yield f"Trained by {run.algorithm} with Hetstep.\n"
    yield from _table(("", ""), [(name, value) for name, value in facts.items() if value])
    rows = [_dataset(name, each) for name, each in _data(run).items()]
    if rows:
        yield "\n## Training data\n"
        yield from _table(("", "data set", "subset", "split", "records"), rows)


def _teachers(run: RunFolder) -> Iterator[str]:
    """Yield the distinct names of the teacher models of a run with distillation."""
    if run.algorithm == "distillation" or run.value(f"{run.algorithm}.adv_estimator.name") == "opd":
        sections = run.value("on_policy_distillation.teachers", {}).values() or [run.value("teacher", {})]
        yield from dict.fromkeys(_short_name(str(section.get("model_name") or "")) for section in sections)


def _data(run: RunFolder) -> dict[str, Mapping[str, Any]]:
    """Return name -> section of the recipe, for each training data set."""
    several = run.value("data.datasets", {})
    found = several or {"train": run.value("data.train", {})}
    return {name: each for name, each in found.items() if each and (each.get("dataset_name") or each.get("data_path"))}


def _dataset(name: str, each: Mapping[str, Any]) -> tuple[str, ...]:
    paths = each.get("data_path") or []
    source = each.get("dataset_name") or ", ".join(_short_name(path) for path in ([paths] if isinstance(paths, str) else paths))
    count = each.get("max_samples")
    return (
        name,
        _short_name(str(source)),
        each.get("subset") or "",
        each.get("split") or "",
        f"{count} drawn" if count else "all",
    )


def _scores(scored: Sequence[EvaluationFolder]) -> Iterator[str]:
    if not scored:
        return
    yield "\n## Scores\n"
    yield "With 95% intervals over the questions.\n"
    rows = []
    for each in scored:
        for task, summary in each.tasks.items():
            for metric, score in summary["metrics"].items():
                low, high = ("?" if score[end] is None else f"{score[end]:.3f}" for end in ("low", "high"))
                value = "" if score["value"] is None else f"{score['value']:.3f}"
                rows.append((each.suite, task, metric, value, f"{low} to {high}", summary["questions"], summary["samples"]))
    yield from _table(("suite", "task", "metric", "score", "interval", "questions", "answers"), rows)
    said = [f"{each.suite}: {warning}" for each in scored for warning in each.scores["warnings"]]
    warnings = [f"- {_plain(_without_folders(one))}" for one in said]
    if warnings:
        yield "\n".join(["", *warnings])


def _recipe(run: RunFolder) -> Iterator[str]:
    found = {key: _read(run.algorithm, key, run.value(key)) for key in (run.algorithm, *SETTINGS)}
    found = {key: value for key, value in found.items() if value not in (None, {})}
    yield f"\n## Recipe\n\n```yaml\n{yaml.safe_dump(_without_paths(found), sort_keys=False).strip()}\n```"


def _read(algorithm: str, key: str, value: Any) -> Any:
    """Return the value of a key, reduced to the keys that the algorithm reads.

    None or {} if the algorithm reads none of them.
    """
    if isinstance(value, Mapping):
        inside = {name: (_read(algorithm, f"{key}.{name}", inner), inner) for name, inner in value.items()}
        return {
            name: own
            for name, (own, inner) in inside.items()
            if own not in (None, {}) or (own == inner and algorithm in read_by(f"{key}.{name}"))
        }
    return value if algorithm in read_by(key) else None


def _without_folders(text: str) -> str:
    """Return a text in which each absolute path is reduced to its last part."""
    return ABSOLUTE.sub(lambda found: found[0].rpartition("/")[2], text)


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return _short_name(value) if isinstance(value, str) else value


def _is_hub_name(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _short_name(name: str) -> str:
    """Shorten runs/math/checkpoints/step_20 to math/checkpoints/step_20, and any other local path to its last part."""
    path = Path(name)
    if not (path.is_absolute() or name.startswith(("~", ".")) or path.exists()):
        return name
    begin = path.parts.index("checkpoints") - 1 if "checkpoints" in path.parts[1:] else -1
    return "/".join(path.parts[begin:])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |\n|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(_plain(str(cell)) for cell in row)} |"


def _plain(said: str) -> str:
    """Return a text on one line, with Markdown characters escaped."""
    return re.sub(r"([\\|`*<\[\]])", r"\\\1", " ".join(said.split()))
