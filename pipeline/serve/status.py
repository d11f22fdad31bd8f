"""What is served on a machine, and whether it is what was built."""

from __future__ import annotations

from typing import Literal

from pipeline.model import Frozen
from pipeline.oci.record import ImageRecord
from pipeline.recipe.container import (
    ATTEMPT_LABEL,
    DIGEST_LABEL,
    IMAGE_LABEL,
    MODEL_LABEL,
    PORT_LABEL,
    RECIPE_LABEL,
)
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.facts import ContainerFacts, difference, other_owner
from pipeline.serve.health import is_healthy
from pipeline.serve.site import HERE, Site
from pipeline.store.store import Store, read_image_record


class ServedStatus(Frozen):
    """One container of a recipe."""

    recipe: str
    container: str
    status: str
    healthy: bool
    port: int | None
    model: str
    image: str
    digest: str
    # same: the image and every layer are those of the store
    built: Literal["same", "other", "unknown"]
    why: str
    attempt: str
    started_at: str
    other_owner: str = ""  # another user who started it

    @property
    def is_forgotten(self) -> bool:
        """Whether it answers, though its container engine says that it was never started.

        Podman takes what runs for what was before a boot when its folder in /run was cleared;
        `podman system reset` does that, also with another storage.
        """
        return self.status == "created" and self.healthy


def status_of(engine: ContainerEngine, store: Store, site: Site = HERE) -> list[ServedStatus]:
    """Every container of a recipe."""
    records = {record.digest: record for record in map(read_image_record, store.image_paths())}
    return [_status(engine, facts, records, site) for facts in engine.containers()]


def _status(
    engine: ContainerEngine, facts: ContainerFacts, records: dict[str, ImageRecord], site: Site
) -> ServedStatus:
    labels = facts.labels
    may_run = facts.running or facts.status == "created"
    port = _port(labels.get(PORT_LABEL, ""))
    record = records.get(labels.get(DIGEST_LABEL, ""))
    why = difference(record, engine.image(facts.image)) if record else "not in this store"
    return ServedStatus(
        recipe=labels.get(RECIPE_LABEL, ""),
        container=facts.name,
        status=facts.status,
        healthy=may_run and port is not None and is_healthy(site.door(port)),
        port=port,
        model=labels.get(MODEL_LABEL, ""),
        image=labels.get(IMAGE_LABEL, ""),
        digest=labels.get(DIGEST_LABEL, ""),
        built="unknown" if record is None else ("other" if why else "same"),
        why=why,
        attempt=labels.get(ATTEMPT_LABEL, ""),
        started_at=facts.started_at,
        other_owner=other_owner(facts),
    )


def _port(text: str) -> int | None:
    """Labels may be anybody's."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 5
    return int(text) if is_number and 0 < int(text) < 65536 else None
