"""Prove that built images start, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.app.image_statements import state_runs
from pipeline.app.images import find_image
from pipeline.app.signing import Signing
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.box import Wanted
from pipeline.artifacts.containers.container_engine import find_way
from pipeline.core.errors import RecipeInvalid, SmokeNotPassed, StartFails, StartUnknown
from pipeline.images.assemble.image import Built
from pipeline.images.engine.parser_flags import ParserFlags, find_parser_flags, flags_folder
from pipeline.images.gate.runs import Run
from pipeline.images.spec.checkout import Checkout
from pipeline.images.start_test.expected import engine_of
from pipeline.images.start_test.prove import prove_start

Results = dict[Built, Run]


def prove_starts(
    workspace: Workspace, names: Sequence[str], platform: str | None = None, wanted: Wanted = "auto"
) -> Results:
    """Run each image without a GPU, and state what of it works and what does not."""
    checkout, store, signing = workspace.checkout(), workspace.store(), Signing()
    results = Results()
    with store.in_use():
        images = [find_image(checkout, store, name, platform) for name in dict.fromkeys(names)]
        way = find_way(wanted)
        for image in images:
            flags, file = _committed_flags(checkout, image)
            results[image] = prove_start(store, image, way, flags, file)
            # a failure is stated like a success
            state_runs(checkout, store, image, [results[image]], signing)
    return results


def _committed_flags(checkout: Checkout, image: Built) -> tuple[ParserFlags | None, Path | None]:
    """The flags that recipes are checked against, where they are known."""
    parser = engine_of(image.plan)
    if parser is None:
        return None, None
    folder = flags_folder(checkout)
    try:
        flags = find_parser_flags(folder, parser.engine, image.name)
    except RecipeInvalid:
        return None, None
    return flags, folder / f"{flags.image}.yaml"


def require_started(results: Results) -> None:
    """Raise the error of the first image that failed, else of the first that is unknown."""
    kinds: dict[str, type[SmokeNotPassed]] = {"failed": StartFails, "unknown": StartUnknown}
    for verdict, kind in kinds.items():
        for image, run in results.items():
            first = next((test for test in run.tests if test.verdict == verdict), None)
            if run.verdict == verdict and first:
                raise kind(f"{image.name} for {image.platform}: {first.name}: {first.message}")
