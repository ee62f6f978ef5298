from __future__ import annotations

import socket
from pathlib import Path

import pytest

from perdure import doctor
from perdure.doctor import Finding
from perdure.embedded.datadir import DataDir
from perdure.embedded.plan import Ports
from perdure.embedded.ports import free_ports


def test_report_counts_and_its_code_is_that_of_the_worst() -> None:
    said: list[str] = []
    assert doctor.report([Finding("ok", "a"), Finding("warning", "b", "do c")], said.append) == 0
    assert said == ["ok       a", "warning  b: do c", "", "0 faults, 1 warnings"]
    assert doctor.report([Finding("fault", "a", "b")], said.append) == 1
    said.clear()
    assert doctor.report([Finding("ok", "a")], said.append) == 0
    assert said[-1] == "all is well"


def test_old_python_is_a_fault() -> None:
    assert doctor.check_python((3, 10)).level == "fault"
    assert doctor.check_python((3, 11)).level == "ok"


def test_processor_without_avx2_is_a_fault_on_x86_only(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu sse2 avx fma f16c\n")
    found = doctor.check_processor("x86_64", info)
    assert found.level == "fault"
    assert "avx2, bmi2" in found.what
    assert "--no-model" in found.remedy
    info.write_text("flags : avx2 fma f16c bmi2\n")
    assert doctor.check_processor("x86_64", info).level == "ok"
    assert doctor.check_processor("aarch64", info).level == "ok"
    assert doctor.check_processor("x86_64", tmp_path / "none").level == "ok"


def test_missing_openmp_is_a_fault_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("sys.platform", "linux")
    found = doctor.check_openmp(load)
    assert found.level == "fault"
    assert "libgomp1" in found.remedy


def test_taken_port_is_named_with_its_holder(tmp_path: Path) -> None:
    base = free_ports(1)[0]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        ports = Ports(taken, *free_ports(4), base)
        found = doctor.check_ports(ports, tmp_path / "data")
        assert [(finding.level, str(taken) in finding.what) for finding in found] == [("warning", True)]
        assert "--port-base" in found[0].remedy


def test_ports_of_a_running_stack_are_its_own(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.open()
    data.lock()
    (found,) = doctor.check_ports(Ports(), tmp_path)
    assert found.level == "ok"
    data.unlock()


def test_disk_and_memory_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_disk(tmp_path / "not" / "yet").level in ("ok", "warning")
    monkeypatch.setattr(doctor, "DISK_GIB", 1e9)
    assert doctor.check_disk(tmp_path).level == "warning"
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 8000000 kB\nMemAvailable:    500000 kB\n")
    assert doctor.check_memory(info).level == "warning"
    info.write_text("MemAvailable: 5000000 kB\n")
    assert doctor.check_memory(info).level == "ok"
    assert doctor.check_memory(tmp_path / "none").level == "ok"


def test_parts_of_the_local_stack_are_found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.level for finding in doctor.check_programs()] == ["ok"] * 4
    monkeypatch.setenv("PERDURE_MODEL_PATH", str(tmp_path / "none.gguf"))
    weights = doctor.check_programs()[-1]
    assert weights.level == "fault"
    assert "none.gguf" in weights.remedy
