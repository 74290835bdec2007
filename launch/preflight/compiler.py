"""Check that this machine has what Triton compiles with, where ranks that cannot run without it are local.

Leaves out: other nodes, images, and another `python`, where the node checks look before anything is loaded.
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
        gpus, here = component.gpus_per_node, not containers.has_another_python(component)
        if gpus and here and config.needs_triton(recipe, name) and (missing := c_compiler.missing()):
            why = f"got {gpus}, for which {name} ranks compile kernels, but there is no {missing}. Install it"
            yield Problem(f"cluster.{name}.gpus_per_node", "not-installed", why)
