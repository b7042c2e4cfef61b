"""A worker asks two servers in each step; the first has eight times the work of the other, whatever the world."""

import os
import time

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled

WORK = (0.04, 0.005)
"""Seconds of a core that each server computes for a request."""


def work() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    asked = torch.ones(1)
    while True:
        for rank in range(1, dist.get_world_size()):
            dist.send(asked, rank)
        for rank in range(1, dist.get_world_size()):
            dist.recv(torch.empty(1), rank)
        weight.square().sum().backward()
        optimizer.step()


def serve(seconds: float) -> None:
    asked = torch.empty(1)
    while True:
        dist.recv(asked, 0)
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        dist.send(asked, 0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if os.environ["ROLE_NAME"] == "ps":
        serve(WORK[min(dist.get_rank(), len(WORK)) - 1])
    else:
        work()


if __name__ == "__main__":
    main()
