"""Check the user's own code before the job imports it: that it exists and is a valid environment, tool or data set.

Trusted code (`launch/recipes/trust.py`) is imported in a separate process, which ends after PROBE_S. Of other code, only the
source is read. If the ranks use another Python than this machine, they may have packages or GPUs that are missing here: for
code that cannot be imported for this reason, a note says so, and only the source is checked.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.executors.containers import runtime
from launch.executors.executor import ROOT
from launch.preflight import bounded, user_source
from launch.preflight.data_files import Record
from launch.preflight.data_records import Fields
from launch.preflight.signatures import module_spec
from launch.recipes.trust import Trust, trusted_folders
from pipeline.algorithms import CLASSES, GROUP, build
from pipeline.algorithms.evaluate import FORMATS, HARNESS_KINDS
from pipeline.config import (
    KINDS,
    Problem,
    Recipe,
    RecipeError,
    environment_component,
    generates,
    is_dotted_path,
    keyed_sets,
    rollout_function,
    serves_judge,
    trains,
)
from pipeline.config.environments import scorers
from pipeline.environments.reward_forms import ROUTER
from pipeline.environments.tools import TOOLS, read_tools
from pipeline.models import FAMILIES
from pipeline.recipe import user_code
from pipeline.recipe.problems import collected
from pipeline.seams import entry_points

PROBE_S = 30.0
INSTALLED = {GROUP: CLASSES, KINDS.group: KINDS.built_in, FAMILIES.group: FAMILIES.built_in}
"""Group of entry points -> names of ours."""
ABSENT = "there is no module"


@dataclass(frozen=True)
class CodeReference:
    """User code that a recipe names."""

    key: str
    path: str  # dotted, or FILE.py:NAME
    role: str  # environment, reward, agent, tool, dataset, processor, format, rollout, algorithm, loss
    component: str  # whose ranks import it
    kwargs: dict[str, Any] = field(default_factory=dict)
    environment: str = ""  # under `env`, for which it scores answers
    needs: dict[str, Any] | None = None  # `Needs` of the algorithm whose loss it replaces, and its sequences per item

    @property
    def kwargs_key(self) -> str:
        """The key of `kwargs`."""
        return "loss_fn.custom_kwargs" if self.role == "loss" else f"{self.key.rpartition('.')[0]}.kwargs"

    @property
    def file(self) -> Path | None:
        """The file that the path names; None for a dotted path."""
        module, _ = user_code.split(self.path)
        return Path(module) if user_code.is_file(module) else None


def code_references(recipe: Recipe) -> list[CodeReference]:
    """Return the user code in a recipe: all that has a dotted path or is in a file."""
    references, judging = [], environment_component(recipe)
    for name, environment in recipe.env.items() if generates(recipe) else ():
        for scorer in scorers(name, environment):
            if scorer.kind not in KINDS:
                role = "reward" if scorer.reward else "environment"
                references.append(CodeReference(scorer.key, scorer.kind, role, judging, scorer.kwargs, name))
        if environment.kind == "python_agent" and isinstance(path := environment.kwargs.get("function"), str):
            arguments = environment.kwargs.get("kwargs") or {}
            references.append(CodeReference(f"env.{name}.kwargs.function", path, "agent", judging, arguments))
        if environment.kind == "tools":
            key = f"env.{name}.kwargs.tools"
            tools, _ = read_tools(key, environment.kwargs.get("tools"))  # checks of the recipe report its problems
            kinds = {tool: config.kind for tool, config in tools.items() if config.kind and config.kind not in TOOLS}
            references += [CodeReference(f"{key}.{tool}", kind, "tool", judging) for tool, kind in kinds.items()]
    if rollout := rollout_function(recipe):
        references.append(CodeReference("rollout", rollout, "rollout", judging))
    if recipe.algorithm_class:
        references.append(CodeReference("algorithm", recipe.algorithm_class, "algorithm", "train"))
    if trains(recipe) and recipe.loss_fn.custom:
        path, arguments = recipe.loss_fn.custom, recipe.loss_fn.custom_kwargs
        replaced = build(recipe)
        needs = asdict(replaced.needs) | {"together": replaced.sequences_per_item}
        references.append(CodeReference("loss_fn.custom", path, "loss", "train", arguments, needs=needs))
    if trains(recipe):
        sets = keyed_sets(recipe.data).items()
        realm, names = "train", {key: dataset.dataset_name for key, dataset in sets}
        processors = {f"{key}.processor": dataset.processor for key, dataset in sets if dataset.processor}
        references += [CodeReference(key, path, "processor", "train") for key, path in processors.items()]
    else:
        tasks = recipe.evaluate.tasks.items()
        formats = {
            f"evaluate.tasks.{name}.format": task.format
            for name, task in tasks
            if task.kind not in HARNESS_KINDS and task.format not in FORMATS
        }
        references += [CodeReference(key, path, "format", "generate") for key, path in formats.items()]
        realm, names = "generate", {f"evaluate.tasks.{name}.data": task.data.dataset_name for name, task in tasks}
    for key, name in names.items():
        if name and is_dotted_path(name) and not os.path.exists(name):
            references.append(CodeReference(f"{key}.dataset_name", name, "dataset", realm))
    return [reference for reference in references if reference.path.count(".")]


def places(recipe: Recipe) -> list[Path]:
    """Return the folders that are searched for the user's modules, besides installed packages."""
    folders = [*_python_path(recipe), *recipe.module_folders]
    return list(dict.fromkeys(Path(folder).absolute() for folder in folders if folder))


