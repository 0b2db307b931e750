"""InfiniBand and RoCE ports, read from a tree of files as the kernel lays them out."""

import pytest

from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network.infiniband import check, judge, look, used_ports

pytestmark = pytest.mark.full

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GIDS = {
    0: ("fe80:0000:0000:0000:b8ce:f6ff:fe00:0001", "IB/RoCE v1"),
    1: ("fe80:0000:0000:0000:b8ce:f6ff:fe00:0001", "RoCE v2"),
    2: ("0000:0000:0000:0000:0000:ffff:0a00:0102", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a00:0102", "RoCE v2"),
    4: (EMPTY, None),
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder like /sys/class/infiniband, in an environment without NCCL's variables.

    Beside it is one like /dev/infiniband, with one device that can be opened.
    """
    for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "sys"
    folder.mkdir()
    devices_of(folder).mkdir()
    (devices_of(folder) / "uverbs0").touch()
    return folder


def devices_of(root):
    """The folder like /dev/infiniband."""
    return root.parent / "dev"


def add_port(root, device, *, layer="InfiniBand", state="4: ACTIVE", physical="5: LinkUp"):
    """A device with one port."""
    folder = root / device / "ports" / "1"
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    for name, text in (
        ("state", state),
        ("phys_state", physical),
        ("link_layer", layer),
        ("rate", "400 Gb/sec (4X NDR)"),
    ):
        (folder / name).write_text(f"{text}\n")
    for index, (gid, kind) in GIDS.items():
        (folder / "gids" / str(index)).write_text(f"{gid}\n")
        if kind is not None:
            (folder / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")


def findings(root):
    """Of this machine with these folders."""
    return check(LocalProbes("here"), root, devices_of(root))


def test_a_machine_without_adapters_is_skipped(root):
    (found,) = findings(root)
    assert found.verdict is Verdict.skipped and "no node has" in found.evidence


def test_active_ports_are_sound(root):
    add_port(root, "mlx5_0")
    (found,) = findings(root)
    assert found.verdict is Verdict.ok
    assert found.evidence == "mlx5_0:1 ACTIVE, LinkUp, InfiniBand, 400 Gb/sec (4X NDR)"


@pytest.mark.parametrize("folder", ["there", "empty", "missing"])
@pytest.mark.parametrize(
    ("disable", "verdict"), [(None, Verdict.fail), ("0", Verdict.fail), ("1", Verdict.warn)]
)
def test_ports_whose_devices_cannot_be_opened_are_told(root, monkeypatch, folder, disable, verdict):
    """As in a container without them: its ports look active all the same."""
    if disable is not None:
        monkeypatch.setenv("NCCL_IB_DISABLE", disable)
    add_port(root, "mlx5_0")
    device = devices_of(root) / "uverbs0"
    device.unlink()
    if folder == "missing":
        devices_of(root).rmdir()
    elif folder == "there":
        device.mkdir()
    fabric = look(root, devices_of(root))
    both = judge({"here": fabric, "there": fabric})
    (alone,) = findings(root)
    why = f"{device} cannot" if folder == "there" else f"there is no {device.parent}/uverbs*"
    for found in (*both, alone):
        assert f"the kernel shows mlx5_0:1, but {why}" in found.evidence
        assert "--device=/dev/infiniband" in found.advice and "NCCL_IB_DISABLE=1" in found.advice
    assert [found.verdict for found in both] == [verdict] * 2
    assert alone.verdict is Verdict.warn  # NCCL needs none of it within a node


def test_one_device_that_can_be_opened_is_enough(root):
    """A pod may use its own adapter alone, and sees the others' ports."""
    add_port(root, "mlx5_0")
    (devices_of(root) / "uverbs1").touch()
    (devices_of(root) / "uverbs0").unlink()
    (devices_of(root) / "uverbs0").mkdir()
    (found,) = findings(root)
    assert found.verdict is Verdict.ok


def test_a_port_that_is_down_beside_others_is_a_warning(root):
    add_port(root, "mlx5_0")
    add_port(root, "mlx5_1", state="1: DOWN", physical="3: Disabled")
    (found,) = findings(root)
    assert found.verdict is Verdict.warn and "mlx5_1:1 DOWN, Disabled" in found.evidence
    assert "ibstat" in found.advice and "NCCL_IB_HCA=^=mlx5_1:1" in found.advice


def test_the_only_port_being_down_is_a_failure(root):
    add_port(root, "mlx5_0", state="2: INIT")
    (found,) = findings(root)
    assert found.verdict is Verdict.fail and "no subnet manager" in found.advice


def test_a_port_that_is_down_and_chosen_is_a_failure(root, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    add_port(root, "mlx5_0")
    add_port(root, "mlx5_1", state="1: DOWN")
    (found,) = findings(root)
    assert found.verdict is Verdict.fail and "named in NCCL_IB_HCA" in found.evidence


@pytest.mark.parametrize(
    ("spec", "verdict"),
    [
        ("mlx5_9", Verdict.fail),
        ("=mlx5", Verdict.fail),
        ("mlx5_0:2", Verdict.fail),
        ("^mlx5", Verdict.warn),
    ],
)
def test_a_choice_of_no_adapter_is_told_with_those_there_are(root, monkeypatch, spec, verdict):
    monkeypatch.setenv("NCCL_IB_HCA", spec)
    add_port(root, "mlx5_0")
    add_port(root, "mlx5_1")
    (found,) = findings(root)
    assert found.verdict is verdict
    assert f"NCCL_IB_HCA={spec} leaves none" in found.evidence
    assert "(mlx5_0:1, mlx5_1:1)" in found.evidence
    assert "Unset NCCL_IB_HCA, or export NCCL_IB_HCA=mlx5_0" in found.advice


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mlx5", ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_10:1"]),
        ("=mlx5_1", ["mlx5_1:1"]),
        ("=mlx5_1:1,mlx5_0", ["mlx5_0:1", "mlx5_1:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1"]),
    ],
)
def test_adapter_patterns_are_nccls(root, monkeypatch, spec, expected):
    for device in ("mlx5_0", "mlx5_1", "mlx5_10"):
        add_port(root, device)
    monkeypatch.setenv("NCCL_IB_HCA", spec)
    assert [port.name for port in used_ports(look(root, devices_of(root)))] == expected


