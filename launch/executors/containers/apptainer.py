"""Start ranks in images by Apptainer (https://apptainer.org), or by SingularityCE, whose command `singularity` is alike.

Each task of srun becomes `apptainer exec OPTIONS IMAGE bash -c TASK` on its node, so Slurm needs no plugin. The options and
their reasons:
    --nv                of components with GPUs: the node's driver. There is no --rocm, because no component runs on AMD's GPUs.
    --bind              the key container_mounts, and TMPDIR, which a node's job may have as a disk of its own
    --home FOLDER       an empty folder on the node's disk in place of the user's home. Apptainer mounts the home by default,
                        and Python would import from ~/.local there before it imports from the image. A recipe that needs the
                        home mounts it.
    no --cleanenv       the job's variables arrive, as with pyxis: of Slurm, torch, NCCL and CUDA, tokens and proxies. Variables
                        that the image sets keep the image's value. Those that name files of the node do not arrive
                        (`NOT_PASSED`); Apptainer itself keeps back PATH and LD_LIBRARY_PATH.
    no --contain        /tmp, /dev and /dev/shm stay the node's: NCCL needs the shared memory and the network devices. All else
                        in the image is read-only.
Variables of the submitting shell such as APPTAINER_CONTAINALL would change this, and are unset; APPTAINER_BIND stays, because
sites mount their file systems with it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from launch.executors import slurm_client
from launch.executors.containers import image_files
from launch.executors.containers.runtime import ContainerRuntime
from launch.executors.slurm_client import SlurmError
from pipeline.config import ComponentConfig, Problem

PROGRAMS = ("apptainer", "singularity")
NOT_PASSED = (
    *("LD_PRELOAD", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"),
    *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
)
"""Variables that name files of the node, such as those that `module load` sets."""
HIDDEN = "CLEANENV COMPAT CONTAIN CONTAINALL CWD FAKEROOT HOSTNAME IPC NET NO_ENV NO_EVAL NO_HOME NO_MOUNT NV NVCCLI PID PWD"
HIDDEN += " ROCM UTS WRITABLE"
"""Options of `exec` that Apptainer also reads from variables APPTAINER_... and SINGULARITY_..."""
BINDS = ("APPTAINER_BIND", "APPTAINER_BINDPATH", "SINGULARITY_BIND", "SINGULARITY_BINDPATH")
NO_PROGRAM = "there is no apptainer or singularity in PATH"
ON_NODE = (
    f'program=$(command -v {PROGRAMS[0]} || command -v {PROGRAMS[1]}) || {{ echo "hetstep: {NO_PROGRAM} on $SLURMD_NODENAME: '
    '$PATH" >&2; exit 127; }',
    f"unset {' '.join(NOT_PASSED)} {{APPTAINER,SINGULARITY}}_{{{HIDDEN.replace(' ', ',')}}}",
    "[[ -d ${TMPDIR:-} && -w $TMPDIR ]] || unset TMPDIR",
    "home=${TMPDIR:-/tmp}/hetstep-$UID/home",
    'parent=${home%/*}; (umask 077; mkdir -p "$home") && [[ -O $parent && ! -L $parent && -O $home && ! -L $home ]]'
    ' || { echo "hetstep: cannot make the folder $home as the user\'s own" >&2; exit 1; }',
    'exec "$program" exec --home "$home" ${TMPDIR:+--bind "$TMPDIR"} "$@"',
)
"""Lines of bash that a task runs on its node before the container starts. Its arguments follow the last line."""
OF_KEYS = {
    "container_mounts": ("--bind", "-B", "--mount"),
    "container_workdir": ("--pwd", "--cwd"),
    "gpus_per_node": ("--nv", "--rocm"),
}
"""Key of a component -> options of `exec` that the key sets."""
ERROR = re.compile(r"^(?:\x1b\[\d*m)?(?:(?:FATAL|ERROR)\s*:|hetstep:)\s*(.*?)(?:\x1b\[\d*m)?$")
"""Matches an error line of Apptainer, which may be in color, or of ON_NODE. Warnings and information are left out."""
CAUSES = {
    NO_PROGRAM: "Apptainer is not installed on that node, or comes with a module: run `module load apptainer`, or what the site"
    " calls it, before submission, because the job inherits PATH",
    r"image targets|architecture .* could not run|exec format error": "the image is for another CPU than the node's."
    " Build it on such a node",
    "not readable by the current user|could not open image.* permission denied": "the user of the job may not read the image,"
    " or a folder above it",
    "failed to retrieve path|could not open image .*no such file": "that node does not see the image. Keep it on a file system"
    " that all nodes mount",
    "image format not recognized|superblock|SIF.*(corrupt|invalid)": "the image is damaged or not complete. Copy it again",
    r"mount source .* doesn't exist": "a folder of container_mounts is missing on that node",
    r"destination .* doesn't exist in container": "the image lacks the target of a mount, and this Apptainer may not add one."
    " Make the folder in the image",
    "user bind control": "that node's Apptainer lets users mount nothing, so that no rank finds its code. Ask the"
    " administrators to set `user bind control = yes` in apptainer.conf",
    r"/dev/fuse|fusermount|squashfuse": "that node lets users mount no image by FUSE. Try a folder: `apptainer build --sandbox"
    " FOLDER IMAGE.sif` on a shared file system, or ask the administrators for access to /dev/fuse or for apptainer-suid",
    r"user namespace|newuidmap|uid_map|unshare|No setuid installation|loop device": "that node lets users make no namespaces."
    " Ask the administrators to set user.max_user_namespaces, or for apptainer-suid",
    '"bash": executable file not found|open elf binary /bin/sh': "the image has no bash and /bin/sh, which start each rank",
}
"""Pattern of Apptainer's errors -> what they mean and what to do. The first match counts."""
SWITCHES = {
    "/proc/sys/user/max_user_namespaces": "user.max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone": "kernel.unprivileged_userns_clone",
}
"""File -> sysctl that is 0 where users may make no namespaces."""
FUSE = "/dev/fuse"
"""The device with which users mount file systems, such as SIF files."""


