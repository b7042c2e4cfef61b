"""The training of ``hsdp.py`` in one process: prints which rows took part in each step of the log on standard input.

The log has the step, the sum of the weights and the norm of the gradients, of a training in 32 bits; this one has 64.
A step that is none of them is an error.
"""

import sys

import torch

torch.manual_seed(1)
torch.set_num_threads(1)
data, classes = torch.randn(4096, 16), torch.randint(0, 4, (4096,))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 31), torch.nn.Tanh(), torch.nn.BatchNorm1d(31, 1.0, affine=False), torch.nn.Linear(31, 4)
)  # fmt: skip
before = torch.nn.Linear(16, 16).double()
model, data = model.double(), data.double()
divided = list(model.parameters())
parameters = [*divided, *before.parameters()]
optimizer = torch.optim.AdamW(divided, lr=1e-2)
optimizer.add_param_group({"params": list(before.parameters()), "lr": 1e-5})
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    """Return what a rank adds to the gradients of a step."""
    optimizer.zero_grad()
    for part in range(2):
        first = (step * 2 + part) * 16 + rank * 4
        chosen = torch.arange(first, first + 4) % len(data)
        loss = torch.nn.functional.cross_entropy(model(before(data[chosen])) / 2, classes[chosen])
        (loss / 2).backward()
    return [p.grad.clone() for p in parameters]


for number, line in enumerate(sys.stdin):
    step, weights, norm = line.split()
    assert int(step) == number
    by_rank = [gradients(number, rank) for rank in range(4)]
    near = {}
    for rows in ((0, 1), (0,), (1,)):
        ranks = [rank for rank in range(4) if rank // 2 in rows]
        means = [torch.stack([by_rank[rank][i] for rank in ranks]).mean(0) for i in range(len(parameters))]  # fmt: skip
        total = float(torch.nn.utils.get_total_norm(means[: len(divided)]))
        near[abs(total - float(norm))] = rows, means
    rows, means = near[min(near)]
    if min(near) > 1e-4:
        sys.exit(f"step {number}: no rows have gradients of the norm {norm}")
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad = mean
    torch.nn.utils.clip_grad_norm_(divided, 1.0)
    optimizer.step()
    scheduler.step()
    own = sum(float(p.detach().abs().sum()) for p in parameters)
    assert abs(own - float(weights)) < 1e-2, f"step {number}: {own} for {weights}"
    sys.stdout.write("".join(map(str, rows)) + "\n")