def searched(recipe: Recipe) -> list[Path]:
    """Return the folders in which ranks find the user's modules, besides installed packages."""
    return [*places(recipe), *([Path.cwd()] if recipe.module_folders else [])]


def _python_path(recipe: Recipe) -> list[str]:
    """Return the folders in PYTHONPATH of the components and of this process."""
    components = (recipe.cluster.train, recipe.cluster.generate, recipe.cluster.environment)
    variables = [str((component.env_vars or {}).get("PYTHONPATH", "")) for component in components]
    return [folder for text in (*variables, os.environ.get("PYTHONPATH", "")) for folder in text.split(os.pathsep) if folder]


def folder_of(reference: CodeReference, recipe: Recipe) -> Path | None:
    """Return the folder of the file that a reference names, or the folder in `places` that holds its module.

    None if the module is installed or missing.
    """
    if reference.file is not None:
        return reference.file.parent
    top = reference.path.partition(".")[0]
    return next(
        (folder for folder in places(recipe) if os.path.isfile(folder / f"{top}.py") or os.path.isdir(folder / top)), None
    )


def source_of(reference: CodeReference, recipe: Recipe) -> Path | None:
    """Return the file that a reference names or that holds its module; None if the module is installed or missing."""
    if reference.file is not None:
        return reference.file
    return module_file(reference.path, recipe) if folder_of(reference, recipe) else None


def module_file(path: str, recipe: Recipe) -> Path | None:
    """Return the source of the module of a dotted path; None if there is none here. Nothing is imported."""
    spec = module_spec(user_code.split(path)[0], places(recipe))
    return Path(spec.origin) if spec is not None and spec.origin and os.path.isfile(spec.origin) else None


Replies = Mapping[str, dict[str, Any]]
"""Key -> reply of `user_source.py`, with {read} if only the source was read; or {unchecked}, with the reason."""


def probe(recipe: Recipe, trust: Trust = Trust.EVERYTHING) -> Replies:
    """Return replies about the user code of a recipe.

    Trusted code is imported in a separate process. Of other code only the source is read.
    """
    references = code_references(recipe)
    folders = searched(recipe)
    trusted = trusted_folders(trust, folders)
    imported = [reference for reference in references if _is_trusted(reference, recipe, trust, trusted)]
    replies = dict(_probe(recipe, imported, trust, trusted)) if imported else {}
    for reference in references:
        if reference not in imported:
            try:
                replies[reference.key] = _read(reference, folders) | {"read": True}
            except bounded.Unbounded as error:
                replies[reference.key] = {"unchecked": f"reading the source: {error}"}
    return replies


def _is_trusted(reference: CodeReference, recipe: Recipe, trust: Trust, trusted: Sequence[Path]) -> bool:
    """Return whether the code of a reference may be imported. trusted: the trusted folders of those that are searched."""
    if reference.file is not None:
        trusted = trusted_folders(trust, [reference.file.parent])
    return trust is Trust.EVERYTHING or folder_of(reference, recipe) in trusted


def _read(reference: CodeReference, folders: Sequence[Path], checks_imports: bool = True) -> dict[str, Any]:
    about = reference.path, reference.role, reference.kwargs
    return bounded.call(lambda: user_source.describe(*about, folders, checks_imports))


def has_parameter(reference: CodeReference, recipe: Recipe, name: str) -> bool:
    """Return whether the source of a user's reward function shows a parameter with this name."""
    try:
        reply = _read(reference, searched(recipe), checks_imports=False)
    except bounded.Unbounded:
        return False
    return name in (reply.get("named") or reply.get("fields") or ())


