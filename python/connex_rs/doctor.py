"""What an engine on this host would do, and whether it works: `python -m connex_rs doctor`.

UCX is looked at in a process of its own: a library that cannot be loaded, or that ends the process,
is a finding like any other.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

from connex_rs import __version__, _connex_rs, _gpus, _ucx

INFINIBAND = "/sys/class/infiniband"
# What a program that loads UCX or moves a megabyte may take on a busy host.
PATIENCE_S = 60
# What an exchange between two processes moves.
PROOF_BYTES = 1 << 20

_LOOK_AT_UCX = """
import json, sys
import connex_rs
from connex_rs import _connex_rs
found = {}
try:
    found["ucx"] = _connex_rs.ucx()
    found["plan"] = _connex_rs.ucx_plan(sys.argv[1])
except (RuntimeError, ValueError) as error:
    found["error"] = str(error)
print(json.dumps(found))
"""

_OWNER = """
import os, sys
import connex_rs
engine = connex_rs.Engine("doctor", 0, listen_ip=sys.argv[2], transport=sys.argv[1])
size = int(sys.argv[3])
data = os.urandom(size)
ptr = engine.allocate_managed_buffer(size)
engine.write_bytes_to_buffer(ptr, data, size)
print(engine.local_url, ptr, flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(data)
"""

_READER = """
import json, sys, time
import connex_rs
transport, ip, url = sys.argv[1:4]
ptr, size = int(sys.argv[4]), int(sys.argv[5])
engine = connex_rs.Engine("doctor", 1, listen_ip=ip, transport=transport)
here = engine.allocate_managed_buffer(size)
begun = time.monotonic()
code = engine.transfer_sync_read(url, here, ptr, size, 20000)
first = time.monotonic() - begun
times = []
for _ in range(20 if code == 0 else 0):
    begun = time.monotonic()
    code = code or engine.transfer_sync_read(url, here, ptr, size, 20000)
    times.append(time.monotonic() - begun)
stats = engine.stats()
print(json.dumps({
    "code": code, "first_ms": first * 1e3, "best_ms": min(times, default=0.0) * 1e3,
    "paths": stats["paths"], "warnings": stats["warnings"],
}), flush=True)
sys.stdout.buffer.write(engine.read_bytes_from_buffer(here, size))
"""


def run(ip: str | None = None, as_json: bool = False) -> int:
    """Examines the host and prints what was found; 0 if all is well, else 1."""
    report = examine(ip)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(text(report)))
    return 0 if report["ok"] else 1


def examine(ip: str | None = None) -> dict[str, Any]:
    """Everything that `doctor` tells, as plain data. `problems` are what makes the exit code 1."""
    problems: list[str] = []
    warnings: list[str] = []
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "host": f"{platform.system()} {platform.release()} {platform.machine()}",
        "problems": problems,
        "warnings": warnings,
        "rdma_devices": [],
        "gpus": _gpus.look(),
        "interfaces": [
            {"name": name, "address": address} for name, address in _connex_rs.interfaces()
        ],
        "variables": {
            name: _shown(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(("CONNEX_RS_", "UCX_"))
        },
    }
    report["address"] = _address(ip, report["interfaces"], problems, warnings)
    warnings.extend(report["gpus"]["warnings"])
    _look_at_ucx(report, problems, warnings)
    _choose_transport(report, problems, warnings)
    for transport in [report["transport"]] if report["transport"] else []:
        report["proof"] = _prove(transport, _listen_ip(report))
        if report["proof"]["error"]:
            problems.append(f"the proof over {transport} failed: {report['proof']['error']}")
        warnings.extend(w for w in report["proof"].get("warnings", []) if w not in warnings)
    report["ok"] = not problems
    return report


def _shown(name: str, value: str) -> str:
    """The value of a variable; never a secret that somebody put there by mistake."""
    return "(not shown)" if "SECRET" in name and not name.endswith("_FILE") else value


def _rdma_ports(
    usable: list[tuple[str, list[str]]], root: str = INFINIBAND
) -> list[dict[str, Any]]:
    """The RDMA ports that the kernel shows, with their states. `usable` are those that an engine would use, with their
    interfaces, as `ucx_plan` tells them."""
    interfaces = dict(usable)
    ports = []
    for device in _entries(root):
        for port in _entries(os.path.join(root, device, "ports")):
            name = f"{device}:{port}"
            ports.append(
                {
                    "name": name,
                    "state": _line(os.path.join(root, device, "ports", port, "state")),
                    "usable": name in interfaces,
                    "interfaces": interfaces.get(name, []),
                }
            )
    return ports


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _line(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _address(
    ip: str | None, interfaces: list[dict[str, str]], problems: list[str], warnings: list[str]
) -> dict[str, str | None]:
    """The address that an engine would be told, and the interface that carries it."""
    if ip is None:
        try:
            ip = _connex_rs.default_ip()
            why = "the source address of the default route"
        except ValueError as error:
            warnings.append(str(error))
            ip, why = "127.0.0.1", "there is no default route"
    else:
        why = "given with --ip"
    carrier = next((i["name"] for i in interfaces if i["address"] == ip), None)
    if carrier is None:
        known = ", ".join(f"{i['address']} ({i['name']})" for i in interfaces) or "none"
        problems.append(f"no interface of this host carries {ip}; its addresses are {known}")
    return {"ip": ip, "interface": carrier, "why": why}


def _look_at_ucx(report: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    report["ucx"] = None
    report["ucx_error"] = None
    report["ucx_plan"] = None
    report["ucx_wheel"] = _ucx.wheel_dir()
    result = _python(_LOOK_AT_UCX, report["address"]["ip"])
    if result.returncode != 0:
        report["ucx_error"] = (
            f"loading it ended the process with {result.returncode}: {_last_line(result.stderr)}"
        )
        problems.append(f"UCX: {report['ucx_error']}")
        return
    found = json.loads(result.stdout.splitlines()[-1])
    report["ucx"] = found.get("ucx")
    report["ucx_error"] = found.get("error")
    report["ucx_plan"] = found.get("plan")
    plan = report["ucx_plan"] or {"warnings": [], "obstacles": [], "rdma_devices": []}
    warnings.extend(plan["warnings"])
    problems.extend(plan["obstacles"])
    report["rdma_devices"] = _rdma_ports(plan["rdma_devices"])
    if report["ucx"] and report["ucx_error"]:
        problems.append(f"UCX: {report['ucx_error']}")
    active = [port["name"] for port in report["rdma_devices"] if "ACTIVE" in port["state"]]
    if active and report["ucx"] is None:
        problems.append(
            f"RDMA devices are there ({', '.join(active)}) but no UCX that could use them: "
            "install the system's UCX with verbs, "
            "or name one with CONNEX_RS_UCX"
        )


def _choose_transport(report: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    """The transport that an engine without arguments gets: asked of one."""
    ip = _listen_ip(report)
    result = _python(
        "import connex_rs, sys\n"
        "try:\n"
        "    with connex_rs.Engine('doctor', 0, listen_ip=sys.argv[1]) as engine:\n"
        "        print(engine.stats()['transport'])\n"
        "except (RuntimeError, ValueError) as error:\n"
        "    sys.exit(str(error))\n",
        ip,
    )
    report["transport"] = None
    if result.returncode == 0:
        report["transport"] = result.stdout.split()[-1]
    else:
        problems.append(f"no engine starts on {ip}: {_last_line(result.stderr)}")
    plan = report["ucx_plan"]
    if report["transport"] == "tcp" and plan and plan["one_sided"]:
        warnings.append(
            "an RDMA device is usable, but engines use TCP here: set CONNEX_RS_TRANSPORT=ucx, "
            "or take away what asks for TCP"
        )


def _listen_ip(report: dict[str, Any]) -> str:
    """Where `doctor`'s own engines listen: on loopback, but for RDMA, which loopback is not, and where UCX_NET_DEVICES may
    leave it out. The examined address then, if this host carries it."""
    plan = report["ucx_plan"]
    elsewhere = (plan and plan["one_sided"]) or "UCX_NET_DEVICES" in report["variables"]
    if elsewhere and report["address"]["interface"]:
        return str(report["address"]["ip"])
    return "127.0.0.1"


def _prove(transport: str, ip: str) -> dict[str, Any]:
    """Moves a megabyte from one process to another of this host and compares every byte."""
    proof: dict[str, Any] = {"transport": transport, "bytes": PROOF_BYTES, "error": None}
    with _start(_OWNER, transport, ip, str(PROOF_BYTES)) as owner:
        try:
            assert owner.stdin and owner.stdout
            words = owner.stdout.readline().decode().split()
            if len(words) != 2:
                return {
                    **proof,
                    "error": f"the owner did not start: {_last_line(_rest(owner)[1].decode())}",
                }
            with _start(_READER, transport, ip, *words, str(PROOF_BYTES)) as reader:
                out, err = _rest(reader)
            line, _, read = out.partition(b"\n")
            if not line:
                return {**proof, "error": f"the reader failed: {_last_line(err.decode())}"}
            proof.update(json.loads(line))
            expected, _ = _rest(owner, b"\n")
        except subprocess.TimeoutExpired:
            return {**proof, "error": f"no answer within {PATIENCE_S} s"}
        finally:
            owner.kill()
    if proof["code"] != 0:
        proof["error"] = f"the read gave code {proof['code']}"
    elif read != expected or len(read) != PROOF_BYTES:
        proof["error"] = "the bytes that arrived are not those that were sent"
    return proof


def _start(program: str, *args: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", program, *args], stdin=pipe, stdout=pipe, stderr=pipe
    )


def _rest(process: subprocess.Popen[bytes], given: bytes | None = None) -> tuple[bytes, bytes]:
    try:
        return process.communicate(given, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def _python(program: str, *args: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *(arg or "" for arg in args)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"no answer within {PATIENCE_S} s")


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return lines[-1] if lines else "nothing was said"


def _setting_lines(settings: list[tuple[str, str, str]]) -> list[str]:
    return [f"  {variable}={value}\n      {reason}" for variable, value, reason in settings]


def _gpu_lines(found: dict[str, Any]) -> list[str]:
    lines = ["GPUs"]
    lines += [
        f"  {gpu['name']}, {gpu['address']}, {gpu['file']}"
        + ("" if gpu["open"] else " (cannot be opened)")
        for gpu in found["gpus"]
    ] or ["  none"]
    if found["driver"] or found["library"]:
        library = found["library"] or "no libcuda.so.1"
        lines.append(f"  CUDA driver {found['driver'] or 'not loaded'}, {library}")
    return lines


def text(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    address = report["address"]
    lines = [f"connex-rs {report['version']}, Python {report['python']}, {report['host']}", ""]

    lines.append("UCX")
    ucx = report["ucx"]
    if ucx:
        lines += [
            f"  version     {ucx['version']}",
            f"  path        {ucx['path']}",
            f"  chosen for  {ucx['why']}",
        ]
    else:
        lines += [f"  {line}" for line in (report["ucx_error"] or "not found").splitlines()]
        if not report["problems"]:
            lines.append(
                "  Engines use their own TCP transport. `pip install libucx-cu12` brings a UCX."
            )

    lines += ["", "Network"]
    for interface in report["interfaces"]:
        carries = interface["address"] == address["ip"]
        note = f"   <- engines listen here: {address['why']}" if carries else ""
        lines.append(f"  {interface['name']:<12}{interface['address']}{note}")
    lines += ["", "RDMA devices"]
    for port in report["rdma_devices"]:
        if port["usable"]:
            use = f"interfaces: {', '.join(port['interfaces']) or 'none'}"
        else:
            use = "not used"
        lines.append(f"  {port['name']:<12}{port['state']}; {use}")
    if not report["rdma_devices"]:
        lines.append("  none")
    lines += ["", *_gpu_lines(report["gpus"])]

    plan = report["ucx_plan"]
    if plan:
        lines += ["", f"Settings that an engine on {address['ip']} makes for UCX"]
        lines += _setting_lines(plan["settings"]) or ["  none"]
        if plan["same_host"]:
            lines += ["", "The same for peers of this host, which share memory"]
            lines += _setting_lines(plan["same_host"])
    lines += ["", "Variables that are set"]
    lines += [f"  {name}={value}" for name, value in report["variables"].items()] or ["  none"]

    proof = report.get("proof")
    if proof and not proof["error"]:
        paths = ", ".join(f"{path['path']} ({path['mode']})" for path in proof["paths"])
        lines += [
            "",
            f"Proof over {proof['transport']}",
            f"  {proof['bytes']} bytes read from another process, every byte compared",
            f"  path: {paths}",
            f"  first read with its connect {proof['first_ms']:.1f} ms, "
            f"best of the next ones {proof['best_ms']:.2f} ms",
        ]
    lines += ["", *(f"warning: {warning}" for warning in report["warnings"])]
    lines += [f"PROBLEM: {problem}" for problem in report["problems"]]
    lines.append(
        "All is well." if report["ok"] else f"{len(report['problems'])} problem(s): see above."
    )
    return lines
