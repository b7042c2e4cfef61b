"""What a rank of an unchanged program does on its way to the others' place, and when it cannot come there."""

import dataclasses
import functools
import os
import random
import types
import weakref
from collections.abc import Callable, Iterator

import pytest

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.launched import Given

torch = pytest.importorskip("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dlrover.training.replicas import engines, hooks  # noqa: E402
from dlrover.training.replicas.beside import Beside, Schedules, Unsaved  # noqa: E402
from dlrover.training.replicas.healing import Healer  # noqa: E402
from dlrover.training.replicas.sharded import ShardedModels  # noqa: E402
from dlrover.training.replicas.unchanged import BEGUN, REDUCTION, Unchanged  # noqa: E402

pytestmark = [pytest.mark.torch]


def returning(*, rank: int = 1, over: tuple[bool, ...] = (False,)) -> Unchanged:
    """A rank that was started again; ``over`` is what it learns of the others' end, the last one from then on."""
    news = list(over)
    link = types.SimpleNamespace(over=news[0], ask=lambda _request: None)
    link.wait = lambda _holds, _seconds: setattr(link, "over", news.pop(0) if news else over[-1])
    return Unchanged(link, Given(round=3, rank=rank, world_size=4, attempt=1), {})


def test_a_program_that_makes_its_process_group_anew_joins_once():
    """Before, each time cost 2 s and a membership, and a rank that did so alone waited for the others."""
    rank = Unchanged(types.SimpleNamespace(), Given(round=3, rank=1, world_size=4), {})
    joined = []
    rank._survivors = types.SimpleNamespace(number=-1, ranks=[0, 1], join=joined.append)
    rank.begin()
    rank._survivors.number = 0
    rank.begin()
    assert len(joined) == 1


def replayed(module: torch.nn.Module, *args: object, ended: object = lambda: None) -> object:
    run = functools.partial(module, *args)
    return returning().outputs.remembered(module, run, args, {}, [*module.parameters()], ended)


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    chosen: torch.Tensor


class Model(torch.nn.Linear):
    def forward(self, samples, pairs=False):
        logits = super().forward(samples)
        return (logits, logits) if pairs else Output(logits, logits.argmax(-1))


def test_an_output_that_is_remembered_can_be_used_as_that_of_a_pass():
    samples, model, ended = torch.ones(2, 3, requires_grad=True), Model(3, 4), []
    output = replayed(model, samples, ended=lambda: ended.append(True))
    output.logits.div_(2.0)
    output.logits.sum().backward()
    assert (ended, output.chosen.dtype) == ([True], torch.int64)
    for tensor in (samples, *model.parameters()):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_the_parameters_of_a_model_in_ddp_get_no_gradients_on_the_way():
    """DDP would take them for those of its next pass: it has hooks on its parameters."""
    model, samples = torch.nn.Linear(3, 4), torch.ones(2, 3, requires_grad=True)
    returning().outputs.remembered(model, lambda: model(samples), (samples,), {}).sum().backward()
    assert samples.grad is not None
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_the_backward_pass_comes_to_each_of_models_that_follow_each_other():
    first, second, ended = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1), []
    between = replayed(first, torch.ones(2, 3), ended=lambda: ended.append(first))
    replayed(second, between, ended=lambda: ended.append(second)).sum().backward()
    assert ended == [second, first]


def test_an_output_that_is_remembered_is_one_of_the_same_kind():
    rank, model, samples = returning(), Model(3, 4), torch.ones(2, 3)
    for pairs in (False, True, False):
        args = samples, pairs
        output = rank.outputs.remembered(model, functools.partial(model, *args), args, {})
        assert isinstance(output, tuple) is pairs


def test_each_mode_of_a_model_has_an_output_of_its_own():
    rank, samples, passes = returning(), torch.ones(2, 3), []
    model = torch.nn.Linear(3, 4)
    for mode in (True, False, True):
        rank.outputs.remembered(model.train(mode), lambda: passes.append(0), (samples,), {})
    assert len(passes) == 2


