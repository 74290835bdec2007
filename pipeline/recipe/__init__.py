"""What every part of a recipe uses: problems with their codes, types of values, secrets, and code of the user."""
