"""The rungs, from the first answer to speculation."""
