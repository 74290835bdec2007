"""Keys of checkpoints: when they are saved, which are kept, how they are verified and encrypted."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pipeline.files.stored_files import SECTION
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import LIVE, Bool, Duration, Line, Positive, Text
from pipeline.seams import extras

Verify = Literal["full", "size", "off"]
_KEY_FORM = re.compile(r"\b[0-9a-fA-F]{64}\b|(?<![\w+/])[A-Za-z0-9+/]{43}=")


@dataclass
class EncryptionConfig:
    """Encryption at rest (AES-256-GCM) of checkpoints, rollouts and the answers of evaluations.

    The key is 32 random bytes, as 64 hex digits or in base64. It is in no file of the run. A lost key cannot be replaced; to
    change it, start a new run from an export.

    Not encrypted: metrics, TensorBoard events, scores, logs (with what your own code prints), the recipe, lineage.json, names
    and sizes of files, the position in the data. Not detected: a checkpoint replaced as a whole, by a plain one or by an older
    one with the same key; in rollouts and answers, plain files or lines, a file of the same name and key from elsewhere, and
    missing lines at the end.
    """

    enabled: Bool = False
    """Encrypt new checkpoints, rollouts and answers of evaluations. Files that are already plain stay plain. false with a key:
    read encrypted files, but write plain ones."""
    key_file: Line | None = None
    """File with the key, outside the run folder. Every node must be able to read it, and no other user."""
    key_command: Line | None = None
    """Command that prints the key, such as `vault kv get -field=key secret/hetstep`; an alternative to key_file. Each rank that
    needs the key runs it once, without a shell, for at most a minute. Submission never runs it."""


@dataclass
class CheckpointingConfig:
    """Checkpoints of a run."""

    enabled: Bool = True
    """Whether to save checkpoints."""
    save_period: Annotated[Positive, LIVE] = 10
    """Steps between checkpoints. The last step is always saved."""
    keep_top_k: Annotated[Positive | None, LIVE] = 3
    """Number of best checkpoints to keep, by metric_name. The latest is always kept too. null: keep all."""
    metric_name: Text | None = None
    """Metric that ranks checkpoints, by its name in metrics.jsonl, such as `val/accuracy`; `val:accuracy` is the same. null:
    keep the latest keep_top_k checkpoints."""
    higher_is_better: Bool = True
    """Whether a higher value of the metric is better."""
    async_save: Bool = False
    """Write checkpoints while training continues."""
    save_consolidated: Annotated[Bool, LIVE] = False
    """Also write a Hugging Face checkpoint, in `hf/` beside the sharded one. With adapters it needs memory for merged
    weights."""
    checkpoint_must_save_by: Duration | None = None
    """Time at which the run saves and exits, as days:hours:minutes:seconds after the job's start. null: the job's time
    limit."""
    verify: Verify = "full"
    """What to verify before a checkpoint or an export is read. full: the checks of size, and the SHA-256 of every file, which
    reads all files once more, at 0.5 to 2 GB/s per rank. size: names and sizes of a checkpoint's files, and its list of
    digests; for an export, only names. off: names and sizes of the files that a checkpoint lists."""
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)


def check_encryption(checkpointing: CheckpointingConfig, run_dir: str) -> Iterator[Problem]:
    """Yield the problems of `checkpointing.encryption`. run_dir: the run's folder."""
    given = checkpointing.encryption
    wanted = {"enabled": "true" if given.enabled else None, "key_file": given.key_file, "key_command": given.key_command}
    for name, value in wanted.items():
        if value is not None:
            yield from extras.missing("encryption", f"{SECTION}.{name}", value)
    if given.key_file is not None and given.key_command is not None:
        yield Problem(SECTION, "contradiction", "got key_file and key_command; expected one of them")
    if given.enabled and given.key_file is None and given.key_command is None:
        message = "got true without a key; expected key_file or key_command. Try (umask 077; openssl rand -hex 32 > KEY_FILE)"
        yield Problem(f"{SECTION}.enabled", "missing-value", message)
    if given.enabled and checkpointing.save_consolidated:
        message = "got true with encryption; expected false, since hf/ is not encrypted. Try launch/export.py out=DIR instead"
        yield Problem("checkpointing.save_consolidated", "contradiction", message)
    if given.key_file is not None and Path(os.path.realpath(run_dir)) in Path(os.path.realpath(given.key_file)).parents:
        message = "got a file in the run folder, beside the files that it encrypts; expected a file outside the run folder"
        yield Problem(f"{SECTION}.key_file", "contradiction", message)
    if given.key_file is not None and _KEY_FORM.fullmatch(Path(given.key_file).name):
        message = "got what looks like the key itself; expected the path of its file, since recipes are written to disk"
        yield Problem(f"{SECTION}.key_file", "secret-in-recipe", message)
    if given.key_command is not None and _KEY_FORM.search(given.key_command):
        message = "got what looks like the key itself; expected a command that fetches it, since recipes are written to disk"
        yield Problem(f"{SECTION}.key_command", "secret-in-recipe", message)
