"""What a rank of an unchanged program does on its way to the others' place, and when it cannot come there."""

import weakref

import pytest

from dlrover.errors import InfrastructureError

torch = pytest.importorskip("torch")

from dlrover.training.replicas.healing import Healer  # noqa: E402
from dlrover.training.replicas.sharded import ShardedModels  # noqa: E402

pytestmark = [pytest.mark.torch]


def test_models_that_were_dropped_change_no_others_place():
    def models(*, dropped: bool) -> ShardedModels:
        found = ShardedModels(lambda: None)
        found.kept = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        found._modules = [weakref.ref(model) for model in found.kept]
        if dropped:
            del found.kept[0]
        return found

    one, other = models(dropped=True), models(dropped=False)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.kept[1].weight, one.kept[0].weight)
    one.load_state_dict(models(dropped=False).state_dict())


def test_a_state_of_other_parts_is_not_taken():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InfrastructureError, match="model 1, and that of the others model 1, opt"):
        Healer({"model 1": model})._load({"model 1": model.state_dict(), "optimizer 2": {}})
