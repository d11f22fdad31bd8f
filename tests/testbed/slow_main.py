"""The command, made to wait at a stage (STAGE) and to say so (STAGE_FLAG) for a test to stop it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.artifacts.store import store
from pipeline.artifacts.store.store import Store
from pipeline.cli.main import main
from pipeline.images.assemble import locked_layers as pinned

_WAIT_S = 60
# worker processes import this file too, so what is replaced here is replaced in them
_STAGES: dict[str, tuple[object, str]] = {
    "a layer": (pinned, "write_layer"),
    "the config": (Store, "put_blob"),
    "the index": (store, "index_json"),
}


def _waiting(real: Callable[..., Any]) -> Callable[..., Any]:
    def wait_then_go_on(*args: Any, **kwargs: Any) -> Any:
        Path(os.environ["STAGE_FLAG"]).touch()
        time.sleep(_WAIT_S)
        return real(*args, **kwargs)

    return wait_then_go_on


if stage := _STAGES.get(os.environ["STAGE"]):
    setattr(*stage, _waiting(getattr(*stage)))

if __name__ == "__main__":
    main()
