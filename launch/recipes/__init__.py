"""Read recipes and what they name: models' folders, and which code of the user to trust."""
