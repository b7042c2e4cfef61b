"""The training of ``replicas.py`` in one process: prints the loss of as many steps as standard input says."""

import sys

import torch
import uncompiled  # noqa: F401 - nothing here is compiled

torch.manual_seed(1)
torch.set_num_threads(1)
data, classes = torch.randn(4096, 16), torch.randint(0, 4, (4096,))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
for step in range(int(sys.stdin.readline())):
    optimizer.zero_grad()
    total = 0.0
    for index in range(8):
        torch.manual_seed(hash((0, step, index)) & 0x7FFF_FFFF_FFFF_FFFF)
        first = 32 * step + 4 * index
        chosen = torch.arange(first, first + 4) % len(data)
        loss = torch.nn.functional.cross_entropy(model(data[chosen]), classes[chosen]) / 8
        loss.backward()
        total += loss.item()
    optimizer.step()
    scheduler.step()
    sys.stdout.write(f"{total:.12f}\n")