def test_a_model_that_learns_nothing_has_no_backward_pass():
    model = Model(3, 4).requires_grad_(False)
    assert not replayed(model, torch.ones(2, 3)).logits.requires_grad
    with torch.no_grad():
        assert not replayed(Model(3, 4), torch.ones(2, 3)).logits.requires_grad


def test_a_lightning_module_that_steps_within_its_pass_lets_all_start_again():
    class Redirection:
        def __call__(self, _wrapper: object, _of: object, name: str) -> str:
            return name

    rank = types.SimpleNamespace(replaying=False)
    engines._watch_redirection(lambda: rank, types.SimpleNamespace(_ForwardRedirection=Redirection))
    manual = types.SimpleNamespace(automatic_optimization=False)
    assert Redirection()(None, manual, "training_step") == "training_step"
    rank.replaying = True
    with pytest.raises(InfrastructureError, match=r"manual optimization .* all ranks start again"):
        Redirection()(None, manual, "training_step")


@pytest.mark.parametrize("others", [0, 5, BEGUN + 1])
def test_a_rank_joins_others_at_the_beginning_of_their_step_only(others):
    """Others that are within a step go on without it, until it asks again."""
    rank, left = returning(), []
    rank._survivors.position = 7 * REDUCTION + others
    rank._survivors.withdraw = lambda: left.append(others)
    rank._ask = lambda: setattr(rank._survivors, "position", 7 * REDUCTION + BEGUN)
    rank._arrive()  # it has to come to their place yet
    assert left == [others]
    assert rank.replaying


def test_the_others_are_at_another_place_once_their_step_has_begun():
    """A loss within it lets them meet a rank that joins, with gradients that are not those of its beginning."""
    rank, places = returning(), []
    rank.replaying = False
    rank._survivors = types.SimpleNamespace(number=0, ranks=[0])
    rank._survivors.edge = lambda _began: places.append(rank._survivors.position)
    rank._survivors.run = lambda _operation, _began: places.append(rank._survivors.position)
    rank.passes(None)
    rank.collective(None, [])
    assert places == [BEGUN, BEGUN + 1]
    rank._reductions, rank._others, rank.replaying = 0, 0, True
    rank._survivors.position, rank._survivors.settle = BEGUN, lambda _began: True
    rank._arrive()
    assert rank._position == places[-1]


def test_a_rank_is_not_at_the_others_place_with_fewer_steps():
    rank = returning()
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2)]
    for optimizer in (*optimizers, *optimizers):
        rank.stepped(type(optimizer).step, optimizer, None)
    assert rank.steps == 2  # of the first one
    numbers = rank._parts["numbers"]
    with pytest.raises(InfrastructureError, match=r"at step 2 of its program, .* at step 3"):
        numbers.load_state_dict({"steps": 3, "place": 3})
    numbers.load_state_dict({"steps": 1, "place": 1})
    assert numbers.state_dict()["place"] == 1


def test_the_ranks_of_a_row_decide_alike_whether_the_others_are_to_wait_for_them():
    ranks, steps = [returning(), returning()], (20, 15)
    asked = [(30, -made, False) for made in steps]
    for rank, made in zip(ranks, steps, strict=True):
        rank.steps = made
        rank.row = types.SimpleNamespace(most=lambda *_: [max(x) for x in zip(*asked, strict=True)])
    assert [rank._furthest() for rank in ranks] == 2 * [(30, 15)]


@pytest.mark.parametrize(("pace", "most"), [(0.1, 1), (0.5, 2), (0.7, 3), (0.95, 950), (2.0, 2000)])
def test_the_others_wait_for_the_last_steps_only_unless_a_rank_hardly_comes_nearer(pace, most):
    """``pace`` is how many steps the others make while a rank makes one of its way."""
    rank, others = returning(), 1000
    rank._ask = rank._arrive = lambda: None
    rank._furthest = lambda: (others, others - rank.steps)
    ways = 0
    rank._edge()
    while not rank._asked:
        ways += 1
        others += int(pace * (rank._aim - rank.steps))
        rank.steps = rank._aim
        rank._edge()
    assert others - rank.steps <= most
    assert ways <= 25  # 1000 * 0.75 ** 25 < 1


