"""An engine of one kernel, small enough to judge and to break in seconds."""
