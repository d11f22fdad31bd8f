"""`sm120 recipe` and `sm120 render`: which recipes there are, and their exact commands."""
