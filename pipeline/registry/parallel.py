"""Several transfers at once; the first that fails, or Ctrl-C, ends them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from pipeline.errors import Interrupted
from pipeline.registry.client import Client

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(
    client: Client, jobs: int, items: Iterable[Item], work: Callable[[Item], Result]
) -> list[Result]:
    """The results in the order of the items."""
    listed = list(items)
    if len(listed) <= 1 or jobs <= 1:
        return [work(item) for item in listed]
    with ThreadPoolExecutor(min(jobs, len(listed))) as pool:
        futures = [pool.submit(work, item) for item in listed]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [e for e in (f.exception() for f in done) if e is not None]
            # those that end because others did say only that they were stopped
            for error in sorted(errors, key=lambda e: isinstance(e, Interrupted)):
                raise error
            return [f.result() for f in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            client.hang_up()
            raise
