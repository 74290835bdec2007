"""Refuse records with images, sound or video, of which training on the text alone would be silently wrong.

They are columns of the features Image, Audio and Video of `datasets` ({bytes, path}), columns with a usual name such as
`images`, and parts of messages such as {"type": "image"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"image", "images", "audio", "audios", "video", "videos"}
"""Columns that hold media unless they are empty."""
FEATURES = ({"bytes", "path"}, {"array", "sampling_rate", "path"}, {"array", "sampling_rate"})
"""Keys of a value of the features Image, Audio and Video, as it is stored and as it is decoded."""
PARTS = {"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"}
"""Types of parts of a message's content (OpenAI's, and those of transformers)."""


def refuse_media(record: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the column, if a record has an image, sound or video."""
    for name, value in record.items():
        if value and (name in NAMES or isinstance(value, Mapping | list)) and (kind := _kind(name, value)):
            message = f"'{name}' has {kind}; expected text, since images, sound and video are not supported"
            raise ValueError(f"{message}. Try a data set of text, or processor=MODULE.FUNCTION that removes '{name}'")


def _kind(name: str, value: Any) -> str | None:
    """Return what kind of media a column has; None for text."""
    items = value if isinstance(value, list) else [value]
    first = next((item for item in items if item is not None), None)
    if name in NAMES and first not in (None, "", {}):
        return f"{name.rstrip('s')} data"
    if not isinstance(first, Mapping):
        return None
    if first.keys() in FEATURES and any(part is not None for part in first.values()):
        return "an image, sound or video"
    for message in items:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in PARTS:
                return f"a message with a part of type {part['type']}"
    return None
