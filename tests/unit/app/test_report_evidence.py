"""A check of a run is known by the part that it judges, not by its title."""

from __future__ import annotations

from pipeline.app.report import evidence_links
from pipeline.evidence.verify.verdict import HOST, Code, Node, Verdict, how_to_add_facts
from pipeline.serving.report.model import EvidenceLink

DIGEST = "sha256:" + "1" * 64
NAMED = [EvidenceLink(name="image", digest=DIGEST, state="named")]


def test_the_check_of_an_image_is_found_under_any_title() -> None:
    (link,) = evidence_links(NAMED, [Node("vllm linux/amd64", message="good", part="image")])
    assert (link.name, link.digest, link.state) == ("image", DIGEST, "valid")


def test_a_title_that_begins_like_a_part_is_not_taken_for_it() -> None:
    links = evidence_links(NAMED, [Node("image of something else", Verdict.BROKEN, "bad")])
    assert [(x.name, x.digest) for x in links] == [
        ("image of something else", None),
        ("image", DIGEST),
    ]


def test_facts_of_the_host_are_missed_by_their_part_alone() -> None:
    code = Code.FACTS_NOT_GIVEN
    titled = Node(f"{HOST} in a title", Verdict.INCOMPLETE, code=code)
    assert how_to_add_facts(titled) == ""
    assert "measure again" in how_to_add_facts(Node("x", Verdict.INCOMPLETE, part=HOST, code=code))
