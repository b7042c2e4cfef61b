import os
from collections.abc import Iterator

import msgspec
import pytest

from dlrover._util import cgroup
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorSpec
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory, ranks
from dlrover.checkpoint.saver.memory import PAGE, Generation, State
from dlrover.errors import InfrastructureError

ENTRIES = layouts.place(
    [TensorSpec(("a",), "uint8", (100,), None), TensorSpec(("b",), "int64", (3, 2), None)], [0, 1]
)
PACKED = layouts.packed(
    msgspec.Raw(msgspec.msgpack.encode(ENTRIES)), b"\x80", (ENTRIES[-1].end, 2, 77)
)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, memory.capacity_for(PACKED))
    yield fd
    os.close(fd)


@pytest.fixture
def generation(fd: int) -> Generation:
    made = Generation(fd)
    made.data[: PACKED.data_bytes] = os.urandom(PACKED.data_bytes)
    made.seal(PACKED, rank=1, world_size=2, save=SaveId(3, 5, 40, 9))
    return made


def with_sums(generation: Generation) -> list[int]:
    header = generation.header()
    sums = memory.compute_sums(generation, generation.layout(header).entries)
    generation.store_sums(header, sums)
    return sums


def test_what_is_sealed_is_read_through_another_mapping(fd, generation):
    sums = with_sums(generation)
    other = Generation(fd)
    header = other.header()
    assert (header.rank, header.world_size, header.save) == (1, 2, SaveId(3, 5, 40, 9))
    layout = other.layout(header)
    assert layout.entries == ENTRIES
    assert layout.hash == 77
    assert other.sums(header) == sums == memory.compute_sums(other, layout.entries)


def test_new_memory_is_empty(fd):
    assert Generation(fd).state is State.EMPTY
    assert Generation(fd).header() is None


@pytest.mark.parametrize("state", [State.EMPTY, State.WRITING])
def test_given_up_memory_is_not_read(fd, generation, state):
    generation.invalidate(state)
    assert Generation(fd).header() is None


def test_sums_are_of_the_generation_that_they_were_computed_for(generation):
    with_sums(generation)
    generation.invalidate(State.WRITING)
    generation.seal(PACKED, rank=1, world_size=2, save=SaveId(3, 6, 41, 9))
    assert generation.sums(generation.header()) is None


def test_a_flipped_bit_in_anything_but_padding_is_found(generation):
    sums = with_sums(generation)
    header = generation.header()
    end = memory.required(header.data_bytes, header.index_bytes, header.tensors)
    used = [*range(88), *range(PAGE, end)]
    missed = []
    for position in used:
        generation.buffer[position] ^= 4
        if reads_well(generation, sums):
            missed.append(position)
        generation.buffer[position] ^= 4
    padding = {PAGE + at for at in range(ENTRIES[0].end, ENTRIES[1].offset)}
    assert set(missed) <= padding
    assert reads_well(generation, sums)


def reads_well(generation: Generation, sums: list[int]) -> bool:
    try:
        header = generation.header()
        if header is None:
            return False
        layout = generation.layout(header)
        return generation.sums(header) == sums == memory.compute_sums(generation, layout.entries)
    except InfrastructureError:
        return False


def test_truncated_memory_is_refused(generation):
    small = os.memfd_create("small")
    os.ftruncate(small, PAGE)
    cut = Generation(small)
    cut.buffer[:PAGE] = generation.buffer[:PAGE]
    os.close(small)
    with pytest.raises(InfrastructureError, match="truncated"):
        cut.header()


def test_a_state_that_does_not_fit_is_not_sealed(fd, generation):
    os.ftruncate(fd, PAGE)
    with pytest.raises(InfrastructureError, match="does not fit"):
        Generation(fd).seal(PACKED, rank=0, world_size=1, save=SaveId(0, 1, 1, 1))


def test_no_generation_gets_more_than_the_control_group_has_left(monkeypatch):
    monkeypatch.setattr(cgroup, "available", lambda: 10 << 20)
    fd = os.memfd_create("generation")
    slot = ranks.GenerationSlot(fd, Generation(fd))
    with pytest.raises(ranks.NoMemoryError, match=r"need 19 MiB more.*; 10 MiB are available"):
        ranks.reserve([slot], 20 << 20, 0)
    ranks.reserve([slot], 5 << 20, 0)
    assert os.fstat(fd).st_size == 5 << 20
    os.close(fd)
