"""Check that container images exist, and that the mounts show every path that the job opens: the runtimes mount few others.

A path counts as visible if a mount shows it under the same name as here, since the job uses that name. The contents of images
are not known here, nor the mounts that a site's enroot or Apptainer adds by itself; mounting these once more does no harm.
`launch/executors/containers/` has the checks of each runtime.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.executors.components import components
from launch.executors.containers.runtime import ContainerRuntime
from launch.executors.containers.runtimes import RUNTIMES
from launch.executors.executor import ROOT
from launch.preflight import installed, model_readings, user_imports
from launch.preflight.input_files import datasets_cache
from launch.recipes.model_files import is_inside, is_local, model_folder
from pipeline import config
from pipeline.config import (
    GENERATED_DATASETS,
    ComponentConfig,
    Problem,
    Recipe,
    RecipeError,
    data_paths,
    is_dotted_path,
    keyed_sets,
)
from pipeline.data import sources
from pipeline.environments.reward_forms import JUDGE_TOKENIZER
from pipeline.environments.search_index import NoIndex, corpus_of

MOST_LINKS = 40  # symbolic links in one path: path_resolution(7)


@dataclass(frozen=True)
class Mount:
    """A folder or file of the node, mounted in the container."""

    source: Path
    target: Path
    read_only: bool


@dataclass(frozen=True)
class RequiredPath:
    """A path that a component's ranks open."""

    purpose: str
    path: Path  # absolute
    written: bool = False


OF_FILES = ("file-not-found", "not-mounted", "permission-denied", "unreadable")
"""Codes of problems that another machine may not have."""


def problems(recipe: Recipe, pending: Sequence[os.PathLike]) -> Iterator[Problem]:
    """Yield problems of each component's image and mounts."""
    runtime = RUNTIMES[recipe.cluster.container_runtime]
    yield from runtime.environment_problems()
    for name, component in components(recipe).items():
        key = f"cluster.{name}"
        yield from _check_options(key, component, runtime)
        if component.container_image is None:
            python = component.python
            if python and os.sep in python and not os.access(python, os.X_OK):
                message = f"got {python}; expected an executable file on this machine. Try null, which means {sys.executable}"
                yield Problem(f"{key}.python", "file-not-found", message)
            continue
        yield from runtime.image_problems(key, component.container_image)
        mounts: list[Mount] = []
        for text in ",".join(component.container_mounts or []).split(","):
            if text:
                yield from _read_mount(f"{key}.container_mounts", text, mounts, runtime)
        for text in runtime.added_mounts(component):
            list(_read_mount(key, text, mounts, runtime))  # a site's mount may exist on its nodes alone
        needs = list(_needs(recipe, name, pending))
        for need in needs:
            yield from _check_need(f"{key}.container_mounts", need, mounts)
        workdir = component.container_workdir
        if workdir is not None and not (workdir.startswith("/") and workdir.isprintable()):
            message = f"got '{workdir}'; expected the absolute path of a folder inside the container, such as {Path.cwd()}"
            yield Problem(f"{key}.container_workdir", "bad-format", message)
        of_image = component.python is not None or sys.executable.startswith(("/usr/bin/", "/bin/"))
        if not of_image and not resolve_inside(Path(sys.executable), mounts)[1]:
            message = (
                f"got null, which means {sys.executable}, a file that is not mounted. Try a Python of the image, such as"
                " python3"
            )
            yield Problem(f"{key}.python", "not-mounted", message)


def problems_anywhere(recipe: Recipe, pending: Sequence[os.PathLike]) -> Iterator[Problem]:
    """Yield the problems that do not depend on this machine's files, for a machine that may lack the cluster's file systems."""
    yield from (problem for problem in problems(recipe, pending) if problem.code not in OF_FILES)


