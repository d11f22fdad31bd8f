"""What the parts work with: the server, the plan, and progress while many requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.core import log
from pipeline.core.foreign_json import value_at
from pipeline.serving.quality.model import QualityPlan
from pipeline.serving.smoke.client import ChatClient, Gone, NotOffered, Unsound

Item = TypeVar("Item")
Done = TypeVar("Done")


@dataclass
class QualitySession:
    """One server while it is asked."""

    client: ChatClient
    plan: QualityPlan
    model: str = ""

    async def find_model(self) -> None:
        """The model to ask for: the one that the plan names, else the server's first."""
        if self.plan.model:
            self.model = self.plan.model
            return
        _, value = await self.client.get("/v1/models")
        name = value_at(value, "data", 0, "id")
        if not isinstance(name, str) or not name:
            raise Unsound("/v1/models names no model")
        self.model = name

    async def each(
        self,
        items: Sequence[Item],
        ask: Callable[[Item], Awaitable[Done]],
        what: str = "request",
        at_once: int | None = None,
    ) -> list[Done]:
        """Ask for every item, so many at the same time; a server that is gone ends it."""
        places, results = asyncio.Semaphore(at_once or self.plan.at_once), list[Any]()
        with log.counting(len(items), what) as bar:

            async def one(item: Item) -> Done:
                async with places:
                    done = await ask(item)
                bar.advance(1)
                return done

            tasks = [asyncio.ensure_future(one(item)) for item in items]
            try:
                results = await asyncio.gather(*tasks)
            except (Gone, NotOffered):
                # the others would only wait, each for its own time limit
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        return results