@pytest.fixture
def edges() -> tuple[Unchanged, list[int]]:
    """A rank on its way, and the numbers of reductions at its edges."""
    rank, found = returning(), []
    rank._edge = lambda: found.append(rank._reductions)
    return rank, found


class Ddp(torch.nn.Module):
    """What a rank on its way uses of a model in `DistributedDataParallel`."""

    def __init__(self, module: torch.nn.Module, *, syncs: bool = True) -> None:
        super().__init__()
        self.module, self.require_backward_grad_sync = module, syncs


def test_a_model_that_trains_in_eval_mode_has_edges_too(edges):
    rank, found = edges
    model, samples = Ddp(torch.nn.Linear(3, 1).eval()), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    for _step in range(3):
        with torch.no_grad():
            rank.forward(model, None, (samples,), {})
        rank.forward(model, None, (samples,), {}).sum().backward()
        rank.stepped(type(optimizer).step, optimizer, None)
    assert found == [0, 1, 2]


def test_a_reduction_is_counted_for_each_backward_pass_of_a_model(edges):
    rank, _ = edges
    one, other = Ddp(torch.nn.Linear(3, 3)), Ddp(torch.nn.Linear(3, 1))
    alone, frozen = Ddp(torch.nn.Linear(3, 1), syncs=False), Ddp(torch.nn.Linear(3, 1))
    frozen.requires_grad_(False)

    def run(model: Ddp, samples: torch.Tensor) -> torch.Tensor:
        return rank.forward(model, None, (samples,), {})

    samples = torch.ones(2, 3, requires_grad=True)
    (run(one, samples).sum() + run(one, samples).sum()).backward()  # as with two views of a picture
    assert rank._reductions == 1
    run(other, run(one, samples)).sum().backward()
    assert rank._reductions == 3
    torch.autograd.grad(run(other, samples).sum(), samples)  # DDP reduces nothing then
    (run(alone, samples) + run(frozen, samples)).sum().backward()
    assert rank._reductions == 3


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("seed", range(20))
def test_reductions_are_counted_where_ddp_makes_them(edges, alone, seed):
    """Passes under no_sync, passes that have no backward pass, and backward passes in another order."""
    rank, _ = edges
    made: list[None] = []

    def reduce(_state, bucket):  # torch refuses other annotations than its own
        made.append(None)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    real = DistributedDataParallel(torch.nn.Linear(3, 1))
    real.register_comm_hook(None, reduce)
    fake, samples = Ddp(torch.nn.Linear(3, 1)), torch.ones(2, 3)
    chance = random.Random(seed)
    for _step in range(12):
        plan = [(chance.random() < 0.5, chance.random() < 0.7) for _ in range(chance.randint(1, 3))]
        backwards = chance.random() < 0.3
        for model in (real, fake):
            outputs = []
            for syncs, comes_back in plan:
                model.require_backward_grad_sync = syncs
                output = (
                    model(samples) if model is real else rank.forward(fake, None, (samples,), {})
                )
                outputs += [output] if comes_back else []
            for output in reversed(outputs) if backwards else outputs:
                output.sum().backward()
        assert rank._reductions == len(made)


def test_a_rank_that_returns_sends_buffers_in_the_passes_in_which_the_others_do(edges, alone):
    """Before, one that joined after an evaluation without gradients did so alone, and the others added up gradients."""
    rank, _ = edges
    trains, replays = (DistributedDataParallel(torch.nn.BatchNorm1d(3)) for _ in range(2))
    chance, samples = random.Random(0), torch.ones(2, 3)
    found = set()
    for _pass in range(20):
        gradients, syncs = chance.random() < 0.7, chance.random() < 0.5
        trains.require_backward_grad_sync = replays.require_backward_grad_sync = syncs
        with torch.set_grad_enabled(gradients):
            trains(samples)
            rank.forward(replays, None, (samples,), {})
        assert trains.will_sync_module_buffers() == replays.will_sync_module_buffers()
        found.add(trains.will_sync_module_buffers())
    assert found == {True, False}


