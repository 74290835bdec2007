"""The bodies of requests and answers, from which FastAPI makes the OpenAPI page."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from launch.api.sweeps import SweepState

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
RecipeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:,-]{0,199}$")]
"""A name of a recipe, never a path: clients choose among the files of recipes/."""
MAX_NESTED = 200
"""Maximum number of lists and mappings in the overrides of a request."""


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values unchanged. Raises ValueError for texts that UTF-8 cannot encode, and for too many nested values."""
    if str(values).count("{") + str(values).count("[") > MAX_NESTED:
        raise ValueError(f"expected at most {MAX_NESTED} lists and mappings")
    json.dumps(values, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return values


Overrides = Annotated[dict[str, Any], AfterValidator(_writable), Field(description="Values by key of the recipe.")]


class Body(BaseModel):
    """The base of all request bodies: an unknown key is refused."""

    model_config = ConfigDict(extra="forbid")


class ProblemAnswer(BaseModel):
    """A problem: the key to change, the kind of problem, and a message."""

    key: str
    code: str
    message: str
    origin: str = ""


class ProblemsAnswer(BaseModel):
    """The problems for which a request was refused."""

    problems: list[ProblemAnswer]


class Me(BaseModel):
    """The sender of the request."""

    name: str
    role: Literal["viewer", "submitter", "admin"]
    writable: bool = Field(description="Whether the service takes requests that change something.")


class RunList(BaseModel):
    """A part of the list of runs, newest first."""

    total: int = Field(description="Number of runs that match.")
    runs: list[dict[str, Any]] = Field(description="As `python launch/status.py json=true`, with `id` and `owner`.")


class CheckpointAnswer(BaseModel):
    """A complete checkpoint."""

    step: int
    folder: str
    metric: float | None


class MetricsAnswer(BaseModel):
    """Records of metrics.jsonl, one for each step, oldest first."""

    records: list[dict[str, Any]]


class RecipeBody(Body):
    """A recipe with overrides."""

    recipe: RecipeName = Field(description="A name in recipes/, without .yaml.")
    overrides: Overrides = {}


class SubmissionBody(RecipeBody):
    """A run to submit, or to continue."""

    name: RunName = Field(description="Its folder: ROOT/USER/NAME. The name of a run of yours continues that run.")


class PlanAnswer(BaseModel):
    """The plan of a recipe; figures that are not known are null."""

    fits: bool = Field(description="Whether there are neither problems nor warnings.")
    problems: list[ProblemAnswer] = Field(description="What keeps the recipe from running anywhere.")
    site_problems: list[ProblemAnswer] = Field(description="Files, folders and services that a run lacks here.")
    warnings: list[str]
    gpus: int
    step_seconds: float | None
    total_seconds: float | None
    gpu_hours: float | None
    text: str


class Submitted(BaseModel):
    """A submitted run."""

    id: str
    job_id: str
    notes: list[str]


class ChangeBody(Body):
    """Live keys of a run with their new values."""

    overrides: Overrides


class ChangeAsked(BaseModel):
    """A requested change of a run. The run's status shows later how the run answered."""

    number: int


class ExportBody(Body):
    """A request to export a checkpoint."""

    step: int | None = Field(default=None, ge=0, description="Step of the checkpoint; null: the latest.")
    adapter: bool = Field(default=False, description="The adapters alone, in peft's format.")


class ExportAnswer(BaseModel):
    """An exported model, complete or not."""

    folder: str
    state: Literal["running", "done", "failed"]
    why: str = Field(default="", description="Why it failed.")


class EvaluationBody(Body):
    """An evaluation of a run's checkpoint."""

    suite: RecipeName | None = Field(default=None, description="A name in recipes/suites/; null: the suite of the run.")
    step: int | None = Field(default=None, ge=0, description="Step of the checkpoint; null: the latest.")
    overrides: Overrides = {}


class EvaluationAnswer(BaseModel):
    """A submitted evaluation."""

    folder: str
    job_id: str


# ---- sweeps ---------------------------------------------------------------------------------------------------------------


class SweepBody(Body):
    """A sweep or search to begin, or to continue."""

    suite: RecipeName = Field(description="A name in recipes/sweeps/, without .yaml.")
    id: RunName | None = Field(default=None, description="Its folder: ROOT/USER/sweeps/SUITE/ID; null: today's date.")
    overrides: Overrides = Field(default_factory=dict)


class SubmittedSweep(BaseModel):
    """A sweep that has begun or continues."""

    id: str


class SweepLine(BaseModel):
    """A sweep in a list."""

    id: str
    owner: str
    state: SweepState | Literal["unknown"]
    why: str = Field(default="", description="Why the state is unknown, or the end of the log of a sweep that stopped.")
    summary: str = Field(default="", description="The outcome in a line, once it is known.")


class SweepAnswer(SweepLine):
    """A sweep with its jobs."""

    jobs: dict[str, str] = Field(default={}, description="State of each job: missing, live, done, failed, pruned.")
    runs: dict[str, str] = Field(default={}, description="Id of each job's run, for GET runs/ID.")
    verdict: dict[str, Any] | None = Field(default=None, description="verdict.json: gates; for a search, its trials.")
