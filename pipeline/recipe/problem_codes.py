"""The codes of problems, each with its cause and its cure.

A new code is one entry here. `python -m launch.terminal.troubleshooting` writes launch/TROUBLESHOOTING.md from this table, and
`python launch/submit.py help=CODE` prints an entry.
"""

from typing import NamedTuple


class ProblemCode(NamedTuple):
    """A kind of problem."""

    cause: str
    cure: str


RECIPES = {
    "ambiguous": ProblemCode(
        "A name can mean two things.",
        "Give the longer form that the message shows, such as an absolute path, or turn one of the two keys off.",
    ),
    "bad-format": ProblemCode(
        "A value or a file does not have the expected form: a path, a name, a pattern, YAML, JSON.",
        "Compare it with the form after `expected`. A message about a file names its line.",
    ),
    "bad-interpolation": ProblemCode(
        "A `${...}` cannot be parsed or computed, or names a resolver that does not exist.",
        "Use `${another.key}`, `${mul:a,b}`, `${add:a,b}`, `${div:a,b}`, `${max:a,b}`, `${if:test,a,b}` or OmegaConf's `oc.*`.",
    ),
    "circular": ProblemCode(
        "Recipes or keys refer to each other in a circle, through `defaults`, `needs` or `${...}`.",
        "Remove one of the references in the circle that the message prints.",
    ),
    "contradiction": ProblemCode(
        "Two values exclude each other.",
        "Change one of the two keys that the message names.",
    ),
    "given-twice": ProblemCode(
        "A YAML mapping has the same key twice, or a list the same seed twice.",
        "Remove one of the two.",
    ),
    "has-no-effect": ProblemCode(
        "Nothing reads a key, given the other values: a key of the backend that does not train, or an option of a feature that"
        " is off.",
        "Remove the key, or turn on what reads it. The message names the key that takes its place, if there is one.",
    ),
    "missing-value": ProblemCode(
        "A key, or an environment variable that the recipe refers to, has no value.",
        "Set the key in the recipe or as `key=value`, or export the variable.",
    ),
    "nemo-rl-recipe": ProblemCode(
        "`pipeline.config.load` read a recipe of NeMo-RL, which only the commands translate.",
        "Pass it by its path as `recipe=PATH`: it is then translated. recipes/README.md lists the keys.",
    ),
    "not-a-choice": ProblemCode(
        "The value is not one of the allowed ones: a kind, an algorithm, a dataset, a partition.",
        "Choose one of the values that the message lists.",
    ),
    "not-divisible": ProblemCode(
        "A size does not divide another: heads by tensor parallelism, layers by pipeline stages, the batch by updates.",
        "Choose one of the divisors that the message lists.",
    ),
    "secret-in-recipe": ProblemCode(
        "A recipe or an override contains a token or a password. The run folder would keep it.",
        "Export it as an environment variable, and name that variable in the recipe. Change the token if the file was shared.",
    ),
    "too-large": ProblemCode(
        "A number is above its upper bound, which may depend on other keys or on the available GPUs.",
        "Use at most the bound that the message names.",
    ),
    "too-small": ProblemCode(
        "A number is below its lower bound, which may depend on other keys.",
        "Use at least the bound that the message names.",
    ),
    "unknown-key": ProblemCode(
        "No section has a key of this name.",
        "Check the spelling; the message suggests the nearest key. `python launch/submit.py help=SECTION` lists all keys.",
    ),
    "unknown-reference": ProblemCode(
        "A `${key}` refers to a key that the recipe does not have.",
        "Write the whole dotted key, such as `${policy.precision}`.",
    ),
    "unsupported": ProblemCode(
        "Hetstep, a backend or an installed library cannot do this.",
        "Use the alternative after `Try`. Where the message names the backend, the other backend may support it.",
    ),
    "wrong-type": ProblemCode(
        "A value has another type than its key: text for a number, a list for a mapping.",
        "Give the type after `expected`. `python launch/submit.py help=KEY` prints type, range and default.",
    ),
}
"""The recipe and the command line."""