def import_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each image that nodes import from a registry while the ranks of other nodes wait."""
    parts = components(recipe)
    images: dict[str, list[str]] = {}
    for name, part in parts.items():
        if (image := part.container_image) and not image.startswith(("/", ".")) and (len(parts) > 1 or part.nodes > 1):
            images.setdefault(image, []).append(f"cluster.{name}.container_image")
    for image, keys in images.items():
        uri = image if "://" in image else f"docker://{image}"
        yield (
            f"{', '.join(keys)}: each node imports {image} from its registry before its ranks start, which takes minutes. Other"
            f" ranks wait at most {recipe.cluster.timeouts.join:g} s (cluster.timeouts.join). Try `enroot import {uri}` once,"
            " and set the path of the .sqsh file"
        )


def _check_options(key: str, component: ComponentConfig, runtime: ContainerRuntime) -> Iterator[Problem]:
    """Check that no option repeats a key, and that keys have an effect."""
    yield from runtime.option_problems(key, component)
    if component.env_vars and "=" in (python := component.python or sys.executable):
        message = f"got {python}; expected a path without =, since env(1) sets {key}.env_vars. Try a link to it"
        yield Problem(f"{key}.python", "bad-format", message)
    if component.container_image is None:
        for field in ("container_mounts", "container_workdir", "container_args"):
            if getattr(component, field) not in (None, []):
                yield Problem(f"{key}.{field}", "has-no-effect", f"has no effect without {key}.container_image")


# ---- mounts -------------------------------------------------------------------------------------------------------------


def _read_mount(key: str, text: str, mounts: list[Mount], runtime: ContainerRuntime) -> Iterator[Problem]:
    """Parse the mount `SRC[:DST[:FLAGS]]`, with flags joined by +, and append it to `mounts`.

    Yields a problem if it is malformed. A tmpfs hides everything below it.
    """
    source, colon, target_and_flags = text.partition(":")
    target, more, flags = target_and_flags.partition(":")
    target = target if colon else source
    named = source in runtime.special_mounts
    if not source or not target.startswith("/") or not (named or source.startswith(("/", "."))) or not target.isprintable():
        yield Problem(key, "bad-format", f"got '{text}'; expected /from:/to or /from:/to:ro")
        return
    if more and flags and not runtime.mount_flags.fullmatch(flags):
        message = f"got '{text}' with the flags '{flags}'; expected {runtime.flags_text}"
        yield Problem(key, "bad-format", f"{message}. A mount cannot name a path with a colon or a comma")
        return
    if not named and not os.path.exists(source):
        yield Problem(key, "file-not-found", f"got '{text}', but there is no {source} here; srun would fail")
        return
    mounts.append(Mount(Path(source).absolute(), Path(target), "ro" in flags.split("+")))


def _check_need(key: str, need: RequiredPath, mounts: list[Mount]) -> Iterator[Problem]:
    resolved, mounted = resolve_inside(need.path, mounts)
    subject, real = f"{need.purpose}, {need.path},", Path(os.path.realpath(need.path))
    if mounted:
        if need.written and (mount := _covering(resolved, mounts)) and mount.read_only:
            message = f"{subject} must be writable, but {mount.target} is mounted read-only. Try to mount it without ro"
            yield Problem(key, "permission-denied", message)
        return
    also = f", and {real}:{real}, the target of the link" if real != resolved else ""
    if set(":,") & set(str(need.path)):
        reason = "is not mounted in the container, and a mount cannot name a path with a colon or a comma"
        message = f"{subject} {reason}. Try to mount a folder above it, or to rename it"
    elif resolved == need.path:
        message = f"{subject} is not mounted in the container. Try {resolved}:{resolved}{also}"
    else:
        reason = f"resolves through a symbolic link to {resolved}, which is not mounted in the container"
        message = f"{subject} {reason}. Try {resolved}:{resolved}{also}"
    yield Problem(key, "not-mounted", message)


def _covering(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the innermost mount at or above the path."""
    above = [mount for mount in mounts if path.is_relative_to(mount.target)]
    return max(above, key=lambda mount: len(mount.target.parts), default=None)


def resolve_inside(path: Path, mounts: list[Mount]) -> tuple[Path, bool]:
    """Return (path that `path` resolves to inside the container, whether that is the same file as on this machine).

    The function follows each link as the kernel does inside the container, so the target of every link must be mounted too. If
    the second value is False, the first is the path at which the resolution leaves the mounts. Folders above a mount's target
    exist, since the runtimes make them.
    """
    at, ahead, links = Path("/"), list(path.parts[1:]), 0
    while ahead:
        part = ahead.pop(0)
        at = at.parent if part == ".." else at / part
        mount = _covering(at, mounts)
        if mount is None:
            if any(mount.target.is_relative_to(at) for mount in mounts):
                continue
            return at.joinpath(*ahead), False
        if at != mount.target and os.path.islink(source := mount.source / at.relative_to(mount.target)):
            target, links = Path(os.readlink(source)), links + 1
            if links > MOST_LINKS:
                return at, False
            at, ahead = (Path("/") if target.is_absolute() else at.parent), [*target.parts, *ahead]
            ahead = ahead[1:] if target.is_absolute() else ahead
    if (mount := _covering(at, mounts)) is None:
        return at, False
    source = mount.source / at.relative_to(mount.target)
    return at, os.path.realpath(source) == os.path.realpath(path)


# ---- what the ranks open ------------------------------------------------------------------------------------------------


