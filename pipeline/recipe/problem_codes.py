"""The codes of problems, each with its cause and its remedy.

To add a code, add an entry to the table. `python -m launch.terminal.troubleshooting` writes launch/TROUBLESHOOTING.md from the
table, and `python launch/submit.py help=CODE` prints an entry.
"""

from typing import NamedTuple


class ProblemCode(NamedTuple):
    """A kind of problem."""

    cause: str
    cure: str


RECIPES = {
    "ambiguous": ProblemCode(
        "A name can mean two things.",
        "Give the longer form that the message shows, or turn one of the two keys off.",
    ),
    "bad-format": ProblemCode(
        "A value or a file does not have the expected format.",
        "Compare it with the format after `expected`.",
    ),
    "bad-interpolation": ProblemCode(
        "A `${...}` cannot be computed, or names an unknown resolver.",
        "Use `${another.key}`, `mul`, `add`, `div`, `max`, `${if:test,a,b}` or OmegaConf's `oc.*`.",
    ),
    "circular": ProblemCode(
        "Recipes or keys refer to themselves, directly or through others.",
        "Remove one of the references.",
    ),
    "contradiction": ProblemCode(
        "Two values exclude each other.",
        "Change one of the two keys.",
    ),
    "given-twice": ProblemCode(
        "A YAML mapping has a key twice, or a list of distinct values a value twice.",
        "Remove one of the two.",
    ),
    "has-no-effect": ProblemCode(
        "Nothing reads this key: it belongs to the other backend, or to a feature that is off.",
        "Remove it, or turn on what reads it.",
    ),
    "missing-value": ProblemCode(
        "A key has no value, or an environment variable that the recipe uses is not set.",
        "Set the key, or export the variable.",
    ),
    "not-a-choice": ProblemCode(
        "The value is not one of the allowed ones.",
        "Choose one that the message lists.",
    ),
    "not-divisible": ProblemCode(
        "A size does not divide another, such as the tensor-parallel size the number of heads.",
        "Choose a divisor that the message lists.",
    ),
    "secret-in-recipe": ProblemCode(
        "A recipe or an override contains a token or a password.",
        "Export it as an environment variable. Change the token if the file was shared.",
    ),
    "too-large": ProblemCode(
        "A number is above its bound, which may depend on other keys or on the GPUs.",
        "Stay within the bound.",
    ),
    "too-small": ProblemCode(
        "A number is below its bound, which may depend on other keys.",
        "Raise it at least to the bound.",
    ),
    "unknown-key": ProblemCode(
        "The section of the recipe does not have this key.",
        "Check the spelling. `python launch/submit.py help=SECTION` lists all keys.",
    ),
    "unknown-reference": ProblemCode(
        "A `${key}` refers to a key that the recipe does not have.",
        "Write the whole key, such as `${policy.precision}`.",
    ),
    "unsupported": ProblemCode(
        "Hetstep, a backend or an installed library cannot do this.",
        "Use the alternative after `Try`.",
    ),
    "wrong-type": ProblemCode(
        "A value does not have the type of its key.",
        "Give a value of the type after `expected`.",
    ),
}
"""The recipe and the command line."""

FILES = {
    "already-exists": ProblemCode(
        "The output folder already exists.",
        "Give another folder, or remove the existing one.",
    ),
    "bad-record": ProblemCode(
        "A line of a data file has no usable record, such as one with a missing column or a prompt that is too long.",
        "Correct the line, or set `data.train.input_key` and `output_key` to the file's columns; in an evaluation,"
        " `evaluate.tasks.NAME.format_kwargs`.",
    ),
    "file-not-found": ProblemCode(
        "A file, folder or recipe does not exist.",
        "Check the path. Paths in a recipe are relative to its folder; on the command line, to the working directory.",
    ),
    "missing-column": ProblemCode(
        "A reward function or an environment needs a column that the records do not have.",
        "Add the column, give the parameter a default, or point `data.train.output_key` at the right column.",
    ),
    "no-records": ProblemCode(
        "A file or a run folder has no records of the requested kind.",
        "Choose another file, run or step.",
    ),
    "not-importable": ProblemCode(
        "Your module cannot be imported, or lacks the named function or class.",
        "Import it by hand with the same Python. The search path is the recipe's folder, `module_folders` and PYTHONPATH.",
    ),
    "not-installed": ProblemCode(
        "A Python package, a shared library or a Slurm command is missing.",
        "Install it where the message says: here, or in the component's image.",
    ),
    "permission-denied": ProblemCode(
        "This user may not use a folder, a partition, an account, a QOS or a mount.",
        "Choose your own, or ask the owner.",
    ),
    "too-few-records": ProblemCode(
        "The training data of all epochs together are too few for one step.",
        "Add records, raise `max_num_epochs`, or lower `policy.train_global_batch_size` or `num_prompts_per_step`.",
    ),
    "unavailable-dataset": ProblemCode(
        "The Hugging Face dataset is neither a folder nor in the local cache. Nothing is downloaded.",
        "Run `hf download --repo-type dataset NAME`, or give `data_path`.",
    ),
    "unavailable-model": ProblemCode(
        "The model is neither a folder nor in the local Hugging Face cache.",
        "Run `hf download NAME`, or give `policy.model_name` a folder.",
    ),
    "unreadable": ProblemCode(
        "A file cannot be read: it is cut off, damaged, or of another version.",
        "Copy or download it again.",
    ),
    "unwritable": ProblemCode(
        "The file system refuses writes: it is full, over quota, read-only or broken.",
        "Free space or choose another folder. The same command tries again.",
    ),
}
"""Files, models, data and code."""

