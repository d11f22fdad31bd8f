"""`sm120 source`: lock sources, compile them, and share their objects."""
