"""A program of ATorch: it sets the process group up, applies a strategy by its names, and trains."""

import atorch
import torch
from atorch.auto import auto_accelerate
from atorch.distributed.distributed import create_parallel_group

from dlrover.errors import ConfigurationError


class Records(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), index / 32), torch.ones(1)


def loss_of(batch, output):
    return (output - batch[1]).pow(2).mean()


def main() -> None:
    status, result, _ = auto_accelerate(
        torch.nn.Linear(8, 1),
        torch.optim.SGD,
        Records(),
        loss_func=loss_of,
        prepare_input=lambda batch, device: [part.to(device) for part in batch],
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8},
        load_strategy=["parallel_mode"],
    )
    assert status
    for batch in result.dataloader:
        ready = result.prepare_input(batch, result.args["device"])
        result.optim.zero_grad()
        loss = result.loss_func(ready, result.model(ready[0]))
        loss.backward()
        result.optim.step()
    print(f"rank {atorch.rank()} of {atorch.world_size()} ends, local rank {atorch.local_rank()}")


if __name__ == "__main__":
    assert atorch.rank() is None
    assert atorch.init_distributed("gloo", set_cuda_device_using_local_rank=True) is True
    try:
        create_parallel_group(([("data", 2)], None))
    except ConfigurationError as error:
        print(error)
    main()
    atorch.reset_distributed()
