"""Check that this machine has the compiler that Triton needs, if ranks that need Triton run here.

The node checks, which run before ranks load anything, check other nodes, container images and a `python` of a component.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.executors import containers
from pipeline import config
from pipeline.config import Problem, Recipe
from pipeline.node import c_compiler


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each component that uses GPUs of this machine and cannot compile kernels for them."""
    for name, component in config.components(recipe).items():
        gpus, uses_this_python = component.gpus_per_node, not containers.has_another_python(component)
        if gpus and uses_this_python and config.needs_triton(recipe, name) and (missing := c_compiler.missing()):
            message = f"got {gpus}; {name} ranks compile kernels for GPUs, but there is no {missing}. Install it"
            yield Problem(f"cluster.{name}.gpus_per_node", "not-installed", message)