def test_a_rank_joins_where_no_pass_waits_for_its_backward_pass(edges):
    rank, found = edges
    maker, critic = Ddp(torch.nn.Linear(3, 3)), Ddp(torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(model.parameters()) for model in (critic, maker)]
    for _step in range(2):
        made = rank.forward(maker, None, (torch.ones(2, 3),), {})
        rank.forward(critic, None, (made.detach(),), {}).sum().backward()
        rank.stepped(type(optimizers[0]).step, optimizers[0], None)
        rank.replaying = False
        assert rank.place() == (0, 0, 0)  # nobody can go on from a save there
        rank.replaying = True
        rank.forward(critic, None, (made,), {}).sum().backward()
        rank.stepped(type(optimizers[1]).step, optimizers[1], None)
    assert found == [0, 3]


def test_a_program_in_which_no_lost_rank_can_return_is_told_so(edges, caplog):
    rank, found = edges
    model, other = Ddp(torch.nn.Linear(3, 1)), Ddp(torch.nn.Linear(3, 1))
    rank.passes(other)
    optimizer = torch.optim.SGD(model.parameters())

    def steps() -> None:
        for _step in range(100):
            rank.stepped(type(optimizer).step, optimizer, None)
            rank.passes(model)
            rank.came_back([model])

    with pytest.raises(
        InfrastructureError, match=r"100 steps, so no lost rank can return; .*no_grad"
    ):
        steps()
    rank.replaying, rank._skipped = False, 0
    steps()
    assert "no lost rank can return" in caplog.text
    assert found == [0]


def test_a_program_whose_model_is_in_no_ddp_is_told_that_no_rank_can_return(edges, caplog):
    """A rank on its way lets all start again, but not before it is where the others are: a later part may have one."""
    rank, found = edges
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters())

    def steps() -> None:
        for _step in range(100):
            rank.stepped(type(optimizer).step, optimizer, None)

    rank._furthest = lambda: (150, 0)
    steps()
    with pytest.raises(InfrastructureError, match=r"No model in Distr.*; all ranks start again"):
        steps()
    rank.replaying, rank._skipped = False, 0
    steps()
    steps()
    assert caplog.text.count("no lost rank can return. Let one of them have the model") == 1
    assert not found


def trains() -> tuple[Unchanged, list[torch.optim.Optimizer]]:
    """A rank that trains with two optimizers, of a parameter each."""
    rank = returning()
    rank.replaying, rank._fresh = False, False
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) for _ in range(2)]
    for optimizer in optimizers:
        rank.owns("optimizer", optimizer)
    return rank, optimizers


def test_a_rank_takes_the_gradients_that_the_program_has_left():
    """Those of another optimizer, those that it has set to zero, and those that it keeps after a step."""
    (one, (zeros, keeps)), (other, _) = trains(), trains()
    none = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    one.owns("optimizer", none)
    other.owns("optimizer", torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    for optimizer in (zeros, keeps):
        optimizer.param_groups[0]["params"][0].grad = torch.full((2,), 7.0)
    one.passes(None)
    for optimizer in (zeros, keeps, none):
        one.stepped(type(optimizer).step, optimizer, None)
    zeros.zero_grad(set_to_none=False)
    other._trained()[2].grad = torch.zeros(2)  # as on its way
    other._parts["gradients"].load_state_dict(one._parts["gradients"].state_dict())
    found = [None if p.grad is None else p.grad.tolist() for p in other._trained()]
    assert found == [[0, 0], [7, 7], None]


def test_a_rank_takes_a_sparse_gradient_as_a_sparse_one():
    (one, (first, _)), (other, _) = trains(), trains()
    gradient = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (2,), check_invariants=True)
    first.param_groups[0]["params"][0].grad = gradient
    other._parts["gradients"].load_state_dict(one._parts["gradients"].state_dict())
    taken = other._trained()[0].grad
    assert (taken.is_sparse, taken.to_dense().tolist()) == (True, [0, 5])