class Apptainer(ContainerRuntime):
    """Runs SIF files, squashfs files and folders."""

    name = "apptainer"

    @override
    def start(self, component: ComponentConfig) -> tuple[list[str], list[str]]:
        assert component.container_image is not None
        options = ["--nv"] if component.gpus_per_node else []
        for mount in component.container_mounts or []:
            options += ["--bind", mount]
        if component.container_workdir:
            options += ["--pwd", component.container_workdir]
        options += component.container_args
        return [], ["bash", "-c", "; ".join(ON_NODE), self.name, *options, component.container_image]

    @override
    def image_problems(self, key: str, image: str) -> Iterator[Problem]:
        key, path = f"{key}.container_image", Path(image)
        if image.endswith((".sif", ".sqsh", ".img")) and not image.startswith(("/", ".")):
            yield Problem(key, "ambiguous", f"got '{image}'; expected an absolute path. Try {path.expanduser().absolute()}")
        elif not image.startswith(("/", ".")):
            uri = image if "://" in image else f"docker://{image.replace('#', '/')}"
            file = re.sub(r"\W+", "_", uri.partition("://")[2].rpartition("/")[2])
            advice = f"`apptainer pull /SHARED/{file}.sif {uri}` once, and {key}=/SHARED/{file}.sif"
            why = "which every rank would pull and convert as it starts" if "://" in image else "which is no path"
            message = f"got {image}, {why}; expected a SIF file that all nodes see"
            yield Problem(key, "unsupported", f"{message}. Try {advice}")
        elif path.is_dir():
            yield from _folder_problems(key, path)
        else:
            expected = "a SIF file, such as `apptainer build` makes, or a sandbox folder"
            yield from image_files.problems(key, path, (image_files.SIF, image_files.SQUASHFS), expected)

    @override
    def option_problems(self, key: str, component: ComponentConfig) -> Iterator[Problem]:
        for argument in component.srun_args:
            if argument.startswith(("--container-", "--no-container-")):
                message = f"got {argument}, an option of pyxis; expected none with cluster.container_runtime=apptainer"
                yield Problem(f"{key}.srun_args", "contradiction", f"{message}. Try {key}.container_args")
        for argument in component.container_args:
            for name, options in OF_KEYS.items():
                if argument.partition("=")[0] in options:
                    yield Problem(f"{key}.container_args", "contradiction", f"got {argument}; expected {key}.{name} instead")

    @override
    def added_mounts(self, component: ComponentConfig) -> list[str]:
        return [mount for name in BINDS for mount in os.environ.get(name, "").split(",") if mount]

    @override
    def installation_problems(self, keys: list[str], notes: list[str]) -> Iterator[Problem]:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            notes.append(
                f"{', '.join(keys)}: whether nodes have Apptainer was not checked: {NO_PROGRAM} here. If nodes have it as a"
                " module, load it before submission, because the job inherits PATH"
            )
        elif reason := _lacks_privileges(program):
            notes.append(f"{', '.join(keys)}: {reason}. Containers start only on nodes that differ in this")
        yield from ()

    @override
    def start_errors(self, lines: list[str]) -> list[str]:
        return list(dict.fromkeys(match[1] for line in lines if (match := ERROR.match(line)) and match[1]))

    @override
    def cause(self, errors: list[str]) -> str:
        said = "\n".join(errors)
        return next((cause for pattern, cause in CAUSES.items() if re.search(pattern, said)), "")


def _folder_problems(key: str, path: Path) -> Iterator[Problem]:
    """Yield a problem of a sandbox folder."""
    if not os.access(path, os.R_OK | os.X_OK):
        yield Problem(key, "permission-denied", f"{path} cannot be read. Try `chmod -R u+rX {path}`")
    elif not any(os.path.lexists(path / name) for name in ("bin/bash", "usr/bin/bash")):
        message = f"got the folder {path}, which has no bin/bash; expected a sandbox, such as `apptainer build --sandbox` makes"
        yield Problem(key, "bad-format", message)


def _lacks_privileges(program: str) -> str:
    """Return why this user can start no container, or none of a SIF file, on this machine; "" if no reason is known."""
    off = [f"{name} is 0" for path, name in SWITCHES.items() if os.path.exists(path) and Path(path).read_text().strip() == "0"]
    reason = f"this machine lets users make no namespaces ({off[0]})" if off else ""
    if not off and os.path.exists(FUSE) and not os.access(FUSE, os.R_OK | os.W_OK):
        reason = f"this machine lets users mount no SIF files, since they may not open {FUSE}"
    if os.geteuid() == 0 or not reason:
        return ""
    try:
        if "SUID_INSTALL=1" in slurm_client.run_command(program, "buildcfg"):
            return ""
    except SlurmError:
        pass  # an unusual installation, whose setuid part is unknown
    return f"{reason}, which {program} without its setuid part needs"
