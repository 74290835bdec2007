"""Start the sampler of a rank, and on rank 0 the monitors of the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import config
from pipeline.config import Recipe
from pipeline.data.stop_tokens import stop_tokens
from pipeline.job.world import World
from pipeline.monitor.gpu import GPUReader
from pipeline.monitor.history import History
from pipeline.monitor.host import HostReader
from pipeline.monitor.learning import LearningMonitor
from pipeline.monitor.operations import StepOperations
from pipeline.monitor.sampler import SampleFile, Sampler
from pipeline.monitor.stacks import StackWatch
from pipeline.monitor.steps import StepMonitor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "resources"
"""Name of the folder in an attempt's folder that has each rank's samples and the warnings."""
WAITS = ("waiting", "environments")


def start(world: World, recipe: Recipe, run_dir: Path) -> Sampler | None:
    """Return this rank's sampler, whose thread has started; None if the recipe turns it off.

    The first rank of a component on a node reads the node's memory, CPU, disk and NICs.
    """
    if (period := recipe.logger.monitor.period_s) is None:
        return None
    about = {"rank": world.rank, "component": world.component, "node": world.info.node}
    file = SampleFile(samples_file(world.info.folder, world.rank), about, 2 * period)
    host = HostReader(run_dir, world.info.local_rank == 0)
    sources = [host.read, lambda: dict(zip(WAITS, world.timeline.waited_s(), strict=True))]
    if world.device.index is not None:
        sources.append(GPUReader(world.device.index).read)
    sampler = Sampler(sources, period, file, StackWatch())
    sampler.start()
    return sampler


def of_steps(
    world: World, recipe: Recipe, sampler: Sampler | None, samples: Callable[[], Mapping[int, bytes]]
) -> StepMonitor | None:
    """Return rank 0's monitor of steps, which also runs in its sampler's thread. samples: returns rank -> its latest sample."""
    if sampler is None:
        return None
    workers = world.workers
    steps, ahead = config.bound(config.section(recipe).max_num_steps), config.generates(recipe) and config.runs_ahead(recipe)
    history = History(workers.by_component(), world.nodes(), workers.engines, steps, ahead)
    shared = {"generate"} if workers.colocated else set()
    gpus = sum(part.nodes * part.gpus_per_node for name, part in config.components(recipe).items() if name not in shared)
    monitor = StepMonitor(history, StepOperations.of(recipe), gpus, samples, world.info.folder / FOLDER / "warnings.jsonl")
    sampler.on_sample = monitor.look
    return monitor


def of_learning(world: World, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> LearningMonitor:
    """Return rank 0's monitor of learning, which needs no samples of resources."""

    def stops() -> str:
        return ", ".join(map(str, stop_tokens(recipe.policy).tokens)) or "none"

    return LearningMonitor(recipe, tokenizer, stops, world.info.folder / FOLDER / "warnings.jsonl")


def samples_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's samples in an attempt's folder."""
    return folder / FOLDER / f"rank{rank:05d}.jsonl"
