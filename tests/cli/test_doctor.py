"""``dlrover doctor``: its judgements on made-up machines, and its facts about this one."""

import dataclasses
import importlib.metadata
import io
import json
import os
import resource
import socket
import threading

import psutil
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from dlrover._native import library
from dlrover.cli.host.doctor import (
    Finding,
    Level,
    doctor,
    examine,
    exit_code,
    render_json,
    render_text,
)
from dlrover.cli.host.probe import Accelerator, DiskSpace, Lookup, Machine, Ports, collect, within
from dlrover.cli.output import Form

MIB = 1 << 20
GIB = 1 << 30

HEALTHY = Machine(
    python="3.12.4",
    executable="/opt/python/bin/python",
    kernel="Linux 6.8.0",
    memfd=True,
    torch="2.7.1+cu128",
    accelerators=(Accelerator("nvidia", ("/dev/nvidia0", "/dev/nvidia1")),),
    memory_total=256 * GIB,
    memory_available=200 * GIB,
    memory_limit=None,
    shm=DiskSpace(128 * GIB, 127 * GIB),
    state_dir="/jobs/a",
    state=DiskSpace(4096 * GIB, 2048 * GIB),
    state_writable=True,
    state_type="ext4",
    open_files=65536,
    open_files_hard=None,
    processes=None,
    processes_cgroup=32768,
    core_limit=0,
    core_pattern="core",
    ports=Ports(32768, 60999, 28000),
    loopback_error="",
    localhost=Lookup("localhost", 0.001, ("127.0.0.1", "::1")),
    hostname=Lookup("node7", 0.002, ("10.1.2.3",)),
    reverse=(Lookup("127.0.0.1", 0.001, ("localhost",)), Lookup("10.1.2.3", 0.003, ("node7",))),
    interfaces=("lo", "eth0"),
    gloo_interfaces=(),
    flag_variables=(),
    wall_clock=1_800_000_000.0,
    clock_step=0.000_1,
    probe_seconds=0.02,
    ptrace_scope=1,
    may_trace=False,
    native=True,
    native_reason="the compiled library uses avx512 instructions",
    native_choice="auto",
)

WITHOUT_LIBRARY = {
    "native": False,
    "native_reason": "this installation was built without a compiled library",
}


def found(topic: str, **changes: object) -> Finding:
    machine = dataclasses.replace(HEALTHY, **changes)
    (finding,) = [finding for finding in examine(machine) if finding.topic == topic]
    return finding


def free(amount: int) -> DiskSpace:
    return DiskSpace(8 * GIB, amount)


def test_nothing_is_amiss_on_a_healthy_machine():
    findings = examine(HEALTHY)
    assert [finding for finding in findings if finding.level is not Level.OK] == []
    assert len({finding.topic for finding in findings}) == len(findings) == 20
    assert all(finding.sentence.endswith(".") for finding in findings)


