"""Real runs on the private cluster with a broken node among theirs: it is named, and a requeue leaves it out.

All nodes of this cluster are one machine, so one of them is broken by the interpreter that its ranks are started with: a shell
script that gives them a mount namespace of their own, where the attempt's folder is a copy that no other node writes into, or
where a source file is another. Only a clock cannot be had for one node alone: there `time.time` is wrapped.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.runs.attempts import all_attempts
from tests.end_to_end.runs import ROOT, SLURM, submit

pytestmark = pytest.mark.slurm

WRAPPER = """\
#!/bin/bash
# $HETSTEP_NODE is broken if there is a file of its name.
fault=$(cat {folder}/"$HETSTEP_NODE" 2>/dev/null)
attempt="$HETSTEP_RUN_DIR/attempts/$HETSTEP_ATTEMPT"
case "$fault" in
    "stale folder")
        until [ -e "$attempt/rendezvous.json" ]; do sleep 0.05; done
        cp -r "$attempt" {folder}/"stale.$HETSTEP_ATTEMPT"
        over={folder}/"stale.$HETSTEP_ATTEMPT" under=$attempt ;;
    "other code")
        over={folder}/rollout.py under={root}/pipeline/rollout/driver.py ;;
    clock)
        export PYTHONPATH={folder}/wrong_clock:"$PYTHONPATH" ;;
esac
[ -z "$over" ] && exec {python} "$@"
exec unshare --map-root-user --mount bash -c 'mount --bind "$1" "$2" && shift 2 && exec "$@"' - "$over" "$under" {python} "$@"
"""
WRONG_CLOCK = "import time\n\nreal = time.time\ntime.time = lambda: real() - 600\n"


@pytest.fixture
def broken(tmp_path):
    """Return broken({node: fault}): the override that starts all generate ranks so that those nodes are broken."""
    namespaces = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, text=True)
    if namespaces.returncode:
        pytest.skip(f"no mount namespaces here: {namespaces.stderr.strip()}")
    folder = tmp_path / "faults"
    (folder / "wrong_clock").mkdir(parents=True)
    (folder / "wrong_clock/sitecustomize.py").write_text(WRONG_CLOCK)
    (folder / "rollout.py").write_text((ROOT / "pipeline/rollout/driver.py").read_text() + "# an older version\n")
    wrapper = folder / "python"
    paths = {"folder": folder, "root": ROOT, "python": sys.executable}
    wrapper.write_text(WRAPPER.format(**{name: shlex.quote(str(path)) for name, path in paths.items()}))
    wrapper.chmod(0o755)

    def break_nodes(faults: dict[str, str]) -> str:
        for node, fault in faults.items():
            (folder / node).write_text(fault)
        return f"cluster.generate.python={wrapper}"

    return break_nodes


def record(attempt: Path) -> dict:
    return json.loads((attempt / "nodes.json").read_text())["nodes"]


@pytest.mark.long
def test_healthy_nodes_pass(slurm_cluster, tmp_path):
    run = submit(tmp_path / "run", *SLURM, "grpo.max_num_steps=1", env=slurm_cluster.env)
    assert run.status == 0, run.output
    nodes = record(all_attempts(run.folder)[-1].folder)
    assert sorted(nodes) == slurm_cluster.nodes
    assert all(len(node["gb_per_s"]) == 2 and min(node["gb_per_s"].values()) > 0 for node in nodes.values())


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stale folder", "other code"])
def test_a_run_with_a_bad_node_continues_without_it(slurm_cluster, tmp_path, broken, fault):
    """Use three of the four nodes; no checkpoint was made, but other nodes are worth another attempt."""
    bad = slurm_cluster.nodes[1]
    placement = ["cluster.executor=slurm", "cluster.train.ranks_per_node=1", "cluster.generate.nodes=2"]
    run = submit(
        tmp_path / "run",
        *placement,
        "cluster.generate.ranks_per_node=1",
        broken({bad: fault}),
        "cluster.requeue={enabled: true, max_restarts: 1}",
        env=slurm_cluster.env,
    )
    assert run.status == 0, run.output
    first, second = all_attempts(run.folder)
    assert list(first.bad_nodes) == [bad]
    assert bad in record(first.folder) and bad not in record(second.folder)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert (first.verdict or "").startswith("requeue") and second.verdict == "done"
