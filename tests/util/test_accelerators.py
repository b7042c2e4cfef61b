"""Vendor adapters: what their tools print is understood, and other packages may add one."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from dlrover import accelerators
from dlrover.accelerators import DeviceUse, Vendor, ascend, metax, mthreads, nvidia
from dlrover.cli.host.probe import collect

NVIDIA = """\
0, NVIDIA H100 80GB HBM3, 0, [N/A], No, No
1, NVIDIA H100 80GB HBM3, 14, [N/A], No, No
2, NVIDIA H100 80GB HBM3, 0, [N/A], Yes, No
3, NVIDIA H100 80GB HBM3, 0, [N/A], No, Yes
4, Tesla V100-SXM2-32GB, 0, Yes, [N/A], [N/A]
5, NVIDIA GeForce RTX 3090, [N/A], [N/A], [N/A], [N/A]
"""
NVIDIA_LOST = """\
Unable to determine the device handle for GPU 0000:65:00.0: GPU is lost.  Reboot the system to recover this GPU
"""
ASCEND = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.7                   Version: 23.0.7                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 102.8       55                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3338 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | 97.6        54                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3337 / 65536         |
+===========================+===============+====================================================+
"""
ASCEND_INFERENCE = """\
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | OK              | 9.2          53                15    / 15            |
| 0       0                     | NA              | 0            3841 / 11577                            |
+===============================+=================+======================================================+
"""
MTHREADS = """\
Tue Jun 23 17:48:04 2026
---------------------------------------------------------------------
    mthreads-gmi:2.4.1           Driver Version:5.1.0-server
---------------------------------------------------------------------
ID   Name                 |PCIe                |%GPU  Mem
     Device Type   Perf   |Pcie Lane Width     |Temp  MPC Capable
                                               |      ECC Mode
+-------------------------------------------------------------------+
0    MTT S5000            |00000000:18:00.0    |0%    0MiB(81920MiB)
     Physical      P0     |16x(16x)            |48C   YES
                                               |      On-die, EDC
+-------------------------------------------------------------------+
1    MTT S5000            |00000000:3a:00.0    |N/A   N/A
     Physical      P0     |16x(16x)            |48C   YES
"""
METAX = """\
mx-smi  version: 2.2.9
GPU#0    MXC500      0000:08:00.0   Available (UUID: GPU-e702f06b-bbd6-bc06-5196-90a5554a24ba)
GPU#7    MXC500      0000:3c:00.0   Not Available(MetaX Sysfs File Unaccessible)
"""


NVIDIA_USE = """\
0, GPU-7c2f, 100, 0
1, GPU-91aa, 34, 12
2, GPU-55d0, [N/A], [N/A]
"""


@pytest.mark.parametrize(
    ("vendor", "text", "expected"),
    [
        (nvidia, NVIDIA_USE, [
            DeviceUse(0, 100, 0, "GPU-7c2f"),
            DeviceUse(1, 34, 12, "GPU-91aa"),
            DeviceUse(2, -1, -1, "GPU-55d0"),
        ]),
        (nvidia, NVIDIA_LOST, []),
        (ascend, ASCEND.replace("| 0           0    / 0          3337", "| 87          0    / 0          3337"),
         [DeviceUse(0, 0), DeviceUse(1, 87)]),
        (ascend, ASCEND_INFERENCE, [DeviceUse(0, 0)]),
        (mthreads, MTHREADS.replace("|0% ", "|64%"), [DeviceUse(0, 64), DeviceUse(1, -1)]),
        (mthreads, "", []),
    ],
)  # fmt: skip
def test_use_is_read_from_what_the_tools_print(vendor, text, expected):
    assert list(vendor.VENDOR.parse_use(text)) == expected


