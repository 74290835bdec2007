"""Parts that all sections of a recipe use: problems and their codes, types of values, secrets, the user's code and files."""
