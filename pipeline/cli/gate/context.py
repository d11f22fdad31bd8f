"""What the verbs about gates share: their options, and an image opened for its gates."""

from __future__ import annotations

import click

from pipeline.assemble.plan import plan_image
from pipeline.cli.context import checkout_of, host_platform, pick_platform, store_of, store_to_read
from pipeline.fetch.http import Client
from pipeline.fetch.settings import read_settings
from pipeline.fetch.transport import make_fetcher
from pipeline.gate.files import read_setup
from pipeline.gate.smem.context import GateContext, WheelFinder
from pipeline.gate.smem.engine import engine_pin
from pipeline.gate.smem.image_gate import ImageGate, open_gate
from pipeline.gate.smem.limits import Card, card_for
from pipeline.lock.model import WheelPin

arch_option = click.option(
    "--arch",
    metavar="sm_NNN",
    help="Architecture of the target card [default: the first that image.yaml names].",
)
series_option = click.option(
    "--series",
    metavar="NAME",
    help="Use the patches of patches/NAME.yaml instead of the image's own.",
)


def make_gate_context(
    context: click.Context,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
    *,
    reading: bool = False,
) -> GateContext:
    """What gates need to make environments; clients only when a gate downloads something."""
    store = store_to_read(context) if reading else store_of(context)
    return GateContext(
        checkout_of(context),
        store,
        host_platform(),
        # made when they are first needed: most gates find everything in the store
        lambda: make_fetcher(store, mirrors, offline),
        # reading pip's settings starts a process
        lambda: WheelFinder(Client(read_settings(mirrors))),
    )


def chosen_card(
    gate_context: GateContext, name: str, platform: str | None, arch: str | None
) -> Card:
    """The card that --arch names, else the one that the image is for."""
    if arch is not None:
        return card_for(arch)
    spec = gate_context.checkout.spec(name)
    return card_for(spec.on(pick_platform(spec, platform)).main_arch)


def locked_engine(gate_context: GateContext, name: str, platform: str | None) -> WheelPin:
    """The engine's wheel in an image's lock; nothing is downloaded for it."""
    checkout = gate_context.checkout
    plan = plan_image(checkout, name, pick_platform(checkout.spec(name), platform))
    return engine_pin(gate_context, plan, read_setup(checkout, name).package, None)


def open_image_gate(
    gate_context: GateContext,
    name: str,
    platform: str | None,
    series: str | None = None,
) -> ImageGate:
    """An image with its cases, its patches and the environment that compiles its kernels."""
    chosen = pick_platform(gate_context.checkout.spec(name), platform)
    return open_gate(gate_context, plan_image(gate_context.checkout, name, chosen), series)
