"""CPU binding: plans on made-up machines, the reading of sysfs, and torch's own answers."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings, strategies as st

from dlrover.agent.workers.numa import Topology, device_numa_nodes, plan, read_topology
from dlrover.errors import ConfigurationError, InfrastructureError

MODES = ["node", "socket", "exclusive", "core-complex"]


def machine(
    *, sockets=1, nodes=1, cores=1, threads=1, cores_per_cache=1, allowed=None, first_node=0
) -> Topology:
    """A machine of ``sockets`` with ``nodes`` each of ``cores`` each of ``threads``.

    Numbered as Linux does it: the first threads of all cores, then the second threads.
    """
    total = sockets * nodes * cores

    def cpus(first: int, count: int) -> frozenset[int]:
        return frozenset(c + t * total for c in range(first, first + count) for t in range(threads))

    def groups(size: int) -> list[frozenset[int]]:
        return [cpus(first, size) for first in range(0, total, size)]

    return Topology(
        nodes={first_node + number: node for number, node in enumerate(groups(cores))},
        sockets=frozenset(groups(nodes * cores)),
        cores=frozenset(groups(1)),
        caches=frozenset(groups(cores_per_cache)),
        allowed=cpus(0, total) if allowed is None else frozenset(allowed),
    )


SERVER = machine(sockets=2, nodes=2, cores=8, threads=2, cores_per_cache=4)  # 64 CPUs


def text_of(cpus) -> str:
    """The kernel's way to write a set of CPUs: ``0-3,32``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def cpus_of(text: str) -> frozenset[int]:
    return frozenset(
        cpu
        for item in text.split(",")
        for cpu in range(int(item.split("-")[0]), int(item.split("-")[-1]) + 1)
    )


def pci_address(device: int) -> str:
    return f"0000:{device + 16:02x}:00.0"


def cache_files(cpu: int, complex_: frozenset[int]) -> dict[str, str]:
    caches = [
        ("1", "Data", {cpu}),
        ("1", "Instruction", {cpu}),
        ("3", "Unified", complex_),
        ("4", "Instruction", {cpu}),  # no data in it: does not count
    ]
    files = {f"devices/system/cpu/cpu{cpu}/cache/uevent": ""}
    for index, (level, kind, shared) in enumerate(caches):
        directory = f"devices/system/cpu/cpu{cpu}/cache/index{index}"
        files[f"{directory}/level"] = level
        files[f"{directory}/type"] = kind
        files[f"{directory}/shared_cpu_list"] = text_of(shared)
    return files


def sysfs(topology: Topology, device_nodes=()) -> dict[str, str]:
    """The files under ``/sys`` by which the kernel would tell of this machine and its devices."""
    system = "devices/system"
    files = {f"{system}/node/possible": text_of(topology.nodes)}
    for node, cpus in topology.nodes.items():
        files[f"{system}/node/node{node}/cpulist"] = text_of(cpus)
    for package, socket in enumerate(sorted(topology.sockets, key=min)):
        for cpu in socket:
            files[f"{system}/cpu/cpu{cpu}/topology/physical_package_id"] = str(package)
    for core in topology.cores:
        for cpu in core:
            files[f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list"] = text_of(core)
    for complex_ in topology.caches:
        for cpu in complex_:
            files |= cache_files(cpu, complex_)
    for device, node in enumerate(device_nodes):
        files[f"bus/pci/devices/{pci_address(device)}/numa_node"] = str(node)
    return {path: f"{text}\n" for path, text in files.items()}


def write_sysfs(root: Path, topology: Topology, device_nodes=()) -> None:
    files = {root / path: text for path, text in sysfs(topology, device_nodes).items()}
    for directory in {path.parent for path in files}:
        directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)


@st.composite
def machines(draw) -> tuple[Topology, list[int]]:
    """A machine, of which a part may be used, and the NUMA nodes of its devices."""
    size = st.integers(1, 3)
    cores = draw(st.integers(1, 6))
    whole = machine(
        sockets=draw(size),
        nodes=draw(size),
        cores=cores,
        threads=draw(st.integers(1, 2)),
        cores_per_cache=draw(st.sampled_from([n for n in range(1, cores + 1) if cores % n == 0])),
    )
    cpus = sorted(whole.allowed)
    hidden = draw(st.one_of(st.just(set()), st.sets(st.sampled_from(cpus), max_size=len(cpus) - 1)))
    topology = machine_with(whole, allowed=whole.allowed - hidden)
    nodes = draw(st.lists(st.sampled_from(sorted(whole.nodes)), min_size=1, max_size=6))
    return topology, nodes


def machine_with(topology: Topology, **changes) -> Topology:
    fields = {name: getattr(topology, name) for name in topology.__struct_fields__}
    return Topology(**{**fields, **changes})


