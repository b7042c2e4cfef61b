"""Functions on raw memory: the compiled library, with each set of instructions, and its twin give the same results."""

import mmap
import random
import signal
import threading

import pytest

pytest.importorskip("xxhash")
import numpy as np
import xxhash

from dlrover._native import library, twin
from dlrover._native.kernels import Kernels, kernels

MAP_NORESERVE = 0x4000


@pytest.fixture
def run(implementation: library.Loaded) -> Kernels:
    return Kernels(implementation)


class Memory:
    """A buffer with random bytes, of which pieces are taken."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.bytes = np.frombuffer(bytearray(random.Random(seed).randbytes(size)), np.uint8)
        self.start = self.bytes.ctypes.data

    def at(self, offsets: "list[int]") -> np.ndarray:
        return np.array(offsets, np.uint64) + np.uint64(self.start)


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def packed(sizes: "list[int]", seed: int) -> "tuple[list[int], int]":
    """Offsets of pieces that do not overlap, at any alignment, and their end."""
    chance, offsets, end = random.Random(seed), [], 0
    for size in sizes:
        offsets.append(end + chance.randrange(80) * (chance.random() < 0.7))
        end = offsets[-1] + size
    return offsets, end


def check(run: Kernels, sizes: "list[int]", threads: int, *, aligned: bool = False) -> None:
    """Copy, hash and compare random pieces of these sizes, which lie in other orders in the two memories."""
    if aligned:
        sizes = [-(-size // 64) * 64 for size in sizes]
    offsets, end = packed(sizes, 1)
    source = Memory(end + 64, seed=2)
    order = random.Random(3).sample(range(len(sizes)), len(sizes))
    elsewhere, end = packed([sizes[i] for i in order], 4)
    if aligned:
        elsewhere = np.cumsum([0, *(sizes[i] for i in order)])[:-1].tolist()
    destination = Memory(end + 128, seed=5)
    shift = -destination.start % 64 if aligned else 0
    to = [0] * len(sizes)
    for place, i in zip(elsewhere, order, strict=True):
        to[i] = place + shift
    lists = source.at(offsets), destination.at(to), np.array(sizes, np.uint64)
    wanted = destination.bytes.copy()
    for start, place, size in zip(offsets, to, sizes, strict=True):
        wanted[place : place + size] = source.bytes[start : start + size]
    hashes = [
        xxhash.xxh3_64_intdigest(source.bytes[start : start + size])
        for start, size in zip(offsets, sizes, strict=True)
    ]
    before = destination.bytes.copy()

    assert run.hash(lists[0], lists[2], threads).tolist() == hashes
    assert np.array_equal(destination.bytes, before)
    run.copy(*lists, threads)
    assert np.array_equal(destination.bytes, wanted)
    destination.bytes[:] = before
    assert run.copy_hash(*lists, threads).tolist() == hashes
    assert np.array_equal(destination.bytes, wanted)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_length_that_the_algorithm_treats_apart(run: Kernels, threads: int) -> None:
    check(run, list(range(1101)), threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_pieces_between_small_ones(run: Kernels, threads: int) -> None:
    chance = random.Random(7)
    around = [65536 * k + d for k in (1, 2, 17) for d in (-1, 0, 1, 63, 64, 65, 1023, 1024)]
    sizes = around + [chance.randrange(1101, 400_000) for _ in range(20)] + [0, 5, 3_300_001]
    chance.shuffle(sizes)
    check(run, sizes, threads)


@pytest.mark.parametrize("aligned", [False, True])
def test_enough_to_write_past_the_cache(run: Kernels, aligned: bool) -> None:
    check(run, [300, 9_000_001, 0, 4095, 4096, 4097, 240, 8_000_063], 2, aligned=aligned)


def test_nothing(run: Kernels) -> None:
    none = words()
    run.copy(none, none, none)
    assert run.hash(none, none).tolist() == run.copy_hash(none, none, none).tolist() == []


def test_an_empty_piece_may_have_no_address(run: Kernels) -> None:
    null, memory = words(0, 0), Memory(8)
    empty = xxhash.xxh3_64_intdigest(b"")
    run.copy(null, null, null)
    assert run.hash(null, null).tolist() == [empty, empty]
    assert run.copy_hash(null, memory.at([0, 8]), null).tolist() == [empty, empty]


@pytest.mark.parametrize("size", [0, 1, 17, 200, 5000, 2_500_000])
@pytest.mark.parametrize("distance", [-4097, -64, -1, 0, 1, 7, 64, 1000])
def test_a_piece_that_overlaps_itself_is_moved(run: Kernels, size: int, distance: int) -> None:
    for function in (run.copy, run.copy_hash):
        memory = Memory(size + 10_000, seed=size)
        wanted = memory.bytes.copy()
        moved = wanted[5000 : 5000 + size].copy()
        wanted[5000 + distance : 5000 + distance + size] = moved
        hashes = function(memory.at([5000]), memory.at([5000 + distance]), words(size), 2)
        assert np.array_equal(memory.bytes, wanted)
        if hashes is not None:
            assert hashes.tolist() == [xxhash.xxh3_64_intdigest(moved)]


def test_not_a_number_stays_the_same_not_a_number(run: Kernels) -> None:
    patterns = np.array([0x7FF0000000000001, 0xFFF8DEADBEEF0001, 0x7FFFFFFFFFFFFFFF], np.uint64)
    source = np.tile(patterns.view(np.float64), 1000)
    destination = np.zeros_like(source)
    lists = words(source.ctypes.data), words(destination.ctypes.data), words(source.nbytes)
    run.copy(*lists)
    assert destination.tobytes() == source.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["twin", "native"])
def test_more_than_4_gib(name: str) -> None:
    run = kernels("off") if name == "twin" else kernels("auto")
    if name == "native" and not run.native:
        pytest.skip(run.reason)
    size = (4 << 30) + 4321
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # all of it reads as one page of zeros
        start = np.frombuffer(memory, np.uint8).ctypes.data
        digest = xxhash.xxh3_64()
        for _ in range(4):
            digest.update(bytes(1 << 30))
        digest.update(bytes(4321))
        assert run.hash(words(start), words(size)).tolist() == [digest.intdigest()]


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_copy_of_more_than_4_gib() -> None:
    run, size = kernels("auto"), (4 << 30) + 4321
    source, destination = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    source[:: 1 << 20] = 7
    lists = words(source.ctypes.data), words(destination.ctypes.data), words(size)
    run.copy(*lists, 2)
    assert np.array_equal(source, destination)
    destination[:: 1 << 12] = 9
    assert run.copy_hash(*lists).tolist() == run.hash(lists[0], lists[2]).tolist()
    assert np.array_equal(source, destination)


GOOD = words(16, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], GOOD, GOOD), "source must be a numpy array of uint64; it is list."),
        (
            (GOOD.astype(np.int64), GOOD, GOOD),
            "source must be a numpy array of uint64; it is one of int64.",
        ),
        (
            (GOOD, GOOD.astype(">u8"), GOOD),
            "destination must be a numpy array of uint64; it is one of >u8.",
        ),
        (
            (GOOD, GOOD, GOOD.reshape(1, 2)),
            "sizes must be a contiguous array of one dimension.",
        ),
        ((GOOD, words(1, 2, 3, 4)[::2], GOOD), "destination must be a contiguous array of one"),
        ((GOOD, words(1, 2, 3), GOOD), "destination has 3 entries and sizes has 2."),
        (
            (GOOD, words(8, 0), GOOD),
            "destination has the address 0 for piece 1, which is not empty",
        ),
        ((GOOD, GOOD, words(0, 0), 0), "threads is 0; it must be 1 or more."),
    ],
)
def test_other_arguments_are_refused(arguments: tuple, message: str) -> None:
    for choice in ("auto", "off"):
        for function in (kernels(choice).copy, kernels(choice).copy_hash):
            with pytest.raises(ValueError, match=message.replace(".", r"\.")):
                function(*arguments)


def test_the_twin_copies_large_pieces_in_parts(monkeypatch):
    monkeypatch.setattr(twin, "CHUNK", 64)
    memory = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    pieces = [
        (0, 4096, 500),
        (1000, 1020, 300),
        (2020, 2000, 300),
        (3000, 5000, 64),
        (3000, 5100, 0),
    ]
    expected = memory.copy()
    for start, end, size in pieces:
        expected[end : end + size] = memory[start : start + size]
    base = np.uint64(memory.ctypes.data)
    source, destination, sizes = np.array(pieces, np.uint64).T.copy()
    hashes = np.empty(len(pieces), np.uint64)
    twin.copy_hash(len(pieces), source + base, destination + base, sizes, hashes, 2)
    assert np.array_equal(memory, expected)
    assert hashes.tolist() == [
        xxhash.xxh3_64_intdigest(expected[end : end + size]) for _, end, size in pieces
    ]


@pytest.mark.parametrize("size", [7, 100, 200, 301, 1030, 5003])
def test_a_hash_is_that_of_what_was_written(run: Kernels, size: int) -> None:
    """Another process may write to the source meanwhile; a copy whose hash differs would be unreadable."""
    count = 20_000_000 // (size + 1000)
    source, target = Memory(size), Memory(size * count)
    fillings = np.frombuffer(bytearray(b"\0" * size + b"\xff" * size), np.uint8)
    one, other = (fillings.ctypes.data + np.uint64(n * size) for n in range(2))
    sizes = np.full(count, size, np.uint64)
    ended = threading.Event()

    def write() -> None:
        lists = np.tile(words(one, other), 5000), np.full(10_000, source.start, np.uint64)
        while not ended.is_set():
            run.copy(*lists, np.full(10_000, size, np.uint64))

    writer = threading.Thread(target=write)
    writer.start()
    targets = target.at(list(range(0, size * count, size)))
    mixed = 0
    try:
        while mixed < 5:  # times that the writer has written meanwhile
            found = run.copy_hash(np.full(count, source.start, np.uint64), targets, sizes)
            assert np.array_equal(found, run.hash(targets, sizes))
            mixed += len(np.unique(found)) > 1
    finally:
        ended.set()
        writer.join()


def test_ctrl_c_stays_what_it_is(run: Kernels) -> None:
    """Not an error that programs take for an ordinary one."""
    source, target = Memory(8), Memory(8)
    lists = words(source.start), words(target.start), words(8)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(100):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes at any time
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + number * 1e-6)
                while True:
                    run.copy(*lists)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
