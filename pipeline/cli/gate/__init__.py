"""`sm120 gate`: an image comes in; verdicts of its gates, as tables or JSON, go out.

`run.py` chooses which gates apply, `kernels.py` and `objects.py` show their results, `stage.py`
does the same for a build. Judging is done in pipeline.gate. Imports the shared modules of the cli.
"""