FILES = {
    "already-exists": ProblemCode(
        "The output folder exists.",
        "Name another folder, or remove this one.",
    ),
    "bad-record": ProblemCode(
        "A line of a data file has no usable record: no JSON object, a missing column, an empty or too long prompt.",
        "Correct the line that the message names, or set `data.train.input_key` and `output_key` to the file's columns;"
        " in an evaluation, `evaluate.tasks.NAME.format_kwargs`.",
    ),
    "file-not-found": ProblemCode(
        "A file, folder or recipe does not exist.",
        "Check the path. Relative paths in a recipe start at the recipe's folder, those on the command line at the working"
        " directory.",
    ),
    "missing-column": ProblemCode(
        "A reward function or an environment needs a column that the records do not have.",
        "Add the column, give the parameter a default, or point `data.train.output_key` at the right column.",
    ),
    "no-records": ProblemCode(
        "A file or a run folder has no records of the requested kind: examples, phases, a timeline, this step.",
        "Choose another file, run or step. A timeline needs `logger.timeline_enabled=true` during the run.",
    ),
    "not-importable": ProblemCode(
        "Importing your own module failed, or the module does not have the named function or class.",
        "Import it by hand with the same Python. The search path is the recipe's folder, `module_folders` and PYTHONPATH.",
    ),
    "not-installed": ProblemCode(
        "A Python package, a shared library or a Slurm command is missing.",
        "Install it where the message says: here, or in the component's container image.",
    ),
    "permission-denied": ProblemCode(
        "This user may not read or write a folder, use a partition, an account or a QOS, or write a mount.",
        "Choose a place or an account of your own, or ask the owner that the message names.",
    ),
    "too-few-records": ProblemCode(
        "The training data have fewer usable records, in all epochs together, than one step takes. The run could make no step.",
        "Add records, raise `max_num_epochs`, or lower the batch: `policy.train_global_batch_size`, or `num_prompts_per_step`"
        " of an algorithm that samples. With `data.bad_records=drop`, look at the log for the records that were dropped.",
    ),
    "unavailable-dataset": ProblemCode(
        "The Hugging Face dataset is neither a folder nor in the local cache. Nodes may be offline, so nothing is downloaded.",
        "Run the `hf download --repo-type dataset NAME` that the message prints, or give `data_path`.",
    ),
    "unavailable-model": ProblemCode(
        "The model is neither a folder nor in the local Hugging Face cache.",
        "Run the `hf download NAME` that the message prints, or give `policy.model_name` a folder.",
    ),
    "unreadable": ProblemCode(
        "A file exists and cannot be read: it is cut off, damaged, or of another version.",
        "Copy or download it again.",
    ),
    "unwritable": ProblemCode(
        "The file system refuses to write: full, over quota, read-only, or broken.",
        "Free space or choose another folder. The same command tries again.",
    ),
}
"""Files, models, data and code."""

