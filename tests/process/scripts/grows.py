"""Training whose memory grows: ``grows.py OUT MIB STEPS``, so many MiB more with every step of 0.1 s.

It keeps nothing of what grew when it starts again, and resumes from its last step.
"""

import sys
import time
from pathlib import Path

import torch
import uncompiled  # noqa: F401 - nothing here is compiled

STEP = 0.1


def main(out: Path, growth: int, steps: int) -> None:
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    path = out / "step"
    step = int(path.read_text()) if path.exists() else 0
    with (out / "starts").open("a") as starts:
        starts.write(f"{step}\n")
    kept = []
    while step < steps:
        time.sleep(STEP)
        kept.append(torch.ones(growth << 18))
        (weight - step).square().sum().backward()
        optimizer.step()
        step += 1
        partial = out / "step.partial"
        partial.write_text(str(step))
        partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
