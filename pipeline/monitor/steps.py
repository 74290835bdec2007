"""Compute the metrics `resources/...` of each step on rank 0 from the samples of all ranks, and write warnings.

Each reading of `readings.py` becomes COMPONENT_NAME_mean and, with several ranks, _min, _max and _max_rank. Levels are means
over the step, counters are rates. A step without new samples repeats the last values. These metrics are derived from them:

    tokens_per_s_per_gpu          throughput/tokens_per_s / GPUs of the job
    COMPONENT_straggling          (max - mean) / max over ranks of own time, which is 1 - waiting - collective
    generate_prefix_hits          prompt tokens found in prefix caches / looked up
    generate_preemptions          requests that a full KV cache preempted in the step; those for new weights do not count
    energy_wh_per_million_tokens  power of all GPUs, each counted once / tokens per second x 10^6 / 3600
    COMPONENT_mfu, _hfu, _tflops_per_rank    see operations.py

A warning is repeated after AGAIN_STEPS steps if it still holds. A leak's warning does not name the object that leaks.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pipeline.monitor.history import History, StepView
from pipeline.monitor.operations import ModelWork, StepOperations
from pipeline.monitor.readings import READINGS
from pipeline.monitor.resource_warnings import AFTER_A_STEP, AT_ANY_TIME, Check
from pipeline.observe.metrics import RESOURCES
from pipeline.observe.warning_file import AGAIN_STEPS, append, warning
from pipeline.types import RolloutGroup, Sample

logger = logging.getLogger(__name__)

AGAIN_S = 600.0
"""Seconds after which a warning is repeated within a step."""
MOST_RANKS = 4
"""Ranks that a check names at once."""
MOST_WARNINGS = 2000
"""Maximum number of lines of a run's file of warnings in one attempt; later warnings are only in rank 0's log."""
HOUR_S = 3600
SHOWN = tuple(name for name, reading in READINGS.items() if reading.shown)


class StepMonitor:
    """Collects samples, makes metrics and gives warnings. `look` may run in another thread."""

    def __init__(
        self,
        history: History,
        operations: StepOperations | None,
        gpus: int,
        samples: Callable[[], Mapping[int, bytes]],
        file: Path,
    ):
        """Prepare to monitor steps.

        operations: None if they are not known. gpus: number of GPUs of the job. samples: a function that returns rank -> its
        latest sample. file: for the warnings.
        """
        self._history = history
        self._operations = operations
        self._gpus = gpus
        self._samples = samples
        self._file = file
        self._lock = threading.Lock()  # of the history; never held while a file is written
        self._decode = msgspec.msgpack.Decoder(dict[str, float]).decode
        self._given: dict[str, tuple[int, float]] = {}  # check -> step and time of its last warnings
        self._unwritten: deque[dict] = deque(maxlen=MOST_WARNINGS)
        self._left = MOST_WARNINGS
        self._trained: tuple[Sequence[Sample], Sequence[str]] = ((), ())
        self._step = 0

    def note_learning(self, samples: Sequence[Sample], models: Sequence[str]) -> None:
        """Remember the samples on which the train ranks learn in this step, and the models that they update."""
        self._trained = samples, models

    def step_ended(self, step: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] | None) -> dict[str, float]:
        """Return the resource metrics of a step and check for problems; after an error these metrics are missing.

        metrics: the other metrics of the step.
        """
        try:
            with self._lock:
                self._step = step
                self._collect()
                view = self._history.step_ended(step, metrics)
                resources = self._over_ranks(view) | self._derive(view) | self._work(metrics, groups)
                warned = self._check(AFTER_A_STEP + AT_ANY_TIME)
            return resources | {f"{RESOURCES}warnings": float(warned)}
        except Exception:
            logger.exception("the resources of step %d are not known; the run goes on", step)
            return {}

    def look(self) -> None:
        """Check the latest samples, and write the warnings that are not in the file. For the thread of a sampler."""
        with self._lock:
            self._collect()
            self._check(AT_ANY_TIME)
        self._write()

    def _collect(self) -> None:
        for rank, encoded in self._samples().items():
            if encoded:
                self._history.now[rank] = self._decode(encoded)

    # ---- metrics ------------------------------------------------------------------------------------------------------------

    def _over_ranks(self, view: StepView) -> dict[str, float]:
        """Return min, mean and max of each reading over the ranks of each component, and the rank at the max."""
        metrics = {}
        for component, ranks in self._history.components.items():
            for name in SHOWN:
                if values := view.of(name, ranks):
                    key, most = f"{RESOURCES}{component}_{name}", max(values, key=values.__getitem__)
                    metrics[f"{key}_mean"] = statistics.fmean(values.values())
                    if len(values) > 1:
                        metrics |= {
                            f"{key}_min": min(values.values()),
                            f"{key}_max": values[most],
                            f"{key}_max_rank": float(most),
                        }
        return metrics

    def _derive(self, view: StepView) -> dict[str, float]:
        metrics = {}
        for component, ranks in self._history.components.items():
            waiting, blocked = view.of("waiting", ranks), view.of("collective", ranks)
            work = [max(0.0, 1 - share - blocked.get(rank, 0.0)) for rank, share in waiting.items()]
            if len(work) > 1 and max(work) > 0:
                metrics[f"{RESOURCES}{component}_straggling"] = (max(work) - statistics.fmean(work)) / max(work)
        leaders = [view.ranks[engine[0]].grown for engine in self._history.engines if engine[0] in view.ranks]
        if queries := sum(grown.get("prefix_queries", 0.0) for grown in leaders):
            metrics[f"{RESOURCES}generate_prefix_hits"] = sum(grown.get("prefix_hits", 0.0) for grown in leaders) / queries
        if any("preemptions" in grown for grown in leaders):
            metrics[f"{RESOURCES}generate_preemptions"] = sum(grown.get("preemptions", 0.0) for grown in leaders)
        rate = view.metrics.get("throughput/tokens_per_s")
        if rate and self._gpus:
            metrics[f"{RESOURCES}tokens_per_s_per_gpu"] = rate / self._gpus
        if rate and (watts := self._watts(view)):
            metrics[f"{RESOURCES}energy_wh_per_million_tokens"] = watts / rate * 1e6 / HOUR_S
        return metrics

    def _watts(self, view: StepView) -> float:
        """Return the power of all GPUs over the step; ranks that share a GPU count it once."""
        powers = {
            (self._history.nodes.get(rank), of.values["gpu_index"]): of.values.get("energy_j", of.values.get("power_w", 0.0))
            for rank, of in view.ranks.items()
            if "gpu_index" in of.values
        }
        return sum(powers.values())

    def _work(self, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] | None) -> dict[str, float]:
        if not self._operations:
            return {}
        samples, models = self._trained
        components = self._history.components
        train = self._operations.train(samples, models)
        rates = self._operations.metrics("train", train, metrics.get("time/train", 0.0), len(components["train"]))
        if groups and "generate" in components:
            clock = "time/step" if self._history.runs_ahead else "time/rollout"  # engines that run ahead never stop
            work = ModelWork(self._operations.generate(groups))
            rates |= self._operations.metrics("generate", work, metrics.get(clock, 0.0), len(components["generate"]))
        return rates

    # ---- warnings -----------------------------------------------------------------------------------------------------------

    def _check(self, checks: Sequence[Check]) -> int:
        """Write the due warnings of these checks, for each check only for its first ranks; return how many warnings hold."""
        holding = 0
        for check in checks:
            problems = list(check(self._history))
            holding += len(problems)
            if not problems or not self._due(check):
                continue
            self._given[check.__name__] = self._step, time.time()
            for number, (rank, message) in enumerate(problems[:MOST_RANKS]):
                more = len(problems) - MOST_RANKS if number == MOST_RANKS - 1 else 0
                self._warn(check.__name__, rank, f"{message}. The same holds on {more} more ranks" if more > 0 else message)
        return holding

    def _due(self, check: Check) -> bool:
        step, moment = self._given.get(check.__name__, (-AGAIN_STEPS, 0.0))
        return self._step - step >= AGAIN_STEPS or (check in AT_ANY_TIME and time.time() - moment > AGAIN_S)

    def _warn(self, check: str, rank: int, message: str) -> None:
        logger.warning("step %d: %s", self._step, message)
        if self._left:
            self._left -= 1
            node = self._history.nodes.get(rank, "")
            self._unwritten.append(warning(self._step, check, rank, node, message))

    def _write(self) -> None:
        lines = []
        while self._unwritten:
            lines.append(self._unwritten.popleft())
        append(self._file, lines)
