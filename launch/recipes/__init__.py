"""Read recipes and the model folders that they name, and decide which code of the user to trust."""