def processed(recipe: Recipe, trust: Trust, path: str, records: Sequence[Record]) -> list[dict[str, Any]] | str:
    """Return what the processor at a path makes of each record: {made: records} or {fault: text}.

    The function runs in a separate process, which ends after PROBE_S, if its code is trusted; else return why it does not run.
    """
    trusted = trusted_folders(trust, searched(recipe))
    reference = next(reference for reference in code_references(recipe) if reference.path == path)
    if not _is_trusted(reference, recipe, trust, trusted):
        return "a plan runs no processor of code that is not trusted (trust=true)"
    return _run(recipe, trust, trusted, {"process": path, "records": json.loads(json.dumps(records, default=str))})


def describe_kwargs(recipe: Recipe, name: str) -> str:
    """Return lines about the kwargs of the user's code in the environment `name`, from its source. Raises RecipeError."""
    lines = []
    for reference in code_references(recipe):
        if reference.environment == name:
            try:
                arguments = user_source.arguments(reference.path, [*places(recipe), Path.cwd()])
            except (user_source.CodeFault, RecursionError, ValueError) as error:
                reply = error.reply if isinstance(error, user_source.CodeFault) else {}
                message = f"{reference.path}: {reply.get('wrong') or reply.get('raised') or error}"
                raise RecipeError(Problem(reference.key, "not-importable", message)) from None
            lines.append(f"{reference.key.rpartition('.')[2]}: {reference.path}")
            lines += [f"{reference.kwargs_key}.{line}" for line in arguments or ["not shown by its source"]]
    return "\n".join(lines)


def fields(recipe: Recipe, replies: Replies) -> dict[str, list[Fields]]:
    """Return name under `env` -> the fields of each of the user's functions and classes in this environment.

    An environment that is a class has none. Code that could not be imported or is not valid is left out.
    """
    found: dict[str, list[Fields]] = {}
    for reference in code_references(recipe):
        reply = replies[reference.key]
        if reference.environment and "ok" in reply:
            calls = "named" in reply  # with the kwargs
            required = [name for name in reply["required"] if not calls or name not in reference.kwargs]
            kwargs = [*reference.kwargs] if calls else []
            found.setdefault(reference.environment, []).append(
                Fields(reference.key, reference.path, required, reference.kwargs_key, kwargs)
            )
    return found


def problems(recipe: Recipe, executor: str, notes: list[str], answers: Replies) -> Iterator[Problem]:
    """Yield problems of the user's code.

    executor: local, slurm or allocation. notes: receives code that could not be checked. answers: the result of `probe`.
    """
    for group, ours in INSTALLED.items():
        with collected(clashes := []):
            entry_points.refuse_names_of_ours(group, ours)
        yield from clashes
    references = code_references(recipe)
    if read := [reference for reference in references if "read" in answers[reference.key]]:
        what = ", ".join(f"{reference.key}={reference.path}" for reference in read)
        notes.append(f"{what}: only the source was checked, without an import. Try trust=true if you trust this recipe")
    for reference in references:
        answer = answers[reference.key]
        elsewhere = executor != "local" and runtime.has_another_python(getattr(recipe.cluster, reference.component))
        if "unchecked" in answer:
            notes.append(f"{reference.key}: {reference.path} was not checked: {answer['unchecked']}")
        elif elsewhere and answer.get("wrong", "").startswith(ABSENT):
            notes.append(
                f"{reference.key}: {reference.path} was not checked: it is not here; the ranks of"
                f" cluster.{reference.component} may have it"
            )
        elif "wrong" in answer:
            yield _wrong_code(reference, answer)
        elif "ok" in answer:
            notes += _unnamed_arguments(reference, answer)
            if answer.get("judge") == "needed" and not serves_judge(recipe):
                message = f"got null; expected the model that {reference.path} asks at its reward_router_address"
                yield Problem("judge.model_name", "missing-value", message)
        elif elsewhere and ("absent" in answer or answer["foreign"]):
            yield from _check_source(recipe, reference, answer, notes)
        elif "absent" in answer:
            what = f"{reference.path}: {answer['importer']} imports {answer['absent']}, which is not installed here"
            yield Problem(reference.key, "not-installed", what)
        else:
            yield Problem(reference.key, "not-importable", f"{reference.path} cannot be imported: {answer['raised']}")
    if serves_judge(recipe):
        yield from _check_judge_is_asked(recipe, answers)


