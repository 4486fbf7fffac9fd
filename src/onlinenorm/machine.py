"""Where the numbers come from: processor, caches, versions."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onlinenorm

_UNKNOWN_CACHE = 32 << 20


def caches() -> dict[str, int]:
    """Sizes in bytes of the data caches that the first core uses, as {"L1": 49152, ...}; empty where unknown.

    The kernel's own table, not sysconf: on a virtual machine the latter may count the caches of the whole host.
    """
    sizes = {}
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (cache / "type").read_text().strip() != "Instruction" and (cache / "size").is_file():
            number, unit = re.fullmatch(r"(\d+)([KMG]?)\s*", (cache / "size").read_text()).groups()  # type: ignore[union-attr]
            sizes["L" + (cache / "level").read_text().strip()] = int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]
    return sizes


def last_level_cache() -> int:
    """Bytes of the largest cache; 32 MiB where unknown."""
    return max(caches().values(), default=_UNKNOWN_CACHE)


def describe() -> dict[str, Any]:
    """The machine, for the record."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": caches(),
        "last_level_cache": last_level_cache(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores other work keeps busy while this process sleeps; 0 where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0

    def idle_and_all() -> tuple[int, int]:
        ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)  # idle and waiting for a disk; stolen by the host counts as busy

    idle_before, all_before = idle_and_all()
    time.sleep(seconds)
    idle, all_ = idle_and_all()
    return (os.cpu_count() or 1) * (1 - (idle - idle_before) / max(1, all_ - all_before))


def versions() -> dict[str, str]:
    """Of everything that shapes the numbers."""
    return {
        "onlinenorm": onlinenorm.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
    }


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, "-dirty" where it has changes; None if installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() or None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()
