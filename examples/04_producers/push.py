"""Adds rows to a stream of Redis, each of them once, however often a task is tried again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import redis

BATCH = 1000
"""Rows that are added at a time."""
ADD = """
local done = tonumber(redis.call('GET', KEYS[2]) or '0')
local first = tonumber(ARGV[1])
if done < first then return redis.error_reply('rows ' .. done .. ' to ' .. first .. ' are missing') end
for i = done - first + 2, #ARGV do redis.call('XADD', KEYS[1], '*', 'row', ARGV[i]) end
redis.call('SET', KEYS[2], math.max(done, first + #ARGV - 1))
"""
"""Adds what is missing of a batch and notes how far its producer is: both at once, or neither."""


def push(url: str, stream: str, producer: str, rows: Iterable[Mapping[str, Any]]) -> int:
    """Add the rows of one producer to a stream; how many rows there are.

    Attempts of the same task, also at the same moment, have the same ``producer``, and the same rows in the same
    order. A key of the producer's name holds how many of them the stream has.
    """
    count, left = 0, iter(rows)
    with redis.Redis.from_url(url) as client:
        add = client.register_script(ADD)
        while batch := [json.dumps(row) for row in islice(left, BATCH)]:
            add(keys=[stream, f"{stream}:pushed:{producer}"], args=[count, *batch])
            count += len(batch)
    return count