def _check_judge_is_asked(recipe: Recipe, answers: Replies) -> Iterator[Problem]:
    """Yield a problem if nothing that scores answers may ask the judge of the job."""
    unused = []
    for scorer in (scorer for name, environment in recipe.env.items() for scorer in scorers(name, environment)):
        if scorer.kind in KINDS.built_in:
            if scorer.kind == "llm_judge" and scorer.kwargs.get("url") is None:
                return
        elif answers.get(scorer.key, {}).get("judge") == "unused":
            unused.append(scorer.kind)
        else:
            return
    if unused:  # else `check_judge` reports it
        message = f"got {recipe.judge.model_name}, but nothing asks it: {', '.join(unused)} has no parameter {ROUTER}"
        yield Problem("judge.model_name", "has-no-effect", f"{message}. Try env.NAME.kind=llm_judge without kwargs.url")


def _unnamed_arguments(reference: CodeReference, answer: dict[str, Any]) -> Iterator[str]:
    """Yield a note for each of a reward function's kwargs that only its `**fields` takes, which may be misspelt."""
    named = answer.get("named")
    if named is None or answer["fields"] is not None:
        return
    for name in reference.kwargs:
        if name not in named:
            close_names = difflib.get_close_matches(name, named, 1)
            advice = f"Did you mean {close_names[0]}?" if close_names else f"Try a parameter {name}"
            yield f"{reference.kwargs_key}.{name}: only **fields of {reference.path} takes it. {advice}"


def _probe(
    recipe: Recipe, references: list[CodeReference], trust: Trust = Trust.EVERYTHING, trusted: Sequence[Path] = ()
) -> Replies:
    """Run `user_source.py` on some references, and return its replies.

    trusted: the folders to search, if the trust is not Trust.EVERYTHING.
    """
    asked = {code.key: (code.path, code.role, code.kwargs, code.needs) for code in references}
    reply = _run(recipe, trust, trusted, {"asked": asked})
    return {reference.key: {"unchecked": reply} for reference in references} if isinstance(reply, str) else reply


def _run(recipe: Recipe, trust: Trust, trusted: Sequence[Path], asked: dict[str, Any]) -> Any:
    """Run `user_source.py` on a request, and return its reply, or as a text why there is none. trusted: as in `_probe`."""
    everything = trust is Trust.EVERYTHING
    request = {"folders": recipe.module_folders if everything else [*map(str, trusted)], **asked}
    folders = _python_path(recipe) if everything else filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    cwd = None if everything or Path.cwd() in trusted else ROOT  # it is searched too
    reply, why = ask("launch.preflight.user_source", request, [*folders], cwd)
    return why if reply is None else reply


def ask(
    module: str, request: Mapping[str, Any], python_path: Sequence[str], cwd: Path | None = ROOT
) -> tuple[dict[str, Any] | None, str]:
    """Run `python -m MODULE REPLY` with a JSON request on stdin, in a process that imports users' code.

    Returns (the JSON reply, ""), or (None, why there is none). python_path: folders besides ours.
    """
    path = os.pathsep.join([str(ROOT), *python_path])
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        reply = Path(folder) / "reply.json"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(reply)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            start_new_session=True,  # so that what the code starts is ended with it
        )
        why = ""
        try:
            process.communicate(json.dumps(request).encode(), timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            why = f"importing it takes more than {PROBE_S:g} s"
        finally:
            _end(process)
        if reply.exists() and not why:
            return json.loads(reply.read_text()), ""
        return None, why or f"Python ended with status {process.returncode} during the import"


def _end(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _wrong_code(reference: CodeReference, answer: dict[str, Any]) -> Problem:
    absent = answer["wrong"].startswith(ABSENT)
    hint = ". Try to move it beside the recipe's file, or to add its folder to module_folders=[FOLDER] or PYTHONPATH"
    key = reference.kwargs_key if answer["code"] == "unknown-key" else reference.key
    return Problem(key, answer["code"], f"{reference.path}: {answer['wrong']}{hint if absent else ''}")


def _check_source(recipe: Recipe, reference: CodeReference, answer: dict[str, Any], notes: list[str]) -> Iterator[Problem]:
    """Check the source of a module that cannot be imported on this machine."""
    reason = f"it imports {answer['absent']}, which is not installed here" if "absent" in answer else answer["raised"]
    notes.append(
        f"{reference.key}: {reference.path} was not imported ({reason}); the ranks of cluster.{reference.component} may have"
        " what it needs"
    )
    with contextlib.suppress(bounded.Unbounded):
        if "wrong" in (shown := _read(reference, places(recipe), checks_imports=False)):
            yield _wrong_code(reference, shown)