RUNS = {
    "damaged": ProblemCode(
        "A file of a checkpoint, an export or rollouts is not as it was written: changed, missing, extra, cut off or renamed.",
        "Restore the file that the message names from a copy, or move the folder away: the run then goes on from an earlier"
        " step. `sha256sum -c digests.sha256` in the folder compares all files.",
    ),
    "in-use": ProblemCode(
        "Another job or command is writing into this folder, or another process listens on the port of the REST service.",
        "Follow the job with `python launch/submit.py follow=RUN_DIR`, wait for its end, or give another `run_dir` or `port`.",
    ),
    "no-access": ProblemCode(
        "A request to the REST service has no valid token, or the user's role or the service's settings do not allow it.",
        "Send the header `Authorization: Bearer TOKEN`. Ask the service's owner for a role, or for `writable: true`.",
    ),
    "no-checkpoint": ProblemCode(
        "The run has no complete checkpoint, or none of this step.",
        "Choose one of the steps that the message lists, or run further.",
    ),
    "no-locks": ProblemCode(
        "The file system has no file locks, so two jobs could write one run folder.",
        "Put the run folder on a file system with locks (Lustre: mount with `flock`).",
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
        "The folder is not a run folder: it has no recipe.yaml.",
        "Give the folder that `submit.py` printed, such as `runs/NAME`. `python launch/status.py` lists them.",
    ),
    "not-ended": ProblemCode(
        "A run, evaluation or sweep has not ended within the `timeout` of a call of `hetstep`.",
        "Wait longer: it continues. `status()` returns its state.",
    ),
    "not-live": ProblemCode(
        "`steer.py` was asked to change a key that a run reads only at its start, or to set a value that needs something which"
        " the run did not load at its start.",
        "Choose one of the keys that the message lists. For another key, stop the run and start a new one from its weights.",
    ),
    "not-running": ProblemCode(
        "The command changes a live run, and this run is not live.",
        "Submit the run again with the new values. `python launch/status.py RUN_DIR` says how it ended.",
    ),
    "run-exists": ProblemCode(
        "The folder holds a run or a sweep with other settings, and continuing would mix the two.",
        "Give the earlier values again to continue, or give another `run_dir`. The message lists the differences.",
    ),
    "run-failed": ProblemCode(
        "While a call of `hetstep` waited for it, a run, evaluation or sweep failed, was cancelled, or ended without a result.",
        "Read the failure in the message, and the logs that it names. The same submission continues from the last checkpoint.",
    ),
    "wrong-key": ProblemCode(
        "A checkpoint or rollouts are encrypted, and the key is missing or another one.",
        "Give the key with the fingerprint that the message names: `checkpointing.encryption.key_file` or `key_command` of the"
        " recipe, or the variable HETSTEP_KEY_FILE for a command that reads a run folder.",
    ),
    "tampered": ProblemCode(
        "An audit log, or a file with a recorded hash, is not as it was written: a line or a file was changed, added or lost.",
        "Run `python launch/audit.py verify root=FOLDER`, which names the line. Ask who may write there, and restore a backup.",
    ),
    "wrong-version": ProblemCode(
        "A checkpoint or a package has an incompatible version.",
        "Use the version that the message names: the commit in the run's manifest.json, or the packages of the other image.",
    ),
}
"""Run folders."""

CLUSTERS = {
    "needs-gpu": ProblemCode(
        "A feature needs GPUs, and the component has none.",
        "Give the component GPUs with `gpus_per_node`, or turn the feature off.",
    ),
    "not-mounted": ProblemCode(
        "A component opens a path that its container does not mount.",
        "Add the mount that the message prints to `cluster.<component>.container_mounts`.",
    ),
    "out-of-memory": ProblemCode(
        "By the plan's estimate the model does not fit the GPUs, or its weights alone do not.",
        "Use more parallelism, more or larger GPUs, recomputation or offloading. `plan=true` shows the memory by part.",
    ),
    "over-limit": ProblemCode(
        "A request is above what the partition, the QOS, the account or the allocation allows.",
        "Ask for at most what the message names, or choose another partition.",
    ),
    "refused-by-slurm": ProblemCode(
        "Slurm refuses the job for a reason that has no code of its own. The message quotes Slurm.",
        "Change what Slurm names. `dry_run=true` prints the batch script.",
    ),
    "timed-out": ProblemCode(
        "A plan that the REST service makes took longer than its setting `plan_s`, or its process ended without an answer.",
        "Make the plan in a shell: `python launch/submit.py recipe=NAME plan=true`. It may wait for a file system.",
    ),
    "unreachable": ProblemCode(
        "Slurm's controller, or the host of an earlier run, does not answer, or this machine lacks the REST service's `host`.",
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