def test_a_rank_takes_what_is_trained_and_counted_beside_models():
    def program(mean: float) -> tuple[Unchanged, torch.nn.Module, torch.nn.Module]:
        model, layer = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
        made: list[weakref.ref[torch.nn.Module]] = [weakref.ref(model), weakref.ref(layer)]
        link = types.SimpleNamespace(over=False, ask=lambda _request: None)
        rank = Unchanged(link, Given(round=3, rank=1, world_size=4, attempt=1), {}, made)
        rank.owns("model", model)
        rank.owns("optimizer", torch.optim.SGD([*model.parameters(), *layer.parameters()]))
        for one in (model, layer):
            torch.nn.init.constant_(one.weight, mean)
            one.running_mean.fill_(mean)
        return rank, model, layer

    one, _model, _layer = program(5.0)
    other, model, layer = program(3.0)
    other._parts["beside"].load_state_dict(one._parts["beside"].state_dict())
    assert (layer.running_mean.tolist(), layer.weight.tolist()) == ([5, 5], [5, 5])
    assert (model.running_mean.tolist(), model.weight.tolist()) == ([3, 3], [3, 3])


def test_layers_beside_models_are_taken_from_a_program_with_the_same_ones_only():
    def beside(*sizes: int) -> Beside:
        layers = [torch.nn.BatchNorm1d(size, affine=False) for size in sizes]
        return Beside(list, [lambda layer=layer: layer for layer in layers], set)

    one, without = beside(4), beside()
    for state in (beside(4, 4).state_dict(), beside(7, 4).state_dict()):
        with pytest.raises(InfrastructureError, match=r"has made 1 normalization layers, .* 2, so"):
            one.load_state_dict(state)
    # As where the first rank alone has a model for its metrics.
    without.load_state_dict(one.state_dict())
    one.load_state_dict(without.state_dict())


