"""LoRA and DoRA adapters of linear layers, the same numbers for every backend and layout."""