@pytest.mark.parametrize(
    ("topic", "level", "changes", "words"),
    [
        ("python", "ok", {}, ["3.12.4", "/opt/python/bin/python"]),
        ("kernel", "ok", {}, ["Linux 6.8.0"]),
        ("kernel", "problem", {"kernel": "Linux 4.18", "memfd": False}, ["Linux 4.18", "sandbox"]),
        ("pytorch", "warning", {"torch": None}, ["not installed", "pip install"]),
        ("pytorch", "problem", {"torch": "2.5.1+cu121"}, ["2.5.1+cu121", "2.6"]),
        ("pytorch", "ok", {"torch": "2.6.0"}, ["2.6.0"]),
        ("pytorch", "ok", {"torch": "2.13.0a0+git1234"}, ["2.13.0a0"]),
        ("compiled library", "ok", {}, ["The compiled library uses avx512 instructions."]),
        (
            "compiled library",
            "warning",
            WITHOUT_LIBRARY,
            ["Python code copies", "since this installation was built without", "C++ compiler"],
        ),
        (
            "compiled library",
            "problem",
            {**WITHOUT_LIBRARY, "native_choice": "require"},
            ["DLROVER_NATIVE is require, but this installation was built without"],
        ),
        (
            "compiled library",
            "ok",
            {"native": False, "native_reason": "DLROVER_NATIVE is off", "native_choice": "off"},
            ["Python code copies and hashes memory, since DLROVER_NATIVE is off."],
        ),
        ("accelerators", "ok", {"accelerators": ()}, ["CPU"]),
        ("accelerators", "ok", {}, ["nvidia: /dev/nvidia0, /dev/nvidia1"]),
        ("accelerators", "warning", {"torch": "2.7.1+cpu"}, ["/dev/nvidia0", "2.7.1+cpu"]),
        (
            "accelerators",
            "problem",
            {"accelerators": (Accelerator("ascend", ("/dev/davinci0",), ("/dev/davinci0",)),)},
            ["may not open /dev/davinci0", "group"],
        ),
        ("memory", "ok", {"memory_available": 4 * GIB}, ["4.0 GiB of 256.0 GiB"]),
        ("memory", "warning", {"memory_available": 4 * GIB - 1}, ["fit"]),
        ("memory", "problem", {"memory_available": GIB // 2 - 1}, ["512 MiB"]),
        ("memory", "warning", {"memory_limit": 2 * GIB}, ["200.0 GiB", "cgroup", "2.0 GiB"]),
        ("memory", "problem", {"memory_limit": 0}, ["0 MiB in all"]),
        ("memory", "ok", {"memory_limit": 300 * GIB}, ["200.0 GiB of 256.0 GiB memory is avail"]),
        ("shared memory", "problem", {"shm": None}, ["/dev/shm is missing", "tmpfs"]),
        (
            "shared memory",
            "problem",
            {"shm": DiskSpace(64 * MIB, 64 * MIB)},
            ["64 MiB", "--shm-size"],
        ),
        ("shared memory", "problem", {"shm": free(128 * MIB - 1)}, ["SIGBUS", "ended jobs"]),
        ("shared memory", "warning", {"shm": free(128 * MIB)}, ["128 MiB free of 8.0 GiB"]),
        ("shared memory", "ok", {"shm": free(GIB)}, ["1.0 GiB free of 8.0 GiB"]),
        ("state directory", "problem", {"state": None}, ["/jobs/a", "does not answer"]),
        ("state directory", "problem", {"state_writable": False}, ["cannot write", "--job-dir"]),
        ("state directory", "problem", {"state": free(100 * MIB)}, ["100 MiB free", "--job-dir"]),
        ("state directory", "warning", {"state": free(2 * GIB - 1)}, ["DLROVER_STATE_DIR"]),
        ("state directory", "ok", {}, ["2.0 TiB free of 4.0 TiB"]),
        ("state directory", "warning", {"state_type": "nfs4"}, ["/jobs/a is on a network (nfs4)"]),
        ("state directory", "warning", {"state_type": "fuse.sshfs"}, ["journal"]),
        ("state directory", "problem", {"state_type": "nfs", "state": free(1)}, ["0 MiB free"]),
        ("open files", "ok", {"open_files": None}, ["any number"]),
        ("open files", "ok", {"open_files": 4096}, ["4096", "unlimited"]),
        (
            "open files",
            "warning",
            {"open_files": 1024, "open_files_hard": 4096},
            ["1024", "hard limit: 4096", "ulimit -n"],
        ),
        ("open files", "problem", {"open_files": 255}, ["255"]),
        ("processes", "ok", {"processes_cgroup": None}, ["any number"]),
        ("processes", "warning", {"processes_cgroup": 1000}, ["cgroup", "1000", "--pids-limit"]),
        ("processes", "problem", {"processes": 100}, ["This user", "100", "ulimit -u"]),
        ("core dumps", "ok", {}, ["off"]),
        ("core dumps", "warning", {"core_limit": None}, ["all of", "'core'", "ulimit -c 0"]),
        ("core dumps", "warning", {"core_limit": 2 * GIB}, ["2.0 GiB"]),
        ("core dumps", "ok", {"core_limit": None, "core_pattern": "|/bin/apport"}, ["apport"]),
        ("ports", "ok", {"ports": None}, ["does not report"]),
        ("ports", "ok", {"ports": Ports(32768, 60999, 1024)}, ["1024", "32768 to 60999"]),
        ("ports", "warning", {"ports": Ports(32768, 60999, 1023)}, ["ip_local_port_range"]),
        ("ports", "problem", {"ports": Ports(60000, 60063, 63)}, ["63"]),
        (
            "loopback",
            "problem",
            {"loopback_error": "Network is unreachable"},
            ["unreachable", "lo"],
        ),
        (
            "localhost",
            "problem",
            {"localhost": Lookup("localhost", 2.0, error="no answer within 2 s")},
            ["no answer within 2 s", "/etc/hosts"],
        ),
        (
            "localhost",
            "problem",
            {"localhost": Lookup("localhost", 0.1, ("127.0.0.1", "10.9.9.9"))},
            ["10.9.9.9", "/etc/hosts"],
        ),
        ("localhost", "warning", {"localhost": Lookup("localhost", 0.5, ("::1",))}, ["0.500 s"]),
        (
            "host name",
            "warning",
            {"hostname": Lookup("node7", 0.01, error="Name or service not known")},
            ["node7", "not known", "GLOO_SOCKET_IFNAME"],
        ),
        ("host name", "warning", {"hostname": Lookup("node7", 1.5, ("10.1.2.3",))}, ["1.5 s"]),
        ("host name", "warning", {"hostname": Lookup("n", 0.0, ("127.0.1.1",))}, ["one machine"]),
        (
            "host name",
            "ok",
            {"hostname": Lookup("n", 0.0, ("127.0.1.1",)), "gloo_interfaces": ("eth0",)},
            ["127.0.1.1"],
        ),
        ("host name", "ok", {"hostname": Lookup("n", 0.0, ("fe80::1%eth0",))}, ["fe80::1%eth0"]),
        (
            "reverse lookup",
            "warning",
            {"reverse": (Lookup("127.0.0.1", 0.0), Lookup("10.1.2.3", 2.0, error="no answer"))},
            ["10.1.2.3", "2.000 s (no answer)", "store"],
        ),
        ("reverse lookup", "ok", {}, ["10.1.2.3", "0.003 s"]),
        ("network interface", "problem", {"gloo_interfaces": ("eth0", "ib0")}, ["ib0", "lo, eth0"]),
        ("network interface", "ok", {"gloo_interfaces": ("eth0",)}, ["eth0"]),
        ("environment", "ok", {"flag_variables": ("PET_A", "PET_B")}, ["PET_A, PET_B"]),
        ("clock", "problem", {"wall_clock": 0.0}, ["1970-01-01"]),
        ("clock", "warning", {"clock_step": -0.2}, ["-0.200 s", "0.020 s"]),
        ("clock", "ok", {}, ["2027-01-15 08:00 UTC"]),
        ("tracing", "warning", {"ptrace_scope": 3, "may_trace": True}, ["not even root"]),
        ("tracing", "ok", {"ptrace_scope": 2}, ["CAP_SYS_PTRACE", "2"]),
        ("tracing", "ok", {"ptrace_scope": 2, "may_trace": True}, ["may attach"]),
        ("tracing", "ok", {"ptrace_scope": None}, ["may attach"]),
    ],
)
def test_a_fact_is_judged(topic, level, changes, words):
    finding = found(topic, **changes)
    assert finding.level.value == level
    assert [word for word in words if word not in finding.sentence] == []


@given(
    amounts=st.tuples(st.integers(0, 1 << 36), st.integers(0, 1 << 36)).map(sorted),
    topic=st.sampled_from(["memory", "shared memory", "state directory", "open files", "ports"]),
)
def test_more_is_never_worse(amounts, topic):
    def badness(amount: int) -> int:
        changes = {
            "memory": {"memory_available": amount},
            "shared memory": {"shm": DiskSpace(1 << 36, amount)},
            "state directory": {"state": DiskSpace(1 << 36, amount)},
            "open files": {"open_files": amount},
            "ports": {"ports": Ports(0, amount, amount)},
        }
        return list(Level).index(found(topic, **changes[topic]).level)

    less, more = amounts
    assert badness(more) <= badness(less)


@pytest.mark.parametrize(
    ("levels", "code"), [([], 0), (["ok", "warning"], 0), (["ok", "problem", "warning"], 3)]
)
def test_only_a_problem_fails_the_command(levels, code):
    assert exit_code(Finding(Level(level), "a", "A.") for level in levels) == code


# ---- reading


def test_the_facts_about_this_machine_are_true(tmp_path):
    machine = collect({"PET_NNODES": "2", "PATH": "/", "GLOO_SOCKET_IFNAME": "lo,eth9"}, tmp_path)
    shm = os.statvfs("/dev/shm")
    assert machine.memory_total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.memory_available < machine.memory_total
    assert machine.shm is not None
    assert machine.shm.total == shm.f_blocks * shm.f_frsize
    assert machine.state is not None
    assert machine.state_writable
    assert machine.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert machine.loopback_error == ""
    assert machine.hostname.question == socket.gethostname()
    assert machine.reverse[0].question == "127.0.0.1"
    assert machine.kernel.startswith("Linux ")
    assert machine.memfd
    assert "lo" in machine.interfaces
    assert machine.gloo_interfaces == ("lo", "eth9")
    assert machine.flag_variables == ("PET_NNODES",)
    assert abs(machine.clock_step) < machine.probe_seconds / 2
    assert set(machine.localhost.answers) <= {"127.0.0.1", "::1"}


def test_the_compiled_library_is_used_unless_it_is_off(tmp_path):
    loaded = library.load("auto")
    machine = collect({}, tmp_path)
    assert (machine.native, machine.native_reason) == (loaded.library is not None, loaded.reason)
    machine = collect({"DLROVER_NATIVE": "off"}, tmp_path)
    assert (machine.native, machine.native_reason) == (False, "DLROVER_NATIVE is off")


@pytest.mark.torch
def test_the_version_of_torch_is_read_without_importing_it(tmp_path):
    assert collect({}, tmp_path).torch == importlib.metadata.version("torch")


def test_a_taken_port_is_not_free(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        write(tmp_path / "proc/sys/net/ipv4/ip_local_port_range", f"{taken}\t{taken + 1}\n")
        (tmp_path / "proc/net").symlink_to("/proc/net")
        ports = collect({}, tmp_path, root=tmp_path).ports
    assert ports is not None
    assert (ports.low, ports.high) == (taken, taken + 1)
    assert ports.free < 2


def test_ports_are_counted_once_over_both_families(tmp_path):
    write(tmp_path / "proc/sys/net/ipv4/ip_local_port_range", "32768 32777\n")
    # Ports 32768 (twice), 32777, and 80; the remote ports do not count.
    write(
        tmp_path / "proc/net/tcp",
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:8000 0100007F:8002 01\n"
        "   1: 0100007F:0050 0100007F:8003 01\n",
    )
    write(
        tmp_path / "proc/net/tcp6",
        f"  sl  local_address rem_address   st\n   0: {'0' * 32}:8000 {'0' * 32}:0000 0A\n"
        f"   1: {'0' * 32}:8009 {'0' * 32}:0000 0A\n",
    )
    assert collect({}, tmp_path, root=tmp_path).ports == Ports(32768, 32777, 8)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("membership", "files", "memory", "pids"),
    [
        pytest.param("", {}, None, None, id="no cgroups"),
        pytest.param("0::/\n", {"memory.max": "max", "pids.max": "max"}, None, None, id="v2 none"),
        pytest.param(
            "0::/kube/pod/c1\n",
            {"kube/memory.max": "8000", "kube/pod/memory.max": "5000", "kube/pod/c1/pids.max": "9"},
            5000,
            9,
            id="v2 an ancestor's is the least",
        ),
        pytest.param("0::/\n", {"memory.max": "7000"}, 7000, None, id="v2 own namespace"),
        pytest.param(
            "4:memory:/docker/abc\n3:pids:/docker/abc\n0::/\n",
            {"memory/memory.limit_in_bytes": "6000", "pids/pids.max": "12"},
            6000,
            12,
            id="v1 container that sees the host's path",
        ),
        pytest.param(
            "9:cpu,memory:/a\n",
            {"cpu,memory/a/memory.limit_in_bytes": "3000"},
            3000,
            None,
            id="v1 joint mount",
        ),
        pytest.param(
            "4:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED}, None, None, id="v1 none"
        ),
        pytest.param(
            "1:name=systemd:/\n0::/a\n", {"unified/a/memory.max": "44"}, 44, None, id="hybrid"
        ),
    ],
)
def test_the_least_limit_of_the_cgroups_counts(tmp_path, membership, files, memory, pids):
    write(tmp_path / "proc/self/cgroup", membership)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, f"{text}\n")
    machine = collect({}, tmp_path, root=tmp_path)
    assert (machine.memory_limit, machine.processes_cgroup) == (memory, pids)


def test_accelerators_are_found_by_their_device_files(tmp_path):
    for name in (
        "nvidia10",
        "nvidia2",
        "nvidia2.old",
        "davinci_manager",
        "mtgpu.0",
        "mxcd",
        "tty0",
    ):
        write(tmp_path / "dev" / name, "")
    (tmp_path / "dev/davinci0").symlink_to("gone")
    dev = f"{tmp_path}/dev"
    assert collect({}, tmp_path, root=tmp_path).accelerators == (
        Accelerator("nvidia", (f"{dev}/nvidia2", f"{dev}/nvidia10")),
        Accelerator("ascend", (f"{dev}/davinci0",), (f"{dev}/davinci0",)),
        Accelerator("mthreads", (f"{dev}/mtgpu.0",)),
        Accelerator("metax", (f"{dev}/mxcd",)),
    )


def test_kernel_settings_are_read(tmp_path):
    write(tmp_path / "proc/sys/kernel/yama/ptrace_scope", "2\n")
    write(tmp_path / "proc/sys/kernel/core_pattern", "|/bin/dump %p\n")
    write(tmp_path / "proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n")
    machine = collect({}, tmp_path, root=tmp_path)
    assert (machine.ptrace_scope, machine.core_pattern) == (2, "|/bin/dump %p")
    assert machine.may_trace


def test_a_root_without_proc_sys_and_dev_gives_no_facts(tmp_path):
    machine = collect({}, tmp_path, root=tmp_path)
    assert (machine.shm, machine.ports, machine.ptrace_scope) == (None, None, None)
    assert machine.accelerators == ()
    assert not machine.may_trace


def test_a_state_directory_need_not_exist(tmp_path):
    machine = collect({}, tmp_path / "not/yet")
    assert machine.state_dir == str(tmp_path / "not/yet")
    assert machine.state is not None
    assert machine.state.total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert machine.state_writable


def test_a_state_directory_below_a_file_is_not_writable(tmp_path):
    write(tmp_path / "file", "")
    (tmp_path / "file").chmod(0o755)
    assert not collect({}, tmp_path / "file/job").state_writable


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("", ""),
        ("/dev/a / ext4 rw 0 0\n", "ext4"),
        ("/dev/a / ext4 rw 0 0\nhost:/ {here} nfs4 rw 0 0\n", "nfs4"),
        ("host:/ {here} nfs4 rw 0 0\n/dev/a / ext4 rw 0 0\n", "nfs4"),
        ("none {here} autofs rw 0 0\nhost:/ {here} nfs rw 0 0\n", "nfs"),
        ("/dev/a / ext4 rw 0 0\nhost:/ {here}x nfs4 rw 0 0\n", "ext4"),
    ],
)
def test_the_file_system_of_the_state_directory_is_the_nearest_mount(tmp_path, mounts, kind):
    here = tmp_path / "my jobs"
    here.mkdir()
    mounts = mounts.format(here=str(here).replace(" ", r"\040"))
    write(tmp_path / "proc/self/mounts", mounts)
    assert collect({}, here / "not/yet", root=tmp_path).state_type == kind


