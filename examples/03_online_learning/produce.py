"""Send clicks to a Redis stream, as a shop would: what was seen, and whether it was clicked.

    python examples/03_online_learning/produce.py redis://localhost:6379/0?stream=clicks --messages 20000

What makes people click changes once, in the middle: a model that stops learning is wrong from then on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from urllib.parse import parse_qs, urlsplit

import redis

FEATURES = 8
TASTE = [2.0, -1.5, 1.0, 0.5, -2.0, 1.5, -0.5, 1.0]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("url", help="as for the training: redis://host:port/0?stream=NAME")
    add("--messages", type=int, default=20_000)
    add("--rate", type=float, default=2_000.0, help="messages a second")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def click(number: int, messages: int, rng: random.Random) -> str:
    """One message. From the middle on people like the opposite."""
    seen = [rng.gauss(0, 1) for _ in range(FEATURES)]
    liking = sum(weight * feature for weight, feature in zip(TASTE, seen, strict=True))
    if number >= messages // 2:
        liking = -liking
    clicked = rng.random() < 1 / (1 + math.exp(-liking))
    return json.dumps({"seen": [round(feature, 4) for feature in seen], "clicked": int(clicked)})


def main() -> None:
    args = parse_args()
    (stream,) = parse_qs(urlsplit(args.url).query)["stream"]
    client = redis.Redis.from_url(args.url.partition("?")[0])
    rng = random.Random(args.seed)
    chunk = max(1, int(args.rate / 20))
    for first in range(0, args.messages, chunk):
        with client.pipeline() as pipe:
            for number in range(first, min(first + chunk, args.messages)):
                pipe.xadd(stream, {"click": click(number, args.messages, rng)})
            pipe.execute()
        time.sleep(chunk / args.rate)
    print(f"sent {args.messages} messages to {stream}")


if __name__ == "__main__":
    main()
