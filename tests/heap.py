"""Take what is imported out of the garbage collector's reach. Importing this module does so; import it last.

A full collection walks through all of it, and vLLM asks for several of them per engine.
"""

import gc


def _nothing() -> None:
    """Stands for `gc.freeze` and `gc.unfreeze`, which vLLM calls when an engine starts and ends: all would be walked again."""


gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = _nothing
