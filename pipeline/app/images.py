"""Images by name: their plans, their builds, and what is inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.app.workspace import Workspace, named_platform, pick_platform, platforms_of
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import ImageStale, PipelineError, UnknownImage
from pipeline.images.assemble.image import Built, find_built, staleness
from pipeline.images.assemble.inside import FoundFile, list_inside, read_inside
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile

if TYPE_CHECKING:
    from pipeline.evidence.statements.inventory import Origin


def plans_of(checkout: Checkout, names: tuple[str, ...], platform: str | None) -> list[ImagePlan]:
    """Plans of the named images, or of all, for the chosen platform or for all."""
    # named twice is built once, in the order of the names
    chosen = dict.fromkeys(names or checkout.images())
    if not names and platform:
        # without names, only the images that are for it
        wanted = named_platform(platform)
        chosen = {each: None for each in chosen if wanted in checkout.spec(each).platforms}
    if not chosen:
        raise UnknownImage(f"{checkout.root / 'images'}: holds no image")
    return [
        plan_image(checkout, name, each)
        for name in chosen
        for each in platforms_of(checkout.spec(name), platform)
    ]


def find_image(checkout: Checkout, store: Store, name: str, platform: str | None) -> Built:
    """An image that was built from today's checkout, or an error that names the fix."""
    spec = image_spec(checkout, name)
    chosen = pick_platform(spec, platform)
    plan = plan_image(checkout, name, chosen)
    # by the plan and not by name: an image of an older lock is not the one that was asked for
    built = find_built(store, plan)
    if built is None:
        if why := staleness(checkout, store, plan):
            which = _which(spec, plan.platform)
            fix = f"Run `sm120 build {which}` again; --accept takes a digest that changed."
            raise ImageStale(f"{name} for {plan.platform} is stale: {why}", fix)
        raise not_built(store, spec, plan.platform)
    return built


def image_spec(checkout: Checkout, name: str) -> ImageFile:
    """Return an image's spec by its name; refuse the folder of an exported image."""
    try:
        return checkout.spec(name)
    except UnknownImage as error:
        if not (Path(name) / "index.json").is_file():
            raise
        raise UnknownImage(
            f"{name}: is an OCI layout, and here an image of the store is named",
            f"`skopeo copy oci:{name} docker://REGISTRY/REPO:TAG` brings it to a registry,"
            " docker-daemon:NAME:TAG in place of that to Docker.",
        ) from error


def not_built(store: Store, spec: ImageFile, platform: str) -> UnknownImage:
    """Say how to get an image that the store lacks for a platform, and may have for another."""
    others = [each for each in spec.platforms if store.image_record(spec.name, each)]
    instead = f", or take the one for {others[0]} (--platform {others[0]})" if others else ""
    return UnknownImage(
        f"{spec.name} for {platform} is not built",
        f"Run `sm120 build {_which(spec, platform)}` first{instead}.",
    )


def _which(spec: ImageFile, platform: str) -> str:
    return f"{spec.name} --platform {platform}" if len(spec.platforms) > 1 else spec.name


def find_images(checkout: Checkout, store: Store, name: str, platform: str | None) -> list[Built]:
    """An image for the chosen platform, or for all that it was ever built for."""
    spec = image_spec(checkout, name)
    chosen = platforms_of(spec, platform)
    # an image that changed since its build is an error: skipping it would quietly lose a platform
    known = [each for each in chosen if store.image_record(name, each) is not None]
    for each in chosen if known else ():
        if each not in known:
            log.say(f"{name} for {each} was never built, and is left out")
    return [find_image(checkout, store, name, each) for each in known or chosen]


def list_images(workspace: Workspace) -> list[dict[str, Any]]:
    """The images of a checkout, and whether they are locked and built."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    rows = []
    for name in checkout.variants():
        spec = checkout.spec(name)
        for platform in spec.platforms:
            record, stale = store.image_record(name, platform), ""
            if record:
                try:
                    stale = staleness(checkout, store, plan_image(checkout, name, platform))
                except PipelineError as error:
                    # a lock that is missing or out of date, for example: the build would say so
                    stale = str(error)
            rows.append(
                {
                    "image": name,
                    "platform": platform,
                    "locked": checkout.lock_path(name, platform).exists(),
                    "built": record.digest if record else None,
                    "stale": stale if record else None,
                    "summary": spec.on(platform).summary,
                }
            )
    return rows


def explain_file(workspace: Workspace, name: str, path: str, platform: str | None = None) -> Origin:
    """Find the wheel, .deb, source or patch that a built image's file comes from."""
    from pipeline.evidence.statements.inventory import file_origin as find_origin

    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        return find_origin(checkout, store, find_image(checkout, store, name, platform), path)


def list_image_files(
    workspace: Workspace, name: str, path: str = "/", platform: str | None = None
) -> list[FoundFile]:
    """The files of a built image: those of a folder, or all that a pattern matches."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        return list_inside(store, find_image(checkout, store, name, platform), path)


def read_image_file(
    workspace: Workspace, name: str, path: str, platform: str | None = None
) -> bytes:
    """A file of a built image, as a container sees it."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        return read_inside(store, find_image(checkout, store, name, platform), path)
