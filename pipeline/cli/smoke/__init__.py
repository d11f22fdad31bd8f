"""The verb of the smoke ladder."""
