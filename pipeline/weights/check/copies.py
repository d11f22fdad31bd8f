"""Where right bytes may come from when some are wrong here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pipeline.fetch.http import Client
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.routes import Route


class Source(Protocol):
    """Another copy of a set. Nothing of it is believed before the hash is right."""

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from start up to stop, in pieces; an ending of ours where it cannot."""
        ...


class Supply(Protocol):
    """All copies that may be asked."""

    def sources(self) -> list[Source]:
        """Each by itself: one that has other bytes is passed over for the next."""
        ...

    def bring(self, place: Place, pins: list[FilePin]) -> None:
        """Whole files, as fast as it goes; an ending of ours where it cannot."""
        ...

    def hang_up(self) -> None:
        """End all waiting, also for a server's next bytes."""
        ...


@dataclass(frozen=True)
class RouteSource:
    """One of the routes that a fetch takes."""

    route: Route
    client: Client

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        """A range, over as many tries as it takes."""
        return fetch_range([self.route], pin, start, stop, client=self.client)


@dataclass(frozen=True)
class Routes:
    """Folders, neighbours and the Hub, as a fetch uses them."""

    routes: list[Route]
    client: Client

    def sources(self) -> list[Source]:
        """One a route."""
        return [RouteSource(route, self.client) for route in self.routes]

    def bring(self, place: Place, pins: list[FilePin]) -> None:
        """Through a fetch: several files and ranges at once, resumable."""
        fetch_files(place, pins, self.routes, client=self.client, is_right=lambda pin: False)

    def hang_up(self) -> None:
        """As on Ctrl-C."""
        self.client.hang_up()