def test_what_does_not_return_is_left_behind():
    released = threading.Event()
    try:
        assert within(0.05, [lambda: released.wait(20), lambda: 7]) == [None, 7]
    finally:
        released.set()


def test_a_silent_name_server_does_not_hold_up_the_probe(tmp_path, monkeypatch):
    released = threading.Event()

    def silent(address, flags):
        released.wait(20)
        return "late", "0"

    monkeypatch.setattr(socket, "getnameinfo", silent)
    try:
        machine = collect({}, tmp_path, limit=0.05)
    finally:
        released.set()
    assert machine.reverse[0] == Lookup("127.0.0.1", 0.05, error="no answer within 0.05 s")
    assert machine.probe_seconds < 10


def test_a_name_that_cannot_be_asked_for_is_an_error_of_the_lookup(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64 + ".example")
    machine = collect({}, tmp_path)
    assert machine.hostname.answers == ()
    assert "label" in machine.hostname.error


# ---- showing


def shown(findings, *, terminal):
    out = io.StringIO()
    colours = "standard" if terminal else "auto"
    console = Console(file=out, force_terminal=terminal, width=40, color_system=colours)
    console.print(render_text(findings), soft_wrap=True)
    return out.getvalue()


FINDINGS = [
    Finding(Level.PROBLEM, "disk", "The [bold] disk :smile: of this machine is as full as can be."),
    Finding(Level.OK, "clock", "Fine."),
    Finding(Level.WARNING, "open files", "Few."),
]


