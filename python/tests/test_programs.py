"""The programs that come with the module: doctor, rma_bench.py, churn.py."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import connex_rs
from connex_rs import _ucx, doctor

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


def test_doctor_sees_the_rdma_devices_of_sysfs(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "mlx5_0" / "device" / "net" / "ib0").mkdir(parents=True)
    [device] = doctor._rdma_devices(str(tmp_path))
    assert device == {"name": "mlx5_0", "ports": {"1": "4: ACTIVE"}, "interfaces": ["ib0"]}
    assert doctor._rdma_devices(str(tmp_path / "missing")) == []


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