class TestPlan:
    @pytest.mark.parametrize(
        ("mode", "local_rank", "expected"),
        [
            ("node", 0, "0-7,32-39"),
            ("node", 3, "16-23,48-55"),
            ("socket", 0, "0-15,32-47"),
            ("socket", 3, "16-31,48-63"),
            ("exclusive", 0, "0-2,32-34"),  # 8 cores for 3 devices: 3, 3 and 2
            ("exclusive", 1, "3-5,35-37"),
            ("exclusive", 2, "6-7,38-39"),
            ("exclusive", 3, "16-23,48-55"),
            ("core-complex", 0, "0-3,32-35"),
            ("core-complex", 1, "4-7,36-39"),
            ("core-complex", 2, "0-3,32-35"),  # a third device shares the first complex
            ("core-complex", 3, "16-19,48-51"),
        ],
    )
    def test_a_server_with_four_devices(self, mode, local_rank, expected):
        assert text_of(plan(mode, local_rank, SERVER, [0, 0, 0, 2])) == expected

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("node", ["0-1", "0-1"]),
            ("socket", ["0-1", "0-1"]),
            ("exclusive", ["0", "1"]),
            ("core-complex", ["0", "1"]),
        ],
    )
    def test_a_small_machine(self, mode, expected):
        topology = machine(cores=2)
        assert [text_of(plan(mode, rank, topology, (0, 0))) for rank in range(2)] == expected

    def test_fewer_allowed_cpus_make_smaller_shares(self):
        topology = machine(cores=4, threads=2, cores_per_cache=2, allowed={1, 2, 3, 6, 7})
        assert plan("node", 0, topology, [0, 0]) == {1, 2, 3, 6, 7}
        assert plan("exclusive", 0, topology, [0, 0]) == {1, 2, 6}
        assert plan("exclusive", 1, topology, [0, 0]) == {3, 7}
        assert plan("core-complex", 0, topology, [0, 0]) == {2, 3, 6, 7}  # the larger one first
        assert plan("core-complex", 1, topology, [0, 0]) == {1}

    def test_a_node_without_allowed_cpus_takes_no_part_in_a_socket(self):
        topology = machine(nodes=2, cores=2, allowed={0, 1})
        assert plan("socket", 0, topology, [0]) == {0, 1}

    @given(machines(), st.data())
    @settings(max_examples=50, deadline=None)
    def test_plans_stay_on_the_node_and_exclusive_shares_are_a_partition(self, made, data):
        topology, nodes = made
        rank = data.draw(st.integers(0, len(nodes) - 1))
        on_node = topology.allowed_on(nodes[rank])
        same_node = [r for r, node in enumerate(nodes) if node == nodes[rank]]
        cores = {core & on_node for core in topology.cores} - {frozenset()}
        assume(on_node)
        assert plan("node", rank, topology, nodes) == on_node
        assert on_node <= plan("socket", rank, topology, nodes) <= topology.allowed
        complexes = [plan("core-complex", r, topology, nodes) for r in same_node]
        assert all(complex_ <= on_node for complex_ in complexes)
        available = {cache & on_node for cache in topology.caches} - {frozenset()}
        assert len(set(complexes)) == min(len(same_node), len(available))
        assume(len(cores) >= len(same_node))
        shares = [plan("exclusive", r, topology, nodes) for r in same_node]
        assert sum(map(len, shares)) == len(on_node)
        assert frozenset().union(*shares) == on_node
        counts = [sum(core <= share for core in cores) for share in shares]
        assert sum(counts) == len(cores)  # no physical core is divided
        assert max(counts) - min(counts) <= 1

    def test_unknown_mode(self):
        with pytest.raises(ConfigurationError) as error:
            plan("numa", 0, SERVER, [0])
        assert str(error.value) == (
            "--numa-binding is 'numa'; accepted are 'node', 'socket', 'exclusive', 'core-complex'."
        )

    @pytest.mark.parametrize("mode", MODES)
    def test_what_cannot_be_bound_is_said(self, mode):
        with pytest.raises(ConfigurationError, match="local rank 2 has none of the 2 devices"):
            plan(mode, 2, SERVER, [0, 0])
        topology = machine(nodes=2, cores=2, allowed={0, 1})
        with pytest.raises(ConfigurationError, match="may use no CPU of NUMA node 1"):
            plan(mode, 0, topology, [1])
        with pytest.raises(ConfigurationError, match="may use no CPU of NUMA node 7"):
            plan(mode, 0, topology, [7])

    def test_fewer_cores_than_devices(self):
        with pytest.raises(ConfigurationError, match="3 devices and only 2 physical cores"):
            plan("exclusive", 0, machine(cores=2, threads=2), [0, 0, 0])


class TestDeviceNumaNodes:
    def test_from_sysfs(self, tmp_path: Path):
        topology = machine(nodes=4)
        write_sysfs(tmp_path, topology, [3, -1, 0])
        addresses = [pci_address(device) for device in range(3)]
        assert device_numa_nodes(addresses, 2, topology, tmp_path) == (3, 0, 0)

    def test_without_devices_workers_are_dealt_to_nodes_in_turn(self):
        topology = machine(nodes=3, cores=2, allowed={0, 1, 4, 5})
        assert device_numa_nodes([], 3, topology) == (0, 2, 0)
        assert device_numa_nodes([], 2, machine(cores=2, first_node=8)) == (8, 8)

    def test_unknown_device(self, tmp_path: Path):
        with pytest.raises(InfrastructureError, match=r"'0000:ff:00\.0' cannot be read"):
            device_numa_nodes(["0000:ff:00.0"], 1, SERVER, tmp_path)


