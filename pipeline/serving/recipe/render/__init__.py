"""A launch as text for the tool that is to run it: one pure function for each format."""
