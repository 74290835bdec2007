"""Whether container images are there, and whether what the job needs is inside: pyxis gives a container only what is mounted.

A path counts as inside where a mount shows it under the name that it has here, because that is the name the job uses. What an
image holds, and what a site's enroot mounts by itself, is not known here; mounting it once more does no harm.
See https://github.com/NVIDIA/pyxis, --container-image and --container-mounts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.components import components
from launch.containers import OPTIONS
from launch.executors.base import ROOT
from launch.model_files import hf_home, inside, is_here, model_folder
from launch.preflight import own_code
from launch.preflight.weights import trouble
from pipeline import config
from pipeline.config import GENERATED_DATASETS, ComponentConfig, Recipe, RecipeError, is_dotted_path, keyed_sets, uses_megatron
from pipeline.values import VARIABLE

SQUASHFS = b"hsqs"  # what such a file begins with; bytes 40 to 48 say how long it is
FLAGS = re.compile(r"[a-z][a-z0-9=_-]*(\+[a-z][a-z0-9=_-]*)*")
IN_REGISTRY = re.compile(r"([a-z]+://)?[A-Za-z0-9][\w.$:+@#/-]*")  # [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]
GIVEN_BY_THE_JOB = ("HETSTEP_", "SLURM_")
MOST_LINKS = 40  # on the way to a file: path_resolution(7)


@dataclass(frozen=True)
class Mount:
    source: Path
    target: Path
    read_only: bool


@dataclass(frozen=True)
class Need:
    """A path that a component's ranks open."""

    what: str
    path: Path  # absolute
    written: bool = False


def problems(recipe: Recipe, pending: list[Path], conversions: Path) -> Iterator[str]:
    """conversions: the folder of Megatron checkpoints."""
    for variable in sorted(name for name in os.environ if name.startswith("PYXIS_CONTAINER_")):
        yield f"cluster: {variable} is set in the environment, and pyxis takes it where a component says nothing; unset it"
    for name, component in components(recipe).items():
        key = f"cluster.{name}"
        yield from _check_options(key, component)
        if component.container_image is None:
            yield from _check_python(key, component)
            continue
        yield from _check_image(key, component.container_image)
        yield from _check_variables(f"{key}.container_env", component)
        mounts: list[Mount] = []
        for text in ",".join(component.container_mounts or []).split(","):
            if text:
                yield from _read_mount(f"{key}.container_mounts", text, mounts)
        if "--container-mount-home" in component.srun_args:
            mounts.append(Mount(Path.home(), Path.home(), False))
        needs = list(_needs(recipe, name, pending, conversions))
        for need in needs:
            yield from _check_need(f"{key}.container_mounts", need, mounts)
        yield from _check_workdir(f"{key}.container_workdir", component.container_workdir)
        if component.python is None and not _of_every_system(sys.executable) and not follow(Path(sys.executable), mounts)[1]:
            yield (
                f"{key}.python: null takes {sys.executable}, which is not in the container; give the image's own, e.g. python3"
            )


def _check_python(key: str, component: ComponentConfig) -> Iterator[str]:
    python = component.python
    if python and os.sep in python and not os.access(python, os.X_OK):
        yield f"{key}.python: {python} is no program that can be run here; null takes {sys.executable}"


def _check_options(key: str, component: ComponentConfig) -> Iterator[str]:
    """That each thing is said once, and where it means something."""
    for argument in component.srun_args:
        option = argument.partition("=")[0]
        if option.startswith("--con") and any(each.startswith(option) for each in OPTIONS):  # srun takes a part of a name too
            yield f"{key}.srun_args: {argument} is what {key}.container_... say; give it there"
    if component.env_vars and "=" in (python := component.python or sys.executable):
        yield f"{key}.python: got {python}; expected a path without =, since env(1) sets {key}.env_vars. Try a link to it"
    if component.container_image is None:
        for field in ("container_mounts", "container_workdir", "container_env", "container_writable"):
            if getattr(component, field) not in (None, []):
                yield f"{key}.{field}: it says nothing without {key}.container_image"


