"""Tasks that test jobs run: small functions of the standard library.

They are pickled by name, so they have their own module.
"""

import json
import os
import signal
import time
from pathlib import Path

from pipeline import config
from pipeline.job import signals
from pipeline.job.attempt import Attempt


def report(run_dir: str) -> None:
    """Write this rank's number and environment."""
    rank = int(os.environ["HETSTEP_RANK"])
    found = {key: value for key, value in os.environ.items() if key.startswith("HETSTEP_")}
    found |= {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "TEST_VAR")}
    found |= {"pid": os.getpid(), "cpus": len(os.sched_getaffinity(0))}
    Path(run_dir, f"rank{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank} says hello")


def report_and_finish(run_dir: str) -> None:
    """Report; the run is complete when all ranks have."""
    report(run_dir)
    if os.environ["HETSTEP_RANK"] == "0":
        _wait_for_reports(run_dir)
        Path(run_dir, "done.json").write_text(json.dumps({"step": 1}))


def report_container(run_dir: str) -> None:
    """Report which image this is, the folders that can be written, and the environment; the run is complete when all have."""
    folders = ["/", "/tmp", "/dev/shm", os.environ["HOME"], os.environ.get("TMPDIR", "/tmp"), str(Path(__file__).parent)]
    found = {"image": Path("/etc/image").read_text(), "folder": os.getcwd(), "writable": [*filter(_writable, folders)]}
    name = os.environ["HETSTEP_RANK"]
    Path(run_dir, f"container{name}.json").write_text(json.dumps({**found, "environment": {**os.environ}}))
    report_and_finish(run_dir)


def _writable(folder: str) -> bool:
    return os.access(folder, os.W_OK)


def report_and_wait(run_dir: str) -> None:
    """Report, and stay until killed."""
    report(run_dir)
    _stay()


def fail_on_rank_1(run_dir: str) -> None:
    report(run_dir)
    if os.environ["HETSTEP_RANK"] == "1":
        _wait_for_reports(run_dir)
        raise RuntimeError("rank 1 has had enough")
    _stay()


def exit_with_7_on_rank_1(run_dir: str) -> None:
    report(run_dir)
    if os.environ["HETSTEP_RANK"] == "1":
        _wait_for_reports(run_dir)
        raise SystemExit(7)
    _stay()


def _stay(seconds: float = 600) -> None:
    """Wait for SIGTERM or the launcher's stop file; real ranks use a part of the pipeline to end themselves."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    told, end = Path(os.environ.get("HETSTEP_SIGNALS", os.devnull)), time.monotonic() + seconds
    while time.monotonic() < end:
        if "SIGTERM" in told.read_text():
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(min(0.1, seconds))


def _wait_for_reports(run_dir: str) -> None:
    paths = [Path(run_dir, f"rank{rank}.json") for rank in range(int(os.environ["HETSTEP_WORLD_SIZE"]))]
    while not all(path.exists() and path.read_text().endswith("}") for path in paths):
        time.sleep(0.02)


def write_steps(run_dir: str) -> None:
    """Write what the pipeline leaves for its follower: a line per step, from the last one on, and done.json."""
    if os.environ["HETSTEP_RANK"] != "0":
        return
    last = config.read(Path(run_dir, "recipe.yaml")).grpo.max_num_steps
    metrics = Path(run_dir, "metrics.jsonl")
    first = len(metrics.read_text().splitlines()) + 1 if metrics.exists() else 1
    with open(metrics, "a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "time": time.time(), "train/reward": step / 10}) + "\n")
    Path(run_dir, "done.json").write_text(json.dumps({"step": last}))


def fail_with_report(run_dir: str) -> None:
    """Fail on rank 1 as the pipeline does, with its traceback in failure.json."""
    if os.environ["HETSTEP_RANK"] == "1":
        said = {
            "rank": 1,
            "realm": "generate",
            "host": "here",
            "verb": "rollout",
            "phase": "step 3",
            "message": "the dog ate it",
        }
        Path(run_dir, "attempts", os.environ["HETSTEP_ATTEMPT"], "failure.json").write_text(json.dumps(said))
        raise SystemExit(1)
    _stay()


def play(run_dir: str) -> None:
    """Replay rank 0's part of each attempt from script.json.

    The script is a list of {"progress", "requeue", "blame", "done", "exit", "wait"}. blame: why its own node is bad.
    """
    if os.environ["HETSTEP_RANK"] != "0":
        return
    name = os.environ["HETSTEP_ATTEMPT"]
    act = json.loads(Path(run_dir, "script.json").read_text())[int(name.rpartition("-")[2])]
    attempt = Attempt(Path(run_dir, "attempts", name))
    print(f"{name}: {act}, ends at {os.environ['HETSTEP_END_TIME']}")
    if "progress" in act:
        attempt.record_progress(act["progress"])
    if "requeue" in act:
        attempt.ask_requeue(act["requeue"])
    if "blame" in act:
        attempt.record_bad_nodes({os.environ["HETSTEP_NODE"]: act["blame"]})
    if "done" in act:
        Path(run_dir, "done.json").write_text(json.dumps({"step": act["done"]}))
    _stay(act.get("wait", 0))
    raise SystemExit(act.get("exit", 0))


def save_on_request(run_dir: str) -> None:
    """Wait until rank 0 gets a signal or a request to leave; it then saves for two seconds, and all ranks leave."""
    report(run_dir)
    folder = Path(run_dir, "attempts", os.environ["HETSTEP_ATTEMPT"])
    if os.environ["HETSTEP_RANK"] == "0":
        while not (came := signals.received_names()):
            time.sleep(0.05)
        time.sleep(2)
        attempt = Attempt(folder)
        attempt.record_progress(7)
        attempt.ask_requeue(f"{' and '.join(came)} came")
    while not (folder / "requeue").exists():
        time.sleep(0.05)


def report_the_other_component(run_dir: str) -> None:
    """End a rank of generate without output; rank 0 reports it a second after it is asked to end."""
    report(run_dir)
    _wait_for_reports(run_dir)
    if os.environ["HETSTEP_COMPONENT"] == "generate":
        os.kill(os.getpid(), signal.SIGKILL)
    while not signals.terminating():
        time.sleep(0.05)
    time.sleep(1)
    said = {"rank": 1, "realm": "generate", "message": "rank 1 died without an error message"}
    Path(run_dir, "attempts", os.environ["HETSTEP_ATTEMPT"], "failure.json").write_text(json.dumps(said))
    raise SystemExit(124)
