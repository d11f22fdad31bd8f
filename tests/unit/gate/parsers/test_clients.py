"""What clients of /v1/messages and /v1/responses put together, and what they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.images.gate.parsers.worker.answers import differences
from pipeline.images.gate.parsers.worker.clients import MessagesReader, ResponsesReader

Event = dict[str, Any]
TRUTH = {"reasoning": "r", "content": "c", "calls": [{"name": "f", "arguments": {"a": 1}}]}


def start(index: int, **block: Any) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, field: str, text: str) -> Event:
    piece = {"type": kind, field: text}
    return {"type": "content_block_delta", "index": index, "delta": piece}


def stop(index: int) -> Event:
    return {"type": "content_block_stop", "index": index}


MESSAGE: list[Event] = [
    {"type": "message_start"},
    start(0, type="thinking", thinking=""),
    delta(0, "thinking_delta", "thinking", "r"),
    delta(0, "signature_delta", "signature", "s"),
    stop(0),
    start(1, type="text", text=""),
    delta(1, "text_delta", "text", "c"),
    stop(1),
    start(2, type="tool_use", id="1", name="f", input={}),
    delta(2, "input_json_delta", "partial_json", '{"a":'),
    delta(2, "input_json_delta", "partial_json", " 1}"),
    stop(2),
    {"type": "ping"},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]


def changed(events: list[Event], place: int, *new: Event) -> list[Event]:
    return [*events[:place], *new, *events[place + 1 :]]


def message_faults(events: list[Event]) -> list[str]:
    client = MessagesReader()
    for event in events:
        client.read(event)
    return differences(TRUTH, client.ended(), [])


def test_a_message_is_put_together_from_its_blocks() -> None:
    assert message_faults(MESSAGE) == []


def test_a_call_without_deltas_has_the_input_of_its_start() -> None:
    client = MessagesReader()
    for event in (*MESSAGE[:9], *MESSAGE[11:]):
        client.read(event)
    assert client.ended().arguments == ["{}"]


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (MESSAGE[1:], "no single start"),
        ([MESSAGE[0], *MESSAGE], "no single start"),
        (MESSAGE[:-1], "not closed"),
        (changed(MESSAGE, 11), "not closed"),
        (changed(MESSAGE, 4), "blocks out of order"),
        (changed(MESSAGE, 7, stop(2)), "blocks out of order"),
        (changed(MESSAGE, 5, start(2, type="text", text="")), "blocks out of order"),
        (changed(MESSAGE, 6, delta(2, "text_delta", "text", "c")), "delta outside its block"),
        (
            changed(MESSAGE, 9, delta(2, "text_delta", "text", '{"a":')),
            "delta of another block's kind",
        ),
        (changed(MESSAGE, 10), "arguments are not JSON"),
        (
            changed(MESSAGE, 13, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
            "finish reason",
        ),
        (changed(MESSAGE, 8, start(2, type="tool_use", id="1", name="g", input={})), "names"),
        (changed(MESSAGE, 8, start(2, type="tool_use", id="", name="f", input={})), "ids"),
    ],
)
def test_what_a_client_of_messages_cannot_use_is_a_fault(events: list[Event], fault: str) -> None:
    assert fault in message_faults(events)


def item(kind: str, place: int, text: str, **more: Any) -> list[Event]:
    """Events of one item: it is added, gets a text in two pieces, and is done."""
    field = "arguments" if kind == "function_call" else "content"
    content: Any = text if field == "arguments" else [{"type": "text", "text": text}]
    whole = {"type": kind, "id": f"i{place}", field: content, **more}
    empty = {**whole, field: "" if field == "arguments" else []}
    about = {"output_index": place, "item_id": f"i{place}"}
    return [
        {"type": "response.output_item.added", "output_index": place, "item": empty},
        {"type": "response.x.delta", **about, "delta": text[:1]},
        {"type": "response.x.delta", **about, "delta": text[1:]},
        {"type": "response.output_item.done", "output_index": place, "item": whole},
    ]


ITEMS = [
    *item("reasoning", 0, "r"),
    *item("message", 1, "c"),
    *item("function_call", 2, '{"a": 1}', name="f", call_id="1"),
]
OUTPUT = [event["item"] for event in ITEMS if event["type"].endswith("done")]
END: Event = {"type": "response.completed", "response": {"status": "completed", "output": OUTPUT}}
CALL = OUTPUT[2]


def response_faults(events: list[Event], end: Event = END) -> list[str]:
    client = ResponsesReader()
    for number, event in enumerate([{"type": "response.created"}, *events, end]):
        client.read({"sequence_number": number, **event})
    return differences(TRUTH, client.ended(), [])


def ended(**response: Any) -> Event:
    return {"type": "response.completed", "response": {**END["response"], **response}}


def test_a_response_is_the_same_by_deltas_by_items_and_at_its_end() -> None:
    assert response_faults(ITEMS) == []


def test_a_response_that_is_cut_short_ends_for_its_length() -> None:
    assert "finish reason" in response_faults(ITEMS, ended(status="incomplete"))


@pytest.mark.parametrize(
    ("events", "end", "fault"),
    [
        (changed(ITEMS, 9), END, "finished items differ"),
        (ITEMS[:-1], END, "finished items differ"),
        (
            changed(ITEMS, 11, {**ITEMS[11], "item": {**CALL, "arguments": "{}"}}),
            END,
            "finished items differ",
        ),
        (ITEMS, ended(output=OUTPUT[:2]), "final response differs"),
        (
            ITEMS,
            ended(output=[*OUTPUT[:2], {**CALL, "call_id": "2"}]),
            "final response differs",
        ),
        (changed(ITEMS, 8), END, "delta outside its item"),
        (changed(ITEMS, 9, {**ITEMS[9], "item_id": "other"}), END, "delta outside its item"),
        (changed(ITEMS, 8, {**ITEMS[8], "output_index": 5}), END, "items out of order"),
        (ITEMS, ended(status="failed"), "finish reason"),
        (ITEMS, {"type": "response.other"}, "finish reason"),
        (changed(ITEMS, 0, {**ITEMS[0], "sequence_number": 7}), END, "events are not counted"),
    ],
)
def test_what_a_client_of_responses_cannot_use_is_a_fault(
    events: list[Event], end: Event, fault: str
) -> None:
    assert fault in response_faults(events, end)