def _check_variables(key: str, component: ComponentConfig) -> Iterator[str]:
    for name in component.container_env:
        if not VARIABLE.fullmatch(name):
            yield f"{key}: '{name}' is not the name of a variable; values are given in env_vars"
        elif not (name in os.environ or name in component.env_vars or name.startswith(GIVEN_BY_THE_JOB)):
            yield f"{key}: {name} is not set here, so there is no value to hand over; export it, or give it in env_vars"


def _of_every_system(program: str) -> bool:
    return program.startswith(("/usr/bin/", "/bin/"))


# ---- the image ----------------------------------------------------------------------------------------------------------


def _check_image(key: str, image: str) -> Iterator[str]:
    key = f"{key}.container_image"
    if not image.startswith(("/", ".")):  # as pyxis tells a path from an image in a registry
        if image.endswith((".sqsh", ".squashfs")) or image.startswith("~"):
            path = Path(image).expanduser().absolute()
            yield f"{key}: pyxis looks for '{image}' in a registry; for the file give its whole path, {path}"
        elif not IN_REGISTRY.fullmatch(image):
            yield f"{key}: '{image}' is neither a path nor of the form [USER@][REGISTRY#]IMAGE[:TAG]"
        return
    path = Path(image)
    if reason := trouble(path):
        yield f"{key}: {path} {reason.replace('fetch it again', 'give the path of a .sqsh file')}"
        return
    with open(path, "rb") as file:
        start = file.read(96)
    if start[:4] != SQUASHFS:
        yield f"{key}: {path} is no squashfs image, as `enroot import` makes them"
    elif (size := path.stat().st_size) < (length := int.from_bytes(start[40:48], "little")):
        yield f"{key}: {path} is cut off: it has {size:,} of {length:,} bytes; copy it again"


# ---- mounts -------------------------------------------------------------------------------------------------------------


def _read_mount(key: str, text: str, mounts: list[Mount]) -> Iterator[str]:
    """`SRC[:DST[:FLAGS]]`, flags joined by +, appended to `mounts`. Empty folders (tmpfs) hide what is below them."""
    source, colon, rest = text.partition(":")
    target, more, flags = rest.partition(":")
    target = target if colon else source
    named = source in ("tmpfs", "umount")  # of these pyxis knows what is meant
    if not source or not target.startswith("/") or not (named or source.startswith(("/", "."))) or not target.isprintable():
        yield f"{key}: '{text}' is not of the form /from:/to or /from:/to:ro"
        return
    if more and flags and not FLAGS.fullmatch(flags):
        yield f"{key}: '{text}': '{flags}' are not flags such as ro+rprivate; pyxis cannot mount paths with a colon or a comma"
        return
    if not named and not os.path.exists(source):
        yield f"{key}: '{text}': there is no {source} here; srun would fail"
        return
    mounts.append(Mount(Path(source).absolute(), Path(target), "ro" in flags.split("+")))


def _check_need(key: str, need: Need, mounts: list[Mount]) -> Iterator[str]:
    place, seen = follow(need.path, mounts)
    if seen:
        if need.written and (mount := _covering(place, mounts)) and mount.read_only:
            yield f"{key}: {need.what}, {need.path}, is written, but {mount.target} is mounted read-only; mount it without ro"
    elif set(":,") & set(str(need.path)):
        yield (
            f"{key}: {need.what}, {need.path}, is not mounted in the container, and pyxis cannot mount a path with a colon or a"
            " comma; mount a folder above it, or rename it"
        )
    else:
        real = Path(os.path.realpath(need.path))
        if place == need.path:
            also = f", and {real}:{real}, where it leads" if real != need.path else ""
            yield f"{key}: {need.what}, {need.path}, is not mounted in the container; add {need.path}:{need.path}{also}"
        else:
            also = f", and {real}:{real}, where that leads" if real != place else ""
            yield (
                f"{key}: {need.what}, {need.path}, is a link, or in one, that leads to {place}, which is not mounted in the"
                f" container; add {place}:{place}{also}"
            )