@pytest.mark.parametrize(
    ("vendor", "text", "expected"),
    [
        (nvidia, NVIDIA, {1: "14 uncorrected memory errors", 2: "remapped", 3: "remapped", 4: "remapped"}),
        (nvidia, NVIDIA_LOST, {-1: "GPU is lost"}),
        (ascend, ASCEND, {1: "npu-smi says Alarm"}),
        (ascend, ASCEND_INFERENCE, {}),
        (mthreads, MTHREADS, {1: "cannot read its memory"}),
        (metax, METAX, {7: "Not Available(MetaX Sysfs File Unaccessible)"}),
    ],
)  # fmt: skip
def test_problems_are_read_from_what_the_tools_print(vendor, text, expected):
    devices = vendor.parse_health(text)
    problems = {device.index: device.problem for device in devices if device.problem}
    assert problems.keys() == expected.keys()
    for index, words in expected.items():
        assert words in problems[index]


@pytest.mark.parametrize(
    ("vendor", "text", "names"),
    [
        (nvidia, NVIDIA, ["NVIDIA H100 80GB HBM3"] * 4 + ["Tesla V100-SXM2-32GB", "NVIDIA GeForce RTX 3090"]),
        (ascend, ASCEND, ["910B3", "910B3"]),
        (ascend, ASCEND_INFERENCE, ["310B1"]),
        (mthreads, MTHREADS, ["MTT S5000", "MTT S5000"]),
        (metax, METAX, ["MXC500", "MXC500"]),
    ],
)  # fmt: skip
def test_every_device_is_read_once(vendor, text, names):
    assert [device.name for device in vendor.parse_health(text)] == names


@pytest.mark.parametrize("vendor", accelerators.VENDORS, ids=lambda v: v.name)
def test_other_output_is_no_device(vendor):
    assert (
        vendor.parse_health("") == vendor.parse_health("NVIDIA-SMI has failed\n\n| a | b |") == ()
    )


def test_the_machine_s_own_accelerator_is_found(tmp_path):
    assert accelerators.present(dev=tmp_path) is accelerators.CPU
    for name in ("davinci0", "davinci10", "davinci2", "null"):
        (tmp_path / name).touch()
    assert accelerators.present("nvidia.com/gpu", tmp_path) is ascend.VENDOR
    assert accelerators.present("cpu", tmp_path) is accelerators.CPU
    files = [name.rpartition("/")[2] for name in ascend.VENDOR.device_files(tmp_path)]
    assert files == ["davinci0", "davinci2", "davinci10"]
    (tmp_path / "nvidia0").touch()
    assert accelerators.present("ascend-npu", tmp_path) is ascend.VENDOR


OTHER = Vendor("other", "example.com/npu", re.compile(r"other\d+"), pci_driver="other_drm")


@pytest.fixture
def other_package(monkeypatch):
    """Install packages whose entry points are a vendor, a missing module and a text."""
    points = [
        importlib.metadata.EntryPoint("other", f"{__name__}:OTHER", accelerators.ENTRY_POINTS),
        importlib.metadata.EntryPoint("gone", "no_such_module:VENDOR", accelerators.ENTRY_POINTS),
        importlib.metadata.EntryPoint("wrong", "os:sep", accelerators.ENTRY_POINTS),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", _load)
    accelerators.vendors.cache_clear()
    yield
    accelerators.vendors.cache_clear()


@pytest.mark.usefixtures("other_package")
def test_another_package_adds_a_vendor_by_entry_point(caplog):
    assert accelerators.vendors() == (*accelerators.VENDORS, OTHER)
    assert accelerators.resources()[-2:] == ("example.com/npu", "cpu")
    assert [record.args for record in caplog.records] == [
        ("no_such_module:VENDOR",),
        ("os:sep",),
    ]


@pytest.mark.usefixtures("other_package")
def test_the_devices_of_another_package_s_vendor_are_found(tmp_path):
    (tmp_path / "drivers/other_drm/0000:c1:00.0").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/other0").touch()
    assert accelerators.pci_addresses(tmp_path / "drivers") == ("0000:c1:00.0",)
    found = collect({}, tmp_path, root=tmp_path).accelerators
    assert [accelerator.vendor for accelerator in found] == ["other"]


def _load(entry: importlib.metadata.EntryPoint) -> object:
    """Tests are not importable by name."""
    if entry.name == "other":
        return OTHER
    if entry.name == "gone":
        raise ModuleNotFoundError(entry.value)
    return "/"
