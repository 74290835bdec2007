"""The bodies of the requests and answers about sweeps."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from launch.api.sweeps import SweepState
from launch.serving.bodies import Body, Overrides, RecipeName, RunName


class SweepBody(Body):
    """A sweep or search to begin, or to continue."""

    suite: RecipeName = Field(description="A name in recipes/sweeps/, without .yaml.")
    id: RunName | None = Field(default=None, description="Its folder: ROOT/USER/sweeps/SUITE/ID; null: today's date.")
    overrides: Overrides = Field(default_factory=dict)


class SubmittedSweep(BaseModel):
    """A sweep that has begun, or goes on."""

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
    verdict: dict[str, Any] | None = Field(default=None, description="verdict.json: gates; of a search the best trial and all.")
