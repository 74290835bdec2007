"""Keys of several teachers of one vocabulary (`on_policy_distillation`), and the frozen models that teach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from pipeline.config.policy import TeacherConfig
from pipeline.recipe.values import Text


@dataclass
class TeachersConfig:
    """Several teachers of the policy's vocabulary. One of them scores each sample: that of the sample's environment."""

    teachers: Annotated[
        dict[str, TeacherConfig],
        Field(
            description="The teacher of each environment, by its key under `env`. Teachers with equal keys are loaded once."
            " In place of `teacher`."
        ),
    ] = field(default_factory=dict)
    default_teacher_alias: Annotated[
        Text | None,
        Field(description="Key of `teachers` whose teacher scores the other environments. null: each has its own."),
    ] = None
