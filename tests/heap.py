"""Freeze all imported objects for the garbage collector. Importing this module does so; import it last.

A full collection walks through all of them, and vLLM runs several per engine.
"""

import gc


def _nothing() -> None:
    """Replace `gc.freeze` and `gc.unfreeze`.

    vLLM calls them when an engine starts and ends; the latter would undo the freeze.
    """


gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = _nothing