RUNS = {
    "damaged": ProblemCode(
        "A file of a checkpoint, an export or rollouts has changed since it was written.",
        "Restore the file, or move the folder away: the run then continues from an earlier step. `sha256sum -c digests.sha256`"
        " compares all files.",
    ),
    "in-use": ProblemCode(
        "Another job or command writes into this folder or listens on this port, or the service already"
        " computes its maximum number of plans or exports.",
        "Follow the job with `python launch/submit.py follow=RUN_DIR`, wait for its end, or give another `run_dir` or `port`.",
    ),
    "no-access": ProblemCode(
        "A request to the REST service has no valid token, or the token's role or the service's settings do not allow it.",
        "Send the header `Authorization: Bearer TOKEN`. Ask the service's owner for a role, or for `writable: true`.",
    ),
    "no-checkpoint": ProblemCode(
        "The run has no complete checkpoint, or no checkpoint of the requested step.",
        "Choose a step that the message lists, or continue the run.",
    ),
    "no-locks": ProblemCode(
        "The file system has no file locks, so two jobs could write one run folder.",
        "Use a file system with locks (Lustre: mount with `flock`).",
    ),
    "no-space": ProblemCode(
        "The file system is too small for the checkpoints and rollouts of this run.",
        "Give another `run_dir`, lower `checkpointing.keep_top_k`, or free space.",
    ),
    "not-a-folder": ProblemCode(
        "A part of the folder's path is a file.",
        "Give another folder.",
    ),
    "not-a-run": ProblemCode(
        "The folder has no recipe.yaml.",
        "`python launch/status.py` lists run folders.",
    ),
    "not-ended": ProblemCode(
        "A run, evaluation or sweep has not ended within the `timeout` of a call.",
        "Wait longer. It continues to run.",
    ),
    "not-live": ProblemCode(
        "A run reads this key only at its start, or the value needs a model or an output that the run did not start with.",
        "Choose a key that the message lists, or start a new run from these weights.",
    ),
    "not-running": ProblemCode(
        "The command changes a live run, and this run is not live.",
        "Submit the run again with the new values. `python launch/status.py RUN_DIR` says how it ended.",
    ),
    "run-exists": ProblemCode(
        "The folder holds a run or a sweep with other settings.",
        "Give the earlier values again to continue, or another `run_dir`.",
    ),
    "run-failed": ProblemCode(
        "While a call of `hetstep` waited, the run, evaluation or sweep failed or was cancelled.",
        "Read the failure and the logs. The same submission continues from the last checkpoint.",
    ),
    "wrong-key": ProblemCode(
        "A checkpoint or rollouts are encrypted, and the key is missing or wrong.",
        "Use the key with the fingerprint that the message shows: in `checkpointing.encryption`, or for commands that read"
        " a run folder in the variable HETSTEP_KEY_FILE.",
    ),
    "tampered": ProblemCode(
        "A line or file with a recorded hash was changed, added or lost, as in an audit log.",
        "`python launch/audit.py verify root=FOLDER` names the line. Ask who may write there, and restore a backup.",
    ),
    "wrong-version": ProblemCode(
        "A checkpoint or a package has an incompatible version.",
        "Use the commit in the run's manifest.json, or the packages of the other image.",
    ),
}
"""Run folders."""

CLUSTERS = {
    "needs-gpu": ProblemCode(
        "A feature needs GPUs, and the component has none.",
        "Set `gpus_per_node`, or turn the feature off.",
    ),
    "not-mounted": ProblemCode(
        "A component opens a path that its container does not mount.",
        "Add the mount that the message shows to `cluster.<component>.container_mounts`.",
    ),
    "out-of-memory": ProblemCode(
        "The model does not fit into the GPUs' memory, by the plan.",
        "Use more parallelism, more or larger GPUs, recomputation or offloading. `plan=true` shows the memory by part.",
    ),
    "over-limit": ProblemCode(
        "A request exceeds a limit of the partition, the QOS, the account or the allocation.",
        "Request less, or choose another partition.",
    ),
    "refused-by-slurm": ProblemCode(
        "Slurm refuses the job for another reason, which the message quotes.",
        "Change what Slurm names. `dry_run=true` prints the batch script.",
    ),
    "timed-out": ProblemCode(
        "A plan of the REST service took longer than `plan_s` seconds, or its process ended.",
        "Make the plan in a shell: `python launch/submit.py recipe=NAME plan=true`.",
    ),
    "unreachable": ProblemCode(
        "Slurm's controller, an earlier run's host or `key_command` fails or does not answer, or no interface has the `host`.",
        "Try again. `cluster.executor=local` runs on this machine. Cancel a leftover job with `scancel`.",
    ),
}
"""Clusters, GPUs and containers."""

GROUPS = {
    "Recipes and the command line": RECIPES,
    "Files, models, data and code": FILES,
    "Run folders": RUNS,
    "Clusters, GPUs and containers": CLUSTERS,
}
CODES: dict[str, ProblemCode] = {name: code for group in GROUPS.values() for name, code in sorted(group.items())}