def _needs(recipe: Recipe, name: str, pending: Sequence[os.PathLike]) -> Iterator[RequiredPath]:
    """Yield the paths that the ranks of one component open."""
    yield RequiredPath("the run folder", Path(recipe.run_dir).absolute(), written=True)
    yield RequiredPath("the code", ROOT.resolve())
    rewarded = config.reward_environment(recipe)
    if name == "judge":
        judge = config.served_judge_policy(recipe)
        yield from _model_paths("the model of judge.model_name", "judge.model_name", judge.model_name, pending)
        yield from _model_paths("the tokenizer of judge.tokenizer.name", "judge.tokenizer.name", judge.tokenizer.name, pending)
        for key, path in model_readings.template_files(recipe).items():
            if key.startswith("judge."):
                yield RequiredPath(f"the chat template of {key}", path)
        return
    for section, policy in config.models(recipe).items():
        if _holds(recipe, name, section, rewarded):
            yield from _model_paths(f"the model of {section}.model_name", f"{section}.model_name", policy.model_name, pending)
    tokenizer = recipe.policy.tokenizer.name
    if tokenizer != recipe.policy.model_name:
        yield from _model_paths("the tokenizer of policy.tokenizer.name", "policy.tokenizer.name", tokenizer, pending)
    if rewarded and _holds(recipe, name, f"env.{rewarded}", rewarded):
        key = f"env.{rewarded}.tokenizer.name"
        yield from _model_paths(f"the tokenizer of {key}", key, config.reward_model_policy(recipe).tokenizer.name, pending)
    teachers = config.teacher_policies(recipe) if name == "train" else {}
    for section, teacher in teachers.items():
        if teacher.tokenizer.name != teacher.model_name:
            key = f"{section}.tokenizer.name"
            yield from _model_paths(f"the tokenizer of {key}", key, teacher.tokenizer.name, pending)
    for key, path in model_readings.template_files(recipe).items():
        if key.startswith(("policy.", *teachers)) or (rewarded and _holds(recipe, name, f"env.{rewarded}", rewarded)):
            yield RequiredPath(f"the chat template of {key}", path)
    if (key := recipe.checkpointing.encryption.key_file) and Path(key).exists() and name not in ("reward", "environment"):
        yield RequiredPath("the key of checkpointing.encryption.key_file", Path(key))
    if name == "train":
        yield from _data_paths(recipe)
    if name == config.environment_component(recipe):
        for key, image in installed.images(recipe).items():
            folder = image if os.path.exists(image) else image.rpartition(":")[0]  # FOLDER:TAG of an OCI layout
            yield RequiredPath(f"the image of {key}", Path(folder or image))
        for key, index in installed.indexes(recipe).items():
            yield RequiredPath(f"the index of {key}", index)
            with contextlib.suppress(NoIndex):  # another check reports it
                yield RequiredPath(f"the corpus of {key}", corpus_of(index))
    for code in user_imports.code_references(recipe):
        if code.component == name and (folder := user_imports.folder_of(code, recipe)):
            yield RequiredPath(f"the module of {code.key}", folder)
        asks = code.component == name and code.environment and config.serves_judge(recipe)
        if asks and user_imports.has_parameter(code, recipe, JUDGE_TOKENIZER):
            key, tokenizer = "judge.tokenizer.name", config.served_judge_policy(recipe).tokenizer.name
            yield from _model_paths(f"the tokenizer of {key}, for {code.path}", key, tokenizer, pending)


def _holds(recipe: Recipe, name: str, section: str, rewarded: str | None) -> bool:
    """Return whether a component's ranks hold the model of a section. rewarded: the environment with a reward model."""
    if rewarded and section == f"env.{rewarded}":
        return name == recipe.env[rewarded].served_by
    return section == "policy" if name in ("generate", "environment") else name == "train"


def _model_paths(purpose: str, key: str, name: str | None, pending: Sequence[os.PathLike]) -> Iterator[RequiredPath]:
    if not name:
        return
    if is_inside(name, pending) or Path(name).is_dir():
        yield RequiredPath(purpose, Path(name))
    elif is_local(name):
        try:
            snapshot = model_folder(key, name)
        except RecipeError:
            return
        yield RequiredPath(purpose, snapshot.parent.parent)  # its files are links to blobs/ in that folder


def _data_paths(recipe: Recipe) -> Iterator[RequiredPath]:
    for part, dataset in keyed_sets(recipe.data).items():
        for path in data_paths(dataset):
            whole = Path(path)
            if sources.is_glob(path):
                whole = next(parent for parent in whole.parents if not sources.is_glob(str(parent)))
            if whole.exists():
                yield RequiredPath(f"{part}.data_path", whole)
        for key in ("prompt_file", "system_prompt_file"):
            if (value := getattr(dataset, key)) and Path(value).exists():
                yield RequiredPath(f"{part}.{key}", Path(value))
        name = dataset.dataset_name
        if name and Path(name).is_dir():
            yield RequiredPath(f"{part}.dataset_name", Path(name))
        elif name and name not in GENERATED_DATASETS and not is_dotted_path(name) and datasets_cache().is_dir():
            yield RequiredPath(f"the cache of {part}.dataset_name", datasets_cache())
