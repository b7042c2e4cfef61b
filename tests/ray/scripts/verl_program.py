"""A program of verl, as its users write them: ``verl_program.py FLOW DIR``. A file DIR/METHOD.RANK kills that rank in the
method, as often as its first number says, after as many calls as its second one."""

import json
import os
import sys
import time
from pathlib import Path

import ray
import torch
import torch.distributed
from verl import DataProto
from verl.protocol import DataProtoConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)


class Model(Worker):
    """Log-probabilities are inputs times weights, which the set-up makes 1 and an update adds to."""

    def __init__(self, directory):
        super().__init__()
        self.directory, self.weights = Path(directory), 0.0

    def perhaps_die(self, method):
        file = self.directory / f"{method}.{self.rank}"
        with open(self.directory / "calls", "a") as calls:
            calls.write(f"{method} {self.rank} {os.getpid()}\n")
        if file.exists():
            left, skipped = map(int, file.read_text().split())
            if skipped:
                file.write_text(f"{left} {skipped - 1}")
                return
            file.write_text(f"{left - 1} 0") if left > 1 else file.unlink()
            sys.stderr.write(f"the last words of rank {self.rank}\n")
            os.kill(os.getpid(), 9)
        if (self.directory / f"{method}.wait").exists():
            (self.directory / f"{method}.waits").touch()
            time.sleep(3600)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.perhaps_die("init_model")
        torch.distributed.init_process_group("gloo")
        self.weights = 1.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, factor):
        self.perhaps_die("set_loss_fn")
        self.weights *= factor[0]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data):
        self.perhaps_die("compute_log_prob")
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        data.batch["a"] = data.batch["a"] * self.weights * total / self.world_size
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, weights):
        self.perhaps_die("load_weights")
        self.weights = weights[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self):
        self.perhaps_die("update_actor")
        self.weights += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score(self):
        self.perhaps_die("score")
        return [self.rank, self.weights]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_values(self):
        raise RuntimeError("a fault of the program")


def pool(size=2):
    return RayResourcePool([size], use_gpu=False, max_colocate_count=1)


def plain(directory, group_class=RayWorkerGroup):
    cls = RayClassWithInitArgs(ray.remote(Model), directory)
    return group_class(pool(), cls, use_gpu=False)


def batch(rows=7):
    data = DataProto.from_dict({"a": torch.arange(rows, dtype=torch.float32)})
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    return data


def log_probs(group):
    return group.compute_log_prob(batch()).batch["a"].tolist()


def reference(directory, group_class=RayWorkerGroup):
    group = plain(directory, group_class)
    group.init_model()
    factor = [3.0]
    group.set_loss_fn(factor)
    factor[0] = 99.0  # a call that was made has its arguments
    return [log_probs(group) for _ in range(3)]


def actor(directory):
    group = plain(directory)
    group.init_model()
    group.update_actor()
    return [log_probs(group) for _ in range(2)]


def wide(directory):
    cls = RayClassWithInitArgs(ray.remote(Model), directory)
    RayWorkerGroup(RayResourcePool([2], use_gpu=False), cls, use_gpu=False)


def rollout(directory):
    group = plain(directory)
    group.init_model()
    results = []
    for weights in (2.0, 5.0):
        group.load_weights([weights])
        results.append(log_probs(group))
    return results


def own(directory):
    group = plain(directory)
    group.init_model()
    return [group.score() for _ in range(2)]


def handles(directory):
    group = plain(directory)
    group.init_model()
    ray.get([one.update_actor.remote() for one in group.workers])
    return [log_probs(group) for _ in range(2)]


def fault(directory):
    group = plain(directory)
    group.init_model()
    group.compute_values()


def futures(directory):
    group = plain(directory)
    group.init_model()
    references = group.execute_all_async("score")
    return ray.get(references)


def colocated(directory, create=create_colocated_worker_cls):
    cls = RayClassWithInitArgs(ray.remote(Model), directory)
    both = {"actor": cls, "ref": RayClassWithInitArgs(ray.remote(Second), directory)}
    groups = RayWorkerGroup(pool(), create(both), use_gpu=False).spawn(both.keys())
    groups["actor"].init_model()
    groups["actor"].load_weights([2.0])
    groups["ref"].load_weights([3.0])
    groups["ref"].set_loss_fn([4.0])
    return [
        [log_probs(groups["actor"]), groups["ref"].compute_log_prob(batch()).batch["a"].tolist()]
        for _ in range(2)
    ]


def fused(directory):
    return colocated(directory, create_colocated_worker_cls_fused)


class Second(Model):
    """The second model of the same processes, with their process group."""

    def __init__(self, directory):
        super().__init__(directory)
        self.weights = 1.0


def detached(directory):
    cls = RayClassWithInitArgs(ray.remote(Model), directory)
    made = RayWorkerGroup(pool(), cls, name_prefix="kept", detached=True, use_gpu=False)
    group = RayWorkerGroup.from_detached(worker_names=made.worker_names, ray_cls_with_init=cls)
    try:
        group.init_model()
        return [log_probs(group) for _ in range(2)]
    finally:
        for one in made.workers:
            ray.kill(one)


@ray.remote(num_cpus=0)
class TaskRunner:
    """verl's programs run their loop in such an actor."""

    def run(self, directory):
        import verl.single_controller.ray as of_this_process

        return reference(directory, of_this_process.RayWorkerGroup)


def in_actor(directory):
    return ray.get(TaskRunner.remote().run.remote(directory))


def main():
    flow, directory = sys.argv[1:]
    ray.init(
        runtime_env={
            "env_vars": {"TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": str(Path(__file__).parent)}
        }
    )
    results = globals()[flow](directory)
    Path(directory, "results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