def test_text_puts_a_finding_on_a_line_and_problems_last():
    assert shown(FINDINGS, terminal=False).splitlines() == [
        "ok       clock       Fine.",
        "warning  open files  Few.",
        "problem  disk        The [bold] disk :smile: of this machine is as full as can be.",
        "problems: 1, warnings: 1",
    ]


def test_colour_is_for_terminals_only():
    assert "\x1b[1;31mproblem" in shown(FINDINGS, terminal=True)
    assert "\x1b[" not in shown(FINDINGS, terminal=False)


def test_json_holds_every_finding_and_every_fact():
    document = json.loads(render_json(HEALTHY, FINDINGS))
    assert document["findings"][1] == {"level": "ok", "topic": "clock", "sentence": "Fine."}
    assert len(document["findings"]) == 3
    assert document["machine"] == json.loads(json.dumps(dataclasses.asdict(HEALTHY)))
    assert document["native"] is True
    assert document["native_reason"] == "the compiled library uses avx512 instructions"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command_prints_json_as_it_is(tmp_path, terminal):
    out = io.StringIO()
    state_dir = tmp_path / "[bold]:smile:"
    environ = {"DLROVER_STATE_DIR": str(state_dir)}
    code = doctor(Form.JSON, environ, Console(file=out, force_terminal=terminal, width=40))
    document = json.loads(out.getvalue())
    assert document["machine"]["state_dir"] == str(state_dir)
    assert document["machine"]["memory_total"] == psutil.virtual_memory().total
    assert len(document["findings"]) == 20
    problem = any(finding["level"] == "problem" for finding in document["findings"])
    assert code == (3 if problem else 0)


def test_the_command_fails_on_a_problem(tmp_path):
    out = io.StringIO()
    environ = {"DLROVER_STATE_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "nosuch0"}
    code = doctor(Form.TEXT, environ, Console(file=out))
    assert code == 3
    assert "GLOO_SOCKET_IFNAME names nosuch0, which this machine does not have" in out.getvalue()