def test_infiniband_that_is_switched_off_is_not_judged(root, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    add_port(root, "mlx5_0", state="1: DOWN")
    (found,) = findings(root)
    assert found.verdict is Verdict.ok


@pytest.mark.parametrize(("index", "kind"), [("0", "IB/RoCE v1"), ("4", "empty"), ("9", "empty")])
def test_a_gid_index_that_is_no_roce_v2_is_named(root, monkeypatch, index, kind):
    monkeypatch.setenv("NCCL_IB_GID_INDEX", index)
    add_port(root, "mlx5_0", layer="Ethernet")
    (found,) = findings(root)
    assert found.verdict is Verdict.fail
    assert f"NCCL_IB_GID_INDEX={index} is {kind} on mlx5_0:1" in found.evidence
    assert "needs one of 1, 3" in found.evidence
    assert "export NCCL_IB_GID_INDEX=3" in found.advice


@pytest.mark.parametrize("index", ["3", "-1"])
def test_a_right_gid_index_is_sound(root, monkeypatch, index):
    monkeypatch.setenv("NCCL_IB_GID_INDEX", index)
    add_port(root, "mlx5_0", layer="Ethernet")
    (found,) = findings(root)
    assert found.verdict is Verdict.ok


def test_infiniband_itself_has_no_gid_index(root, monkeypatch):
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "0")
    add_port(root, "mlx5_0")
    (found,) = findings(root)
    assert found.verdict is Verdict.ok
