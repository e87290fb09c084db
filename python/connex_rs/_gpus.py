"""The GPUs and the CUDA driver of this host, as its files show them: nothing is loaded and no context is made."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

# Where loaders find a driver's library, besides LD_LIBRARY_PATH.
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)


def look(root: str = "/") -> dict[str, Any]:
    """What is there: `gpus`, the `driver` of the kernel, the `library` of the process, and `warnings`.

    `root` is where /proc, /dev and /sys hang.
    """
    gpus = [_nvidia(root, folder) for folder in _sorted(root, "proc/driver/nvidia/gpus/*")]
    gpus += _amd(root)
    driver = _driver_version(root)
    library = _library(root)
    return {
        "gpus": gpus,
        "driver": driver,
        "library": library,
        "warnings": _warnings(root, gpus, driver, library),
    }


def _nvidia(root: str, folder: str) -> dict[str, Any]:
    """One GPU of the NVIDIA driver; `open` says whether this process may use its device file."""
    about = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", _text(f"{folder}/information"), re.M))
    file = f"/dev/nvidia{about.get('Device Minor', '')}"
    return {
        "name": about.get("Model", "an NVIDIA GPU"),
        "address": os.path.basename(folder),
        "file": file,
        "open": _usable(root, file),
    }


def _amd(root: str) -> list[dict[str, Any]]:
    """The GPUs of AMD's compute driver, whose nodes for processors have the number 0."""
    return [
        {
            "name": _text(f"{node}/name").strip() or "an AMD GPU",
            "address": f"kfd node {os.path.basename(node)}",
            "file": "/dev/kfd",
            "open": _usable(root, "/dev/kfd"),
        }
        for node in _sorted(root, "sys/class/kfd/kfd/topology/nodes/*")
        if _text(f"{node}/gpu_id").strip() not in ("", "0")
    ]


def _driver_version(root: str) -> str | None:
    text = _text(os.path.join(root, "proc/driver/nvidia/version"))
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found.group(1) if found else None


def _library(root: str) -> str | None:
    """The CUDA driver's library, where a loader would find it."""
    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for folder in [folder for folder in given if folder] + list(LIBRARY_FOLDERS):
        path = os.path.join(folder, "libcuda.so.1")
        if os.path.exists(os.path.join(root, path.lstrip("/"))):
            return path
    return None


def _warnings(
    root: str, gpus: list[dict[str, Any]], driver: str | None, library: str | None
) -> list[str]:
    warnings = [
        f"{gpu['name']} ({gpu['address']}) is there, but {gpu['file']} cannot be opened: "
        "a container must be given the GPU (docker run --gpus all), a user the rights"
        for gpu in gpus
        if not gpu["open"]
    ]
    if driver and not library:
        warnings.append(
            f"the NVIDIA driver {driver} is loaded, but no libcuda.so.1 was found: a container needs "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility, a host the driver's user-space package"
        )
    peers = ("sys/module/nvidia_peermem", "sys/module/nv_peer_mem")
    rdma = _sorted(root, "sys/class/infiniband/*")
    if driver and rdma and not any(os.path.isdir(os.path.join(root, peer)) for peer in peers):
        warnings.append(
            "RDMA devices may not reach GPU memory: nvidia_peermem is not loaded "
            "(modprobe nvidia-peermem), which is needed unless kernel, driver and UCX use dma-buf"
        )
    return warnings


def _usable(root: str, file: str) -> bool:
    return os.access(os.path.join(root, file.lstrip("/")), os.R_OK | os.W_OK)


def _sorted(root: str, pattern: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(root), pattern)))


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
