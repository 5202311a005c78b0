"""The compose file follows the Compose specification, and publishes nothing but to this machine.

The schema is the specification's own, from the package check-jsonschema; no engine has read it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from build_context import FOLDER, command, values

FILE = FOLDER / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
every_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
SHARED_DEVICES = {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}


def follows_the_specification(file: Path) -> bool:
    checker = Path(sys.executable).parent / "check-jsonschema"
    words = [checker, "--builtin-schema", "vendor.compose-spec", file]
    return subprocess.run(words, capture_output=True, timeout=60).returncode == 0


def test_the_file_follows_the_specification():
    assert follows_the_specification(FILE)


def test_a_file_that_does_not_is_found(tmp_path):
    bad = tmp_path / "compose.yaml"
    bad.write_text(FILE.read_text().replace("start_period:", "starting_time:"))
    assert not follows_the_specification(bad)


def test_there_is_one_service_for_each_machine():
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "cpu": ["cpu"],
        "a2": ["a2"],
        "a3": ["a3"],
    }


@every_service
def test_ports_are_published_on_loopback_only(service):
    assert [port.rsplit(":", 1) for port in service["ports"]] == [
        ["127.0.0.1:${PORT:-30000}", values("Dockerfile", "EXPOSE")[0]]
    ]


@every_service
def test_health_is_asked_for_as_the_image_says(service):
    image = Path(service["build"]["dockerfile"]).name
    assert service["healthcheck"]["test"] == ["CMD", *command(image, "HEALTHCHECK")]


@every_service
def test_nothing_more_is_allowed_than_serving_takes(service):
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "ipc"} & service.keys()
    assert all(volume.endswith(":ro") for volume in service["volumes"])


@every_service
def test_the_image_is_built_from_the_repositorys_root(service):
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize(("name", "chip", "dies"), [("a2", "910b", 1), ("a3", "a3", 2)])
def test_an_npu_comes_with_its_devices_and_the_hosts_driver(name, chip, dies):
    service = SERVICES[name]
    assert service["build"]["args"] == {"CHIP": chip}
    assert set(service["devices"]) == SHARED_DEVICES | {f"/dev/davinci{i}" for i in range(dies)}
    assert "/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64:ro" in service["volumes"]
    assert service["group_add"]


def test_a_cpu_needs_no_device():
    assert not {"devices", "group_add"} & SERVICES["cpu"].keys()


@pytest.mark.parametrize("name", ["a2", "a3"])
def test_npu_smi_is_found_in_either_folder_that_drivers_have_it_in(name, tmp_path):
    """A file that is not there would be made, as a folder, on the machine."""
    mounted = dict(volume.split(":")[:2] for volume in SERVICES[name]["volumes"][1:])
    assert not [source for source in mounted if source.endswith("npu-smi")]
    printed = subprocess.run(
        [FOLDER / "with-cann.sh", "printenv", "PATH"],
        env={"PATH": os.environ["PATH"], "ASCEND_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    searched = printed.strip().split(":")
    for folder in ("/usr/local/bin", "/usr/local/sbin"):
        assert mounted[folder] in searched
