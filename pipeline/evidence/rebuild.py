"""What an independent second build proved, and who vouches for it."""

from __future__ import annotations

from pipeline import __version__
from pipeline.assemble.image import Built, code_digest
from pipeline.assemble.plan import ImagePlan
from pipeline.attest.envelope import Envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import BUILDER, REBUILD
from pipeline.attest.predicates import Rebuild
from pipeline.attest.statement import Moment, Statement, make_statement
from pipeline.attest.strict import plain
from pipeline.evidence.image import keep_all
from pipeline.known import Unknown
from pipeline.store.store import Store


def rebuild_statement(
    plan: ImagePlan, first: Built, signer: Signer, difference: str, when: Moment
) -> Statement:
    """A rebuild of an image; an empty difference means the same digest."""
    nothing = Unknown(unknown="there is none: the digests are equal")
    predicate = Rebuild(
        image=first.name,
        platform=first.platform,
        identical=not difference,
        difference=plain(difference) if difference else nothing,
        inputs=plan.key,
        builder=BUILDER,
        builder_version=__version__,
        builder_code=code_digest(),
        rebuilt_by=signer.key_id,
        claims="SLSA Build L1; a rebuild on one's own machine is no hosted builder",
    )
    return make_statement(
        first.name, first.digest, REBUILD, predicate.model_dump(mode="json"), when
    )


def record_rebuild(
    store: Store, plan: ImagePlan, first: Built, signer: Signer, difference: str, when: Moment
) -> Envelope:
    """State, sign and keep it; each key has one statement for each digest."""
    said = rebuild_statement(plan, first, signer, difference, when)
    name = f"rebuild-{signer.key_id.removeprefix('sha256:')[:12]}"
    return keep_all(store, first, {name: said}, [signer], when)[0].envelope
