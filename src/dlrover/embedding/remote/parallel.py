"""Calls in threads at once, which end with their caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(
    items: Iterable[Item], call: Callable[[Item], Result], stop: Callable[[], None]
) -> list[Result]:
    """Call a function for each item in a thread of its own; return the results in the order of the items.

    Also works in a thread that Python waits for at the end of the process, where no `concurrent.futures` begin any more.

    Args:
        items: What to call the function for.
        call: The function.
        stop: Lets all calls end soon; called where this one is interrupted, for example by Ctrl-C.

    Raises:
        Exception: What the first item's call has raised that has raised anything.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(number: int, item: Item) -> None:
        try:
            results[number] = call(item)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            errors[number] = error

    threads: list[threading.Thread] = []
    try:
        for number, item in enumerate(items):
            threads.append(threading.Thread(target=run, args=(number, item), name="for-each"))
            threads[-1].start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop()
        raise
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in sorted(results)]
