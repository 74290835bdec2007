"""LoRA and DoRA adapters of linear layers, with the same values for every backend and layout."""
