"""Set the folders in which compilers keep their output to folders on the node that only this user can write.

vLLM and Triton write below the home folder by default. In a container that folder may be read-only or absent (enroot's
defaults). If it lies on NFS, all nodes share the files, and locks on them are slow. A variable that the user has set
stays; its `~` is expanded, as Triton and Inductor do not do it.

If a cluster empties /tmp after each job, a requeued job compiles again, unless TMPDIR is a mounted disk of the node. vLLM's
compiled code differs for each GPU of a node. Only a run on the same nodes can compile it in advance, such as a run with
grpo.max_num_steps=1 and another run_dir.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm_config",  # vLLM's usage statistics
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder below `node_folder`. Each library reads its variable when it first compiles, or later."""


def use_node_folders() -> None:
    """Set each variable of FOLDERS that is unset, unless this node has no folder for compiled code.

    If the cache folder of the user, `XDG_CACHE_HOME` or ~/.cache, is not writable, it is replaced as well. Hugging Face's
    files stay where they are.
    """
    for name in (*FOLDERS, "XDG_CACHE_HOME", "HF_HOME"):
        if name in os.environ:
            os.environ[name] = os.path.expanduser(os.environ[name])
    base = node_folder()
    if base is None:
        return
    for name, folder in FOLDERS.items():
        os.environ.setdefault(name, str(base / folder))
    general = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    if not _writable(Path(general)):
        if not _homeless(general):
            os.environ.setdefault("HF_HOME", f"{general}/huggingface")
        os.environ["XDG_CACHE_HOME"] = str(base / "cache")


def node_folder() -> Path | None:
    """Return this user's folder for compiled code on this node, and create it; None if there is no place for one.

    Compiled code is loaded from it, so no other user may write there, and the file system must permit execution, which /dev/shm
    often does not.
    """
    for parent in dict.fromkeys([os.environ.get("TMPDIR", "/tmp"), "/tmp", "/var/tmp", "/dev/shm"]):
        folder = Path(parent) / f"hetstep-{os.getuid()}"
        if _private(folder) and _writable(folder) and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return folder
    return None


def problem() -> str:
    """Return a text that names the folders of the variables in FOLDERS that cannot be written; "" if there are none."""
    named = {name: os.environ[name] for name in FOLDERS if name in os.environ}
    bad = [f"{name}={folder}" for name, folder in named.items() if not _writable(Path(folder))]
    return f"no file can be written to {', '.join(bad)}, where compilers keep their output" if bad else ""


def of_device(root: str, device: str) -> str:
    """Return the cache folder of a device below `root`; `root` if it is that folder. device: such as "3-1b2c".

    Code below `root` for another device, such as code from `vllm serve`, cannot be used: launch/OPERATIONS.md, "Compiled code".
    """
    path = Path(root)
    return root if path.name == f"device-{device}" else str(path / f"device-{device}")


def _private(folder: Path) -> bool:
    """Create the folder, and return whether it belongs to this user and no other user may write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


def _homeless(path: str) -> bool:
    """Return whether `~` is left in an expanded path: a user whom /etc/passwd does not list has no home."""
    return path.startswith("~")


def _writable(folder: Path) -> bool:
    """Create the folder, and return whether a file with a byte can be written there."""
    if _homeless(str(folder)):  # a folder of the name "~" in the current folder
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError:
        return False
    return True