def _check_workdir(key: str, workdir: str | None) -> Iterator[str]:
    if workdir is not None and not (workdir.startswith("/") and workdir.isprintable()):
        yield f"{key}: '{workdir}' is not a whole path; a folder inside the container, such as {Path.cwd()}"


def _covering(path: Path, mounts: list[Mount]) -> Mount | None:
    """The innermost mount at or above the path."""
    above = [mount for mount in mounts if path.is_relative_to(mount.target)]
    return max(above, key=lambda mount: len(mount.target.parts), default=None)


def follow(path: Path, mounts: list[Mount]) -> tuple[Path, bool]:
    """(where `path` leads to inside the container, whether that is the same file as here). Not the same: the first place on the
    way that is not mounted, or is something else there.

    Each link on the way is followed as the kernel follows it inside, so that every link's target must be mounted too. A folder
    above a mount's target is there: enroot makes it.
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
        if at != mount.target and os.path.islink(shown := mount.source / at.relative_to(mount.target)):
            target, links = Path(os.readlink(shown)), links + 1
            if links > MOST_LINKS:
                return at, False
            at, ahead = (Path("/") if target.is_absolute() else at.parent), [*target.parts, *ahead]
            ahead = ahead[1:] if target.is_absolute() else ahead
    if (mount := _covering(at, mounts)) is None:
        return at, False
    shown = mount.source / at.relative_to(mount.target)
    return at, os.path.realpath(shown) == os.path.realpath(path)


# ---- what the ranks open ------------------------------------------------------------------------------------------------


def _needs(recipe: Recipe, name: str, pending: list[Path], conversions: Path) -> Iterator[Need]:
    """Of one component."""
    yield Need("the run folder", Path(recipe.run_dir).absolute(), written=True)
    yield Need("the code", ROOT.resolve())
    judged = config.reward_environment(recipe)
    for section, policy in config.models(recipe).items():
        if _holds(recipe, name, section, judged):
            yield from _of_model(f"the model of {section}.model_name", f"{section}.model_name", policy.model_name, pending)
    tokenizer = recipe.policy.tokenizer.name
    if tokenizer != recipe.policy.model_name:
        yield from _of_model("the tokenizer of policy.tokenizer.name", "policy.tokenizer.name", tokenizer, pending)
    if judged and _holds(recipe, name, f"env.{judged}", judged):
        key = f"env.{judged}.tokenizer.name"
        yield from _of_model(f"the tokenizer of {key}", key, config.reward_model_policy(recipe).tokenizer.name, pending)
    if name == "train":
        yield from _of_data(recipe)
    for code in own_code.named(recipe):
        if code.component == name and (folder := own_code.folder_of(code.path, recipe)):
            yield Need(f"the module of {code.key}", folder)
    if name != "generate" and uses_megatron(recipe.policy):
        yield Need("the folder of Megatron checkpoints", conversions, written=True)


def _holds(recipe: Recipe, name: str, section: str, judged: str | None) -> bool:
    """Whether a component's ranks hold the model of a section."""
    if section == f"env.{judged}":
        return name == recipe.env[judged].served_by
    return section == "policy" if name == "generate" else name == "train"


def _of_model(what: str, key: str, name: str | None, pending: list[Path]) -> Iterator[Need]:
    if not name:
        return
    if inside(name, pending) or Path(name).is_dir():
        yield Need(what, Path(name))
    elif is_here(name):
        try:
            snapshot = model_folder(key, name)
        except RecipeError:
            return
        yield Need(what, snapshot.parent.parent)  # its files are links to blobs/ there


def _of_data(recipe: Recipe) -> Iterator[Need]:
    for part, dataset in keyed_sets(recipe.data).items():
        for key in ("data_path", "prompt_file", "system_prompt_file"):
            if (value := getattr(dataset, key)) and Path(value).exists():
                yield Need(f"{part}.{key}", Path(value))
        name = dataset.dataset_name
        if name and Path(name).is_dir():
            yield Need(f"{part}.dataset_name", Path(name))
        elif name and name not in GENERATED_DATASETS and not is_dotted_path(name):
            cache = Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()
            if cache.is_dir():
                yield Need(f"the cache of {part}.dataset_name", cache)
