"""GPU memory from Python, on the stand-in driver of `tests/cuda-stand-in`: each test runs in a process of its own, with the driver
loaded before the engine, as torch or CuPy would have loaded the real one.
"""

import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "cuda-stand-in"
PATIENCE_S = 100

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the stand-in driver is for Linux on x86-64",
)

# What the tests' processes begin with: the driver, memory of its devices, two engines.
PRELUDE = """
import ctypes, os, sys, time
folder = sys.argv[1]
ctypes.CDLL(folder + "/libnvidia-ml.so.1", ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(folder + "/libcuda.so.1", ctypes.RTLD_GLOBAL)
import connex_rs

def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)

call("cuInit", 0)
contexts = []
for device in (0, 1):
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    contexts.append(context)

class Memory:
    "Bytes of a device."

    def __init__(self, device, size, managed=False):
        self.context, ptr = contexts[device], ctypes.c_uint64()
        size = ctypes.c_size_t(size)
        call("cuCtxPushCurrent_v2", self.context)
        if managed:
            call("cuMemAllocManaged", ctypes.byref(ptr), size, 1)
        else:
            call("cuMemAlloc_v2", ctypes.byref(ptr), size)
        call("cuCtxPopCurrent_v2", None)
        self.ptr = ptr.value

    def set(self, data):
        call("cuCtxPushCurrent_v2", self.context)
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.ptr), data, ctypes.c_size_t(len(data)))
        call("cuCtxPopCurrent_v2", None)

    def get(self, size):
        data = ctypes.create_string_buffer(size)
        call("cuCtxPushCurrent_v2", self.context)
        call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.ptr), ctypes.c_size_t(size))
        call("cuCtxPopCurrent_v2", None)
        return data.raw

def engine(stage, **options):
    return connex_rs.Engine("gpu", stage, listen_ip="127.0.0.1", transport=TRANSPORT, **options)

SIZE = (2 << 20) + 3
SIZES = [1, 4095, 4096, 32769, 300000, SIZE]
data = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The folder of the stand-in, built with the system's compiler."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.fail("no C compiler: the stand-in driver cannot be built")
    folder = tmp_path_factory.mktemp("cuda-stand-in")
    for source, name in [("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")]:
        options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        files = ["-o", folder / name, SOURCES / source]
        command = [cc, *options, f"-Wl,-soname,{name}", *files, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture
def on_gpu(script, driver):
    """Runs Python text after the prelude; fails unless it ends well."""

    def run(text):
        process = script(PRELUDE + text, driver)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + err
        return out

    return run


def test_between_devices_and_hosts(on_gpu):
    on_gpu(
        """
a, b = engine(0), engine(1)
here, there, managed = Memory(0, SIZE), Memory(1, SIZE), Memory(0, SIZE, managed=True)
host = a.allocate_managed_buffer(SIZE)
for place in (here, managed):
    assert a.register_memory(place.ptr, SIZE) == 0
assert b.register_memory(there.ptr, SIZE) == 0
for size in SIZES:
    for local in (here.ptr, managed.ptr, host):
        sent = bytes(reversed(data[:size]))
        assert a.write_bytes_to_buffer(local, sent, size) == 0
        assert a.transfer_sync_write(b.local_url, local, there.ptr, size) == 0
        assert there.get(size) == sent, size
        there.set(data[:size])
        assert a.transfer_sync_read(b.local_url, local, there.ptr, size) == 0
        assert a.read_bytes_from_buffer(local, size) == data[:size], size
assert a.stats()["staged_bytes"] > 0 and b.stats()["staged_bytes"] > 0
assert a.unregister_memory(here.ptr) == 0 and a.register_memory(here.ptr, SIZE) == 0
a.close(); b.close()
"""
    )


def test_signals_and_chains(on_gpu):
    on_gpu(
        """
a, b = engine(0), engine(1)
here, there = Memory(0, SIZE), Memory(1, SIZE)
flag, word = b.allocate_managed_buffer(8), a.allocate_managed_buffer(8)
assert a.register_memory(here.ptr, SIZE) == 0 and b.register_memory(there.ptr, SIZE) == 0
here.set(data)
sent = a.put_signal(b.local_url, here.ptr, there.ptr, SIZE, b"there")
assert b.recv_msg(20000)[1] == b"there" and there.get(SIZE) == data
assert sent.wait(20000)
here.set(bytes(SIZE))
a.write_bytes_to_buffer(word, b"12345678", 8)
chain = a.put_chain(b.local_url, [(here.ptr, there.ptr, SIZE), (word, flag, 8)])
end = time.monotonic() + 20
while b.read_bytes_from_buffer(flag, 8) != b"12345678":
    assert time.monotonic() < end
assert there.get(SIZE) == bytes(SIZE)
assert chain.wait(20000)
a.close(); b.close()
"""
    )


def test_small_transfers_without_staging(on_gpu):
    on_gpu(
        """
a, b = engine(0, allow_staging=False), engine(1)
here, there = Memory(0, SIZE), Memory(1, SIZE)
assert a.register_memory(here.ptr, SIZE) == 0 and b.register_memory(there.ptr, SIZE) == 0
for transfer in (a.transfer_sync_read, a.transfer_sync_write):
    assert transfer(b.local_url, here.ptr, there.ptr, 4095) == -4
    assert transfer(b.local_url, here.ptr, there.ptr, 4096) == 0
try:
    a.get_async(b.local_url, here.ptr, there.ptr, 4095).wait()
except ValueError as error:
    assert "allow_staging" in str(error)
else:
    raise AssertionError("not refused")
assert b.transfer_sync_read(a.local_url, there.ptr, here.ptr, 100) == -4
assert a.stats()["failures"] == 0
a.close(); b.close()
"""
    )


# A module that looks like as much of CuPy as the benchmark uses, with memory of the stand-in.
CUPY = """
import contextlib, types

uint8 = "uint8"
_device = [0]

class _Device:
    def __init__(self, number): self.number = number
    def __enter__(self): _device.append(self.number); return self
    def __exit__(self, *_): _device.pop()
    def synchronize(self): pass

class _Runtime:
    CUDARuntimeError = RuntimeError
    @staticmethod
    def getDeviceCount(): return 2

cuda = types.SimpleNamespace(Device=_Device, runtime=_Runtime)

def zeros(size, dtype):
    from __main__ import Memory
    memory = Memory(_device[-1], size)
    return types.SimpleNamespace(memory=memory, data=types.SimpleNamespace(ptr=memory.ptr))
"""


def test_bench_on_devices(on_gpu, tmp_path):
    """The memory of `rma_bench.py --dev cuda:0 --peer-dev cuda:1`, and a read between the two."""
    (tmp_path / "cupy.py").write_text(CUPY)
    bench = ROOT / "python" / "rma_bench.py"
    out = on_gpu(
        f"""
sys.path[:0] = [{str(tmp_path)!r}, {str(bench.parent)!r}]
sys.modules["torch"] = None
import rma_bench
a, b, size = engine(2), engine(3), 1 << 20
with rma_bench.memory(a, "cuda:0", size) as here, rma_bench.memory(b, "cuda:1", size) as there:
    assert a.transfer_sync_read(b.local_url, here, there, size) == 0
    assert a.stats()["staged_bytes"] == size == b.stats()["staged_bytes"]
    print("moved")
a.close(); b.close()
"""
    )
    assert "moved" in out
