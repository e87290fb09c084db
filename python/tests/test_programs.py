"""The programs that come with the module: doctor, rma_bench.py, churn.py."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import connex_rs
from connex_rs import _gpus, _ucx, doctor

PYTHON = pathlib.Path(__file__).resolve().parents[1]
PATIENCE_S = 100


def run(*args, **environment):
    """Runs a program; its exit code, stdout and stderr."""
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    return result.returncode, result.stdout, result.stderr


# ---- doctor ------------------------------------------------------------------------------------------


def test_doctor_finds_all_well():
    code, out, err = run("-m", "connex_rs", "doctor", "--ip", "127.0.0.1")
    assert code == 0, out + err
    assert "every byte compared" in out and "All is well." in out
    assert "127.0.0.1   <- engines listen here: given with --ip" in out
    assert err == ""


def test_doctor_tells_programs():
    code, out, _ = run("-m", "connex_rs", "doctor", "--ip", "127.0.0.1", "--json", CONNEX_RS_X="y")
    report = json.loads(out)
    assert code == 0 and report["ok"] is True and report["problems"] == []
    assert report["address"] == {"ip": "127.0.0.1", "interface": "lo", "why": "given with --ip"}
    assert report["proof"]["code"] == 0 and report["proof"]["bytes"] == 1 << 20
    assert report["variables"]["CONNEX_RS_X"] == "y"
    assert report["version"] == connex_rs.__version__
    plan = report["ucx_plan"]
    assert not plan or bool(plan["same_host"]) is plan["shared_memory"]


def test_doctor_finds_an_address_that_is_not_there():
    code, out, _ = run("-m", "connex_rs", "doctor", "--ip", "203.0.113.77")
    assert code == 1
    assert "PROBLEM: no interface of this host carries 203.0.113.77" in out


def test_doctor_finds_a_wrong_variable():
    code, out, _ = run(
        "-m", "connex_rs", "doctor", "--ip", "127.0.0.1", CONNEX_RS_TRANSPORT="pigeon"
    )
    assert code == 1
    assert "CONNEX_RS_TRANSPORT=pigeon" in out


def test_doctor_tells_why_there_is_no_ucx():
    code, out, _ = run(
        "-m", "connex_rs", "doctor", "--ip", "127.0.0.1", "--json", CONNEX_RS_UCX="/nowhere"
    )
    report = json.loads(out)
    assert report["ucx"] is None and "/nowhere" in report["ucx_error"]
    assert code == (1 if report["rdma_devices"] else 0)


def test_doctor_tells_which_rdma_ports_are_used(tmp_path):
    for port, state in [("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")]:
        folder = tmp_path / "mlx5_0" / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    used, down = doctor._rdma_ports([("mlx5_0:1", ["ib0"])], str(tmp_path))
    assert used == {
        "name": "mlx5_0:1",
        "state": "4: ACTIVE",
        "usable": True,
        "interfaces": ["ib0"],
    }
    assert (down["name"], down["state"], down["usable"]) == ("mlx5_0:2", "1: DOWN", False)
    assert doctor._rdma_ports([], str(tmp_path / "missing")) == []


def put(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_doctor_sees_gpus_without_loading_anything(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert _gpus.look(str(tmp_path)) == {
        "gpus": [],
        "driver": None,
        "library": None,
        "warnings": [],
    }
    put(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC version:  12.2.0\n",
    )
    for number, address in enumerate(["0000:3b:00.0", "0000:af:00.0"]):
        about = f"Model: \t\t NVIDIA A40\nIRQ:   \t\t 98\nDevice Minor: \t {number}\n"
        put(tmp_path, f"proc/driver/nvidia/gpus/{address}/information", about)
    put(tmp_path, "dev/nvidia0")
    found = _gpus.look(str(tmp_path))
    assert found["driver"] == "550.54.15" and found["library"] is None
    first, second = found["gpus"]
    assert first == {
        "name": "NVIDIA A40",
        "address": "0000:3b:00.0",
        "file": "/dev/nvidia0",
        "open": True,
    }
    assert (second["file"], second["open"]) == ("/dev/nvidia1", False)
    missing, library = found["warnings"]
    assert "0000:af:00.0" in missing and "/dev/nvidia1" in missing and "--gpus all" in missing
    assert "550.54.15" in library and "libcuda.so.1" in library

    put(tmp_path, "dev/nvidia1")
    put(tmp_path, "usr/lib64/libcuda.so.1")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = _gpus.look(str(tmp_path))
    assert found["library"] == "/usr/lib64/libcuda.so.1"
    [peermem] = found["warnings"]
    assert "nvidia_peermem" in peermem
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = _gpus.look(str(tmp_path))
    assert found["warnings"] == []
    lines = doctor._gpu_lines(found)
    assert lines[1] == "  NVIDIA A40, 0000:3b:00.0, /dev/nvidia0"
    assert lines[-1] == "  CUDA driver 550.54.15, /usr/lib64/libcuda.so.1"


def test_doctor_sees_amds_gpus(tmp_path):
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0\n")
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/1/gpu_id", "34012\n")
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/1/name", "gfx90a\n")
    [gpu] = _gpus.look(str(tmp_path))["gpus"]
    assert gpu == {"name": "gfx90a", "address": "kfd node 1", "file": "/dev/kfd", "open": False}


def test_importing_and_looking_load_no_cuda():
    program = (
        "import connex_rs; from connex_rs import _gpus, doctor; _gpus.look(); "
        "print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'nvidia' in line])"
    )
    code, out, err = run("-c", program)
    assert (code, out.strip()) == (0, "[]"), err


def test_doctor_tries_what_is_usable():
    def ip(interface="ib0", one_sided=False, variables=()):
        return doctor._listen_ip(
            {
                "address": {"ip": "192.0.2.1", "interface": interface},
                "ucx_plan": {"one_sided": one_sided},
                "variables": dict.fromkeys(variables, "x"),
            }
        )

    assert ip() == ip(None, True) == "127.0.0.1"
    assert ip(one_sided=True) == ip(variables=["UCX_NET_DEVICES"]) == "192.0.2.1"


def test_doctor_shows_no_secret():
    assert doctor._shown("CONNEX_RS_SECRET", "hush") == "(not shown)"
    assert doctor._shown("CONNEX_RS_SECRET_FILE", "/etc/secret") == "/etc/secret"


@pytest.mark.parametrize("args", [[], ["surgeon"], ["doctor", "--ip"]])
def test_wrong_arguments_of_the_module(args):
    code, _, err = run("-m", "connex_rs", *args)
    assert code == 2 and "usage" in err


# ---- the UCX wheel ------------------------------------------------------------------------------------


def test_the_ucx_wheel_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "libucx"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "libucx", raising=False)
    assert _ucx.wheel_dir() is None, "a package without a library is none"
    (package / "lib" / "libucp.so.0").touch()
    assert _ucx.wheel_dir() == str(package)


# ---- rma_bench.py and churn.py ------------------------------------------------------------------------


def test_bench(transport):
    code, out, err = run(
        PYTHON / "rma_bench.py",
        *["local", "--ip", "127.0.0.1", "--transport", transport, "--count", 20],
        *["--sizes", "4K", "1M", "--steps", "64K", "1000001", "--json"],
    )
    assert code == 0, err
    channels = json.loads(out)["channels"]
    lines = [(row["bytes"], row["in_flight"]) for row in channels]
    assert lines == [(65536, 1), (65536, 4), (1000001, 1), (1000001, 4)]
    for row in channels:
        assert (row["sent_p50_us"] is None) == (row["in_flight"] > 1)
        assert 0 < row["answered_p50_us"] <= row["answered_p99_us"] and row["gb_s"] > 0
    rows = json.loads(out)["rows"]
    assert [row["bytes"] for row in rows] == [4096, 1 << 20]
    assert all(0 < row["p50_us"] <= row["p99_us"] and row["gb_s"] > 0 for row in rows)


def test_bench_says_plainly_that_there_is_no_gpu():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is one")
    code, out, err = run(PYTHON / "rma_bench.py", "local", "--ip", "127.0.0.1", "--dev", "cuda:0")
    assert code == 1 and out == ""
    assert err.startswith("There is no GPU cuda:0") and "Traceback" not in err


@pytest.mark.parametrize(
    "args", [["local"], ["local", "--ip", "127.0.0.1", "--sizes", "x"], ["reader", "--ip", "::1"]]
)
def test_wrong_arguments_of_the_bench(args):
    code, _, err = run(PYTHON / "rma_bench.py", *args)
    assert code == 2 and "usage" in err and "Traceback" not in err


def test_churn(transport):
    code, out, err = run(
        PYTHON / "churn.py", "--self", "--times", 5, "--transport", transport, "--json"
    )
    assert code == 0, err
    seen = json.loads(out)["survivor"]
    expected = {"joined": 1, "joined (rejoin)": 4, "up": 5, "failed": 5}
    assert seen["events"] == expected
    assert not any("timeout" in reason for reason in seen["reasons"]), "a kill is a death"
    assert seen["stats"]["live_peers"] == 0 and seen["stats"]["rejoins"] == 4
    assert seen["at_the_end"]["descriptors"] <= seen["after_the_first_life"]["descriptors"] + 2


def test_churn_wants_a_url():
    code, _, err = run(PYTHON / "churn.py")
    assert code == 2 and "give a URL" in err
