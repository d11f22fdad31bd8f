"""Repairing a set: downloading what is damaged, and only that."""

from __future__ import annotations

from pipeline import log
from pipeline.fetch.http import Client
from pipeline.fetch.settings import read_settings
from pipeline.weights import hub
from pipeline.weights.check.copies import RouteSupply
from pipeline.weights.check.repair import Repaired, repair
from pipeline.weights.check.verify import Checked
from pipeline.weights.place import Place
from pipeline.weights.transfer.sources import find_routes


def repair_set(
    place: Place, checked: Checked, neighbours: tuple[str, ...], offline: bool
) -> list[Repaired]:
    """Fetch the damaged files of a set from neighbours, or from the Hub."""
    client = Client(read_settings())
    routes = find_routes(
        client,
        place.lock,
        endpoint=hub.endpoint(),
        token=None if offline else hub.saved_token(),
        neighbours=neighbours,
        offline=offline or hub.is_offline(),
    )
    with log.step(f"Repairing {place.lock.name}"):
        return repair(place, checked, RouteSupply(routes, client))