class TestReadTopology:
    @given(machines())
    @settings(max_examples=10, deadline=None)
    @pytest.mark.slow
    def test_it_finds_what_was_written(self, made):
        topology, _ = made
        with tempfile.TemporaryDirectory() as root:
            write_sysfs(Path(root), topology)
            assert read_topology(Path(root), topology.allowed) == topology

    def test_gaps_in_numbers_and_a_node_without_cpus(self, tmp_path: Path):
        topology = machine(cores=4)
        topology = machine_with(topology, nodes={0: topology.allowed, 10: frozenset()})
        write_sysfs(tmp_path, topology)
        (tmp_path / "devices/system/node/node_power").mkdir()  # not a node
        assert read_topology(tmp_path, topology.allowed).nodes == topology.nodes

    def test_a_machine_that_tells_nothing(self, tmp_path: Path):
        everything = frozenset({frozenset({2, 3})})
        assert read_topology(tmp_path, {2, 3}) == Topology(
            nodes={0: frozenset({2, 3})},
            sockets=everything,
            cores=frozenset({frozenset({2}), frozenset({3})}),
            caches=everything,
            allowed=frozenset({2, 3}),
        )

    def test_this_machine(self):
        topology = read_topology()
        assert topology.allowed == os.sched_getaffinity(0)
        online = cpus_of(Path("/sys/devices/system/cpu/online").read_text())
        for partition in (topology.nodes.values(), topology.sockets, topology.cores):
            assert sorted(cpu for part in partition for cpu in part) == sorted(online)
        assert frozenset().union(*topology.caches) == online

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", MODES)
    def test_the_kernel_accepts_a_plan_for_this_machine(self, mode):
        topology = read_topology()
        cpus = plan(mode, 0, topology, device_numa_nodes([], 1, topology))
        program = "import os; print(*sorted(os.sched_getaffinity(0)))"
        result = subprocess.run(
            [sys.executable, "-S", "-c", program],
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            capture_output=True,
            check=True,
            text=True,
        )
        assert frozenset(map(int, result.stdout.split())) == cpus


@pytest.mark.slow
@pytest.mark.torch
class TestAgainstTorch:
    """The same machines, shown to torch's rules by way of a made-up sysfs and made-up devices."""

    @pytest.fixture
    def binding(self):
        binding = pytest.importorskip("torch.numa.binding")
        if not hasattr(binding, "_get_logical_cpus_to_bind_to"):
            pytest.skip("this torch computes its CPU sets elsewhere")
        return binding

    def test_same_cpus(self, binding, monkeypatch):
        @given(machines())
        @settings(max_examples=60, deadline=None)
        def check(made):
            topology, nodes = made
            with monkeypatch.context() as patch:
                show_machine(patch, binding, topology, nodes)
                for mode in MODES:
                    for rank in range(len(nodes)):
                        theirs = torch_plan(binding, mode, rank)
                        assert our_plan(mode, rank, topology, nodes) == theirs or (
                            mode == "socket" and some_node_is_closed(topology)
                        )

        check()


def our_plan(mode, rank, topology, nodes) -> frozenset[int]:
    try:
        return plan(mode, rank, topology, nodes)
    except ConfigurationError:
        return frozenset()


def torch_plan(binding, mode, rank) -> frozenset[int]:
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    try:
        cpus = binding._get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)
    except (RuntimeError, ValueError, ZeroDivisionError):  # where it has no answer
        return frozenset()
    return frozenset(cpus)


def some_node_is_closed(topology: Topology) -> bool:
    """Some node has no allowed CPU: there torch's socket mode fails, and ours leaves it out."""
    return not all(topology.allowed_on(node) for node in topology.nodes)


def show_machine(patch, binding, topology: Topology, nodes: list[int]) -> None:
    """Let torch's module see this machine instead of the one the test runs on."""
    files = {f"/sys/{path}": text for path, text in sysfs(topology, nodes).items()}
    entries: dict[str, set[str]] = {}
    for path in files:
        while path != "/":
            path, name = os.path.split(path)  # noqa: PLW2901
            entries.setdefault(path, set()).add(name)

    def properties(index: int):
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=index + 16, pci_device_id=0)

    cuda = SimpleNamespace(device_count=lambda: len(nodes), get_device_properties=properties)
    system = SimpleNamespace(
        listdir=lambda path: sorted(entries[path]),
        sched_getaffinity=lambda _: set(topology.allowed),
        path=os.path,
    )
    patch.setattr(binding, "open", lambda path: io.StringIO(files[path]), raising=False)
    patch.setattr(binding, "os", system)
    patch.setattr(binding, "torch", SimpleNamespace(cuda=cuda))
