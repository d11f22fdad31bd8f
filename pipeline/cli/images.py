"""The images that a verb names: their plans, and what was built of them."""

from __future__ import annotations

from pipeline import log
from pipeline.assemble.image import Built, find_built, staleness
from pipeline.assemble.plan import ImagePlan, plan_image
from pipeline.cli.context import pick_platform, platforms_of
from pipeline.errors import ImageStale, UnknownImage
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


def plans_of(checkout: Checkout, names: tuple[str, ...], platform: str | None) -> list[ImagePlan]:
    """Plans of the named images, or of all, for the chosen platform or for all."""
    # named twice is built once, in the order of the names
    chosen = dict.fromkeys(names or checkout.images())
    if not chosen:
        raise UnknownImage(f"{checkout.root / 'images'}: holds no image")
    return [
        plan_image(checkout, name, each)
        for name in chosen
        for each in platforms_of(checkout.spec(name), platform)
    ]


def find_image(checkout: Checkout, store: Store, name: str, platform: str | None) -> Built:
    """An image that was built from today's checkout, or an error that names the fix."""
    spec = checkout.spec(name)
    plan = plan_image(checkout, name, pick_platform(spec, platform))
    # by the plan and not by name: an image of an older lock is not the one that was asked for
    built = find_built(store, plan)
    if built is None:
        which = f"{name} --platform {plan.platform}" if len(spec.platforms) > 1 else name
        if why := staleness(checkout, store, plan):
            fix = f"Run `sm120 build {which}` again; --accept takes a digest that changed."
            raise ImageStale(f"{name} for {plan.platform} is stale: {why}", fix)
        fix = f"Run `sm120 build {which}` first."
        raise UnknownImage(f"{name} for {plan.platform} is not built", fix)
    return built


def find_images(checkout: Checkout, store: Store, name: str, platform: str | None) -> list[Built]:
    """An image for the chosen platform, or for all that it was ever built for."""
    spec = checkout.spec(name)
    chosen = platforms_of(spec, platform)
    # built once and changed since is an error: left out, a name would quietly lose a platform
    known = [each for each in chosen if store.image_record(name, each) is not None]
    for each in chosen if known else ():
        if each not in known:
            log.say(f"{name} for {each} was never built, and is left out")
    return [find_image(checkout, store, name, each) for each in known or chosen]
