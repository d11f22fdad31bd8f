"""Scripts that run inside an image, on its own Python: standard library only."""
