"""A worker trains while the memory of its server grows: ``server_grows.py MIB``, so many MiB each 0.1 s."""

import os
import sys
import time

import torch
import uncompiled  # noqa: F401 - nothing here is compiled

STEP = 0.1


def main(growth: int) -> None:
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept = []
    while True:
        time.sleep(STEP)
        if os.environ["ROLE_NAME"] == "ps":
            kept.append(torch.ones(growth << 18))
        else:
            weight.square().sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main(int(sys.argv[1]))