def test_a_rank_takes_the_numbers_of_schedules():
    """Its schedule has made a step more on its way, where the others' scaler has left one out."""

    def program(steps: int) -> tuple[Schedules, list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        falls = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        optimizer.step()
        for _step in range(steps):
            falls.step()
        dropped = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        made = [weakref.ref(dropped), weakref.ref(falls)]
        return Schedules(made), [falls] if steps else [falls, dropped]

    (one, (falls,)), (other, (later, dropped)) = program(6), program(0)
    other.load_state_dict(one.state_dict())
    assert (later.last_epoch, later.get_last_lr()) == (6, falls.get_last_lr())
    later.step()
    falls.step()
    assert later.get_last_lr() == falls.get_last_lr()
    assert dropped.last_epoch == 0


def test_a_step_that_calls_that_of_its_base_class_is_one():
    base = hooks._stepping(torch.optim.SGD.step)

    class Own(torch.optim.SGD):
        step = hooks._stepping(base)

    rank, _ = trains()
    optimizer = Own([torch.nn.Parameter(torch.ones(1))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "_running", [rank])
        optimizer.step()
        optimizer.step()
    assert rank.steps == 2


@pytest.mark.parametrize("calls", [1, 2])
def test_a_rank_does_not_return_to_an_optimizer_that_calls_its_closure_several_times(calls):
    trained, (optimizer, _) = trains()
    trained._began[0] = 1.0

    def step(_optimizer: object, closure: Callable[[], float]) -> float:
        return sum(closure() for _ in range(calls))

    assert trained.stepped(step, optimizer, lambda: 1.0) == calls
    rank = returning()
    found = types.SimpleNamespace(payloads={0: trained._began})
    rank._survivors.join = lambda _payload, *, later: found
    if calls == 1:
        rank._ask()
        return
    with pytest.raises(InfrastructureError, match="closure several times"):
        rank._ask()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_to_its_end_before_the_others_waits_for_theirs(rank):
    late = returning(rank=rank, over=(False, False, True))
    with pytest.raises(InfrastructureError if rank == 0 else SystemExit):
        late.finish()
    assert late._link.over


def test_the_end_of_a_process_that_the_program_has_forked_is_not_that_of_the_training(monkeypatch):
    ends: list[None] = []
    running = types.SimpleNamespace(finish=lambda: ends.append(None))
    monkeypatch.setattr(hooks, "_running", [running])
    hooks._finish(os.getpid() + 1)
    assert not ends
    hooks._finish(os.getpid())
    assert ends == [None]


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


def test_what_does_not_outlive_a_loss_is_refused_with_one_sentence(monkeypatch):
    refused = hooks._refused(lambda: "made", "an optimizer in parts")
    assert refused() == "made"
    monkeypatch.setattr(hooks, "_running", [returning()])
    with pytest.raises(ConfigurationError, match="an optimizer in parts cannot survive"):
        refused()


def test_a_state_of_other_parts_is_not_taken():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InfrastructureError, match="model 1, and that of the others model 1, opt"):
        Healer({"model 1": model})._load({"model 1": model.state_dict(), "optimizer 2": {}})


class Wire:
    """A connection of two ranks in one process: the first sends, then the other one takes."""

    def __init__(self) -> None:
        self.ranks = [0, 1]
        self._sent: list[torch.Tensor] = []

    def heal(self, one: Healer, other: Healer) -> None:
        self.send_all = lambda tensors, _source: self._sent.extend(t.clone() for t in tensors)
        self.give = lambda data, _source, _to: self._sent.append(data.clone())
        one.heal(self, 0, [1], 0)
        self.send_all = lambda tensors, _source: [t.copy_(self._sent.pop(0)) for t in tensors]
        self.give = lambda data, _source, _to: data.copy_(self._sent.pop(0))
        other.heal(self, 0, [1], 1)


def test_a_rank_takes_buffers_that_a_state_dict_leaves_out():
    def model(size: int) -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(1, 1))
        made[0].register_buffer("seen", torch.full((2,), float(size)), persistent=False)
        made[0].register_buffer("cache", torch.ones(size), persistent=False)
        made[0].register_buffer("none", None, persistent=False)
        return made

    one, other = model(5), model(3)
    kept = other[0].seen
    Wire().heal(*(Healer({"unsaved": Unsaved(lambda of=of: [of])}) for of in (one, other)))
    assert (kept.tolist(), other[0].cache.tolist(), other[0].none) == ([5, 5], [1] * 5, None)


class Momentum(torch.optim.SGD):
    """An optimizer with a state of 32 bits for parameters of 16, and a learning rate of NumPy."""

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.full((1,), 1 / 3)


def test_a_rank_takes_the_state_of_an_optimizer_exactly():
    """With the type that it has: torch's load_state_dict gives it that of the parameter."""
    numpy = pytest.importorskip("numpy")
    one, other = (Momentum([torch.nn.Parameter(torch.ones(1).bfloat16())]) for _ in range(2))
    one.step()
    one.param_groups[0]["lr"] = numpy.float32(0.1)
    Wire().heal(Healer({"optimizer": one}), Healer({"optimizer": other}))
    (taken,) = other.state.values()
    assert (taken["sum"].dtype, taken["sum"].item()) == (torch.float32, torch.tensor(1 / 3).item())
    rate = other.param_groups[0]["lr"]
    assert (type(rate), rate) == (numpy.float32, numpy.float32(0.1))


def test_a_state_that_cannot_be_sent_is_no_mistake_of_the_program():
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "of": object()}])
    with pytest.raises(
        InfrastructureError, match=r"param_groups\.0\.of is .*; all ranks start again"
    ):
        Wire().heal(Healer({"optimizer": optimizer}), Healer({"optimizer": optimizer}))
