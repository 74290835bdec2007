"""Every writer of the run folder, to be tried on a failing file system.

A required write must end the run with an error that names it, an optional one must be logged and the run must continue, and
neither may damage earlier data.

A writer starts on a healthy file system (`__init__`), writes under the fault (`write`), and then reports on a healthy file
system what is there (`kept`), which raises AssertionError if complete data was lost.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.runs import run_setup
from pipeline import config
from pipeline.checkpoints.background_worker import BackgroundWorker
from pipeline.checkpoints.checkpoint import Checkpoints, kept
from pipeline.config import CheckpointingConfig, LoggerConfig
from pipeline.files.rank_log import GuardedStream
from pipeline.files.storage import RetryPolicy, retrying, write_durably
from pipeline.job.attempt import Attempt
from pipeline.job.watchdog import Failure
from pipeline.observe.metrics import Metrics, read, read_rollouts
from pipeline.train.hf_export import write_model
from pipeline.train.shards import Shards
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.test_metrics import Words

LINE = {"train/loss": 1.0, "x" * 20000: 1.0}  # more than a page, so that a full disk has no room for it
BIG = torch.zeros(1 << 16)


class Writer:
    needed = True  # by the run: the error reaches it

    def __init__(self, folder: Path, patience_s: float):
        self.folder = folder
        self.retry = RetryPolicy(patience_s, kept=lambda: kept(folder))


class MetricsLine(Writer):
    """a line of metrics.jsonl"""

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.metrics = Metrics(folder, LoggerConfig(tensorboard_enabled=False), None, self.retry)
        self.metrics.log(1, LINE)

    def write(self):
        self.metrics.log(2, LINE)

    def kept(self):
        steps = [line["step"] for line in read(self.folder / "metrics.jsonl")]
        assert steps[0] == 1 and (self.folder / "metrics.jsonl").read_bytes().endswith(b"\n")
        return f"lines of steps {steps}"


class Curves(Writer):
    """TensorBoard"""

    needed = False

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        healthy = Path(tempfile.mkdtemp())  # the metrics' own folder: this is about the curves
        (healthy / "tensorboard").symlink_to(folder)
        self.metrics = Metrics(healthy, LoggerConfig(), None, self.retry)
        self.metrics.log(1, LINE)

    def write(self):
        self.metrics.log(2, LINE)

    def kept(self):
        self.metrics.log(3, LINE)
        events = EventAccumulator(str(self.folder))
        events.Reload()
        steps = [event.step for event in events.Scalars("train/loss")]
        assert steps == [1, 2, 3]
        return f"after the next step all of {steps}"


class Rollouts(Writer):
    """rollouts"""

    needed = False

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.metrics = Metrics(folder, LoggerConfig(tensorboard_enabled=False), None, self.retry)
        self._log(1)

    def _log(self, step):
        completion = Completion("0/0", np.arange(9, dtype=np.int32), np.zeros(9, np.float32), (VersionSpan(5, 9),), "length")
        prompt = Prompt(7, np.array([1, 2], np.int32), "math", {"answer": "3"})
        group = RolloutGroup(prompt, tuple(Rollout((Turn(completion),), 1.0, {"accuracy": 1.0}) for _ in range(100)))
        self.metrics.log_rollouts(step, [group], Words())

    def write(self):
        self._log(2)

    def kept(self):
        self._log(3)
        names = sorted(path.name for path in (self.folder / "rollouts").iterdir())
        assert "step_000001.jsonl" in names and "step_000003.jsonl" in names
        for name in names:
            assert len(read_rollouts(self.folder / "rollouts" / name)) == 100
        return "whole: " + ", ".join(name.removeprefix("step_00000").removesuffix(".jsonl") for name in names)


class Shard(Writer):
    """a checkpoint"""

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.checkpoints = Checkpoints(folder, "attempt", CheckpointingConfig(keep_top_k=1), self.retry)
        self._save(1)

    def _save(self, step):
        partial = self.checkpoints.begin(step)
        with self.checkpoints.discarding():
            self._write(partial)
        self.checkpoints.commit(partial, step, None, {})

    def _write(self, partial):
        Shards({"a": BIG}, {"ranks": 1}).write(partial, 0, self.retry)

    def write(self):
        self._save(2)

    def kept(self):
        self.checkpoints.clean()
        steps = [checkpoint.step for checkpoint in self.checkpoints.all()]
        assert steps in ([1], [2])
        assert sorted(os.listdir(self.folder / "checkpoints")) == [f"step_{step:06d}" for step in steps]
        return f"complete: step {steps[0]}; no part of another"


class AsyncShard(Shard):
    """a checkpoint, async_save"""

    def _write(self, partial):
        background = BackgroundWorker()
        background.start(lambda: super(AsyncShard, self)._write(partial))
        background.wait()


class Export(Shard):
    """a Hugging Face checkpoint"""

    def _write(self, partial):
        policy = config.PolicyConfig(model_name="recipes/tiny", tokenizer=config.TokenizerConfig(name="recipes/tiny"))
        write_model([("a", BIG)], policy, partial / "hf", "logprobs", 1 << 30, self.retry)


class AttemptFiles(Writer):
    """attempts/*/progress, requeue"""

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.attempt = Attempt(folder / "attempts/a", patience_s)
        self.attempt.folder.mkdir(parents=True)
        self.attempt.claim()
        self.attempt.record_progress(1)

    def write(self):
        self.attempt.record_progress(2)

    def kept(self):
        step = int((self.attempt.folder / "progress").read_text())
        assert step in (1, 2)
        return f"progress {step}"


class FailureFile(Writer):
    """failure.json"""

    needed = False

    def write(self):
        Failure(3, "train", "node", "step", "loss", "the reason").record(self.folder)

    def kept(self):
        path = self.folder / "failure.json"
        assert not path.exists() or json.loads(path.read_text())["message"] == "the reason"
        return "failure.json" if path.exists() else "the reason, in the rank's log"


class Log(Writer):
    """a rank's log"""

    needed = False

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.log = GuardedStream(open(folder / "log", "w"))  # noqa: SIM115
        print("before", file=self.log)

    def write(self):
        for _ in range(30):
            print("lost" * 100, file=self.log)

    def kept(self):
        print("after", file=self.log)
        text = (self.folder / "log").read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        return "what was printed before and after" + (", and how much was lost" if "characters of this log" in text else "")


class Done(Writer):
    """done.json"""

    def write(self):
        path = self.folder / "done.json"
        retrying(lambda: write_durably(path, json.dumps({"step": 4})), "writing that the run is complete", path, self.retry)

    def kept(self):
        return "done.json" if (self.folder / "done.json").exists() else "the last checkpoint: the same command only writes it"


class Submission(Writer):
    """recipe.yaml, batch.sh, manifest.json"""

    def __init__(self, folder, patience_s):
        super().__init__(folder, patience_s)
        self.recipe = config.load(str(Path(__file__).parents[1] / "end_to_end/recipe.yaml"), [f"run_dir={folder}"])
        self.script = "#!/bin/bash\n" + "#" * 20000
        self._write("first")

    def _write(self, job_id):
        with run_setup.lock_run(self.folder):
            run_setup.prepare(self.recipe, self.folder, self.script)
            run_setup.append_manifest(self.folder, "local", job_id, ["submit.py"])

    def write(self):
        self._write("second")

    def kept(self):
        config.read(self.folder / "recipe.yaml")
        jobs = [entry["job_id"] for entry in json.loads((self.folder / "manifest.json").read_text())]
        assert jobs[0] == "first" and (self.folder / "batch.sh").read_text() == self.script
        return f"submissions {jobs}, each file whole"


WRITERS = (
    MetricsLine,
    Curves,
    Rollouts,
    Shard,
    AsyncShard,
    Export,
    AttemptFiles,
    FailureFile,
    Log,
    Done,
    Submission,
)
