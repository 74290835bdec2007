"""Define what all sections of a recipe use: problems with their codes, types of values, secrets, and code of the user."""
