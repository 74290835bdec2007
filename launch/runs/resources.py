"""Read the files of a run's resource monitor: metrics `resources/...`, warnings, and each rank's latest sample."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from launch.runs.run_folder import MetricColumns, RunFolder
from pipeline.config import RecipeError
from pipeline.files import small_files
from pipeline.files.small_files import Count, Moment
from pipeline.observe.metrics import RESOURCES
from pipeline.recipe import user_files

CURRENT_STEPS = 20
"""Number of steps for which a warning counts as current. The job repeats a warning that still holds after as many steps."""
MOST_WARNINGS = 200
TAIL_BYTES = 4096
MOST_RANKS = 16
"""Maximum number of ranks in a table."""
LEVELS = {  # name in the metrics -> text: what `status` shows of a component, in order. One rank has a mean alone
    "mfu": "MFU {:.1%}",
    "gpu_util_mean": "GPU busy {:.0%}",
    "gpu_memory_gb_max": "{:.3g} GB of GPU memory",
    "power_w_mean": "{:.0f} W",
    "temperature_c_max": "{:.0f} °C",
    "kv_cache_mean": "KV cache {:.0%}",
    "queued_mean": "{:.3g} queued",
    "prefix_hits": "prefix hits {:.0%}",
    "cpu_mean": "{:.2g} CPU cores a rank",
    "rss_gb_max": "{:.3g} GB a rank",
    "node_memory_max": "host memory {:.0%}",
    "waiting_mean": "waits {:.0%}",
    "collective_mean": "in collectives {:.0%}",
}
COLUMNS = {
    "cpu": "CPU",
    "rss_gb": "GB",
    "gpu_util": "GPU",
    "gpu_memory_gb": "GPU GB",
    "power_w": "W",
    "kv_cache": "KV",
    "waiting": "waits",
}
"""Key of a rank's sample -> heading of its column in the table."""
SHARES = ("gpu_util", "kv_cache", "waiting")
RATES = ("cpu", "waiting")


class Warned(TypedDict):
    """A line of warnings.jsonl. A line that clears the warnings of its check has neither a rank nor a message."""

    time: Moment
    step: Count
    check: str
    rank: NotRequired[Count]
    message: NotRequired[str]
    cleared: NotRequired[bool]


class ResourceSample(TypedDict):
    """A line of a rank's file of samples."""

    time: Moment
    cpu: NotRequired[float | None]
    rss_gb: NotRequired[float | None]
    gpu_util: NotRequired[float | None]
    gpu_memory_gb: NotRequired[float | None]
    power_w: NotRequired[float | None]
    kv_cache: NotRequired[float | None]
    waiting: NotRequired[float | None]


Line = TypeVar("Line", Warned, ResourceSample)


def texts(metrics: MetricColumns, components: dict[str, Any]) -> dict[str, str]:
    """Return component -> a text about its resources in the latest step; {} if they were not sampled."""
    levels = {}
    for component in components:
        parts = []
        for name, text in LEVELS.items():
            value = metrics.last(f"{RESOURCES}{component}_{name}")
            if value is None and name.endswith("_max"):
                value = metrics.last(f"{RESOURCES}{component}_{name.removesuffix('max')}mean")
            if value is not None and value == value:
                parts.append(text.format(value))
        if parts:
            levels[component] = ", ".join(parts)
    return levels


def warnings(run: RunFolder, since_step: float = 0.0) -> list[Warned]:
    """Return the last attempt's warnings since a step, oldest first: only the latest warning of each check and rank."""
    if not run.attempts:
        return []
    latest = {}
    for line in _tail(run.attempts[-1].folder / "resources/warnings.jsonl", MOST_WARNINGS * 512, Warned):
        if line.get("cleared"):
            latest = {key: warning for key, warning in latest.items() if key[0] != line["check"]}
        elif line["step"] >= since_step and "message" in line:
            latest[line["check"], line.get("rank")] = line
    return list(latest.values())[-MOST_WARNINGS:]


def ranks(run: RunFolder) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of a table with the latest sample of each of the first MOST_RANKS ranks."""
    folder = run.attempts[-1].folder / "resources" if run.attempts else run.folder
    paths = [path for path in sorted(folder.glob("rank*.jsonl")) if ".before" not in path.name]
    samples = {path: _tail(path, TAIL_BYTES, ResourceSample)[-2:] for path in paths[:MOST_RANKS]}
    columns = [name for name in COLUMNS if any(name in sample[-1] for sample in samples.values() if sample)]
    rows = [[path.stem.removeprefix("rank").lstrip("0") or "0", *_cells(sample, columns)] for path, sample in samples.items()]
    if len(paths) > MOST_RANKS:
        rows.append([f"and {len(paths) - MOST_RANKS} more", *("" for _ in columns)])
    return ["rank", *(COLUMNS[name] for name in columns)], rows


def _cells(samples: Sequence[Mapping[str, Any]], columns: list[str]) -> Iterator[str]:
    before, after = (samples[0], samples[-1]) if samples else ({}, {})
    for name in columns:
        value = after.get(name)
        if value is not None and name in RATES:
            seconds = after["time"] - before.get("time", after["time"])
            value = (value - before[name]) / seconds if seconds and before.get(name) is not None else None
        yield "" if value is None else f"{value:.0%}" if name in SHARES else f"{value:.3g}"


def _tail(path: Path, count: int, kind: type[Line]) -> list[Line]:
    """Return the complete and valid lines in the last `count` bytes of a file; [] if there is no file."""
    try:
        with user_files.open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count))
            *lines, _ = file.read().split(b"\n")  # the last one is empty, or not complete
    except OSError:
        return []
    parsed = []
    for line in lines[size > count :]:  # the first may have begun before
        with contextlib.suppress(RecipeError):  # a crash cut it, or it is the first, which has no time
            parsed.append(small_files.parsed(line, kind, path))
    return parsed
