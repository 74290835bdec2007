"""A cluster whose srun takes pyxis's options, by pyxis_stub.c, built for the installed Slurm; it records what tasks got."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.cluster import SlurmCluster

SOURCE = Path(__file__).with_name("pyxis_stub.c")


def missing() -> list[str]:
    """Return what the plugin's build needs and this machine lacks."""
    header = any(Path(folder, "slurm/spank.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    return ([] if shutil.which("gcc") else ["gcc"]) + ([] if header else ["slurm/spank.h (libslurm-dev)"])


@contextmanager
def cluster(folder: Path, nodes: int | list[str] = 4, squashfuse: bool = False, **cluster: str) -> Iterator[SlurmCluster]:
    """Tasks in a container leave what they got in `folder`/tasks. squashfuse: a signal to a step ends its tasks.

    cluster: `partitions` and `settings` of the cluster.
    """
    plugin, records = folder / "pyxis_stub.so", folder / "tasks"
    records.mkdir()
    build = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(plugin), str(SOURCE)]
    subprocess.run(build, check=True)
    (folder / "pyxis.conf").write_text(f"required {plugin} record={records}{' use_squashfuse=1' if squashfuse else ''}\n")
    settings = "\n".join([f"PlugStackConfig={folder}/pyxis.conf", cluster.pop("settings", "")])
    started = SlurmCluster(folder, nodes, settings=settings, **cluster)
    started.start()
    try:
        yield started
    finally:
        started.stop()


def image(path: Path, corrupt: bool = False) -> Path:
    """Write a file with the header of a squashfs file: its kind, and its length in bytes 40 to 48.

    corrupt: the plugin cannot start it.
    """
    path.write_bytes(b"hsqs" + bytes([255 * corrupt]) * 4 + bytes(32) + (96).to_bytes(8, "little") + bytes(48))
    return path


def srun(cluster: SlurmCluster, *options: str, **more: str) -> subprocess.CompletedProcess:
    """Run one task in a job of its own that reports its location. more: variables of its environment."""
    command = ["srun", "--nodes=1", "--ntasks=1", "--time=1", *options, "pwd"]
    return subprocess.run(command, env={**cluster.env, **more}, capture_output=True, text=True, timeout=60)


def tasks(cluster: SlurmCluster) -> list[dict[str, str]]:
    """Return what each task in a container got, e.g. {"container-image": "/x.sqsh", "env:NAME": "value", "task": "17.0.3"}."""
    found = []
    for path in sorted((cluster.folder / "tasks").iterdir()):
        found.append({"task": path.name} | dict(line.split("=", 1) for line in path.read_text().splitlines()))
    return found
