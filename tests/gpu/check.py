"""Correctness on a real device, with the driver alone: `check.py IP TRANSPORT PEER_DEVICE`. `run.sh` starts it."""

import ctypes
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")

import connex_rs  # noqa: E402  the driver first, as torch would load it

SIZES = [1, 4095, 4096, 4097, 32769, 262145, (1 << 20) + 3, (64 << 20) + 5]
SIZE = max(SIZES)


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code != 0:
        sys.exit(f"{name}: CUDA error {code}")


class Memory:
    """Bytes of a device."""

    def __init__(self, device, managed=False):
        context, ptr = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        size = ctypes.c_size_t(SIZE)
        if managed:
            call("cuMemAllocManaged", ctypes.byref(ptr), size, 1)
        else:
            call("cuMemAlloc_v2", ctypes.byref(ptr), size)
        call("cuCtxSetCurrent", None)
        self.context, self.ptr = context, ptr.value

    def set(self, data):
        call("cuCtxSetCurrent", self.context)
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.ptr), data, ctypes.c_size_t(len(data)))
        call("cuCtxSetCurrent", None)

    def get(self, size):
        data = ctypes.create_string_buffer(size)
        call("cuCtxSetCurrent", self.context)
        call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.ptr), ctypes.c_size_t(size))
        call("cuCtxSetCurrent", None)
        return data.raw


def main():
    ip, transport, peer = sys.argv[1], sys.argv[2], int(sys.argv[3])
    call("cuInit", 0)

    def engine(stage, **options):
        return connex_rs.Engine("gpu", stage, listen_ip=ip, transport=transport, **options)

    a, b = engine(0), engine(1)
    device, managed, there = Memory(0), Memory(0, managed=True), Memory(peer)
    host = a.allocate_managed_buffer(SIZE)
    assert a.register_memory(device.ptr, SIZE) == 0 and a.register_memory(managed.ptr, SIZE) == 0
    assert b.register_memory(there.ptr, SIZE) == 0
    data = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
    for size in SIZES:
        for name, local in [("device", device.ptr), ("managed", managed.ptr), ("host", host)]:
            sent = data[-size:]
            assert a.write_bytes_to_buffer(local, sent, size) == 0
            assert a.transfer_sync_write(b.local_url, local, there.ptr, size) == 0, (name, size)
            assert there.get(size) == sent, f"write of {size} from {name}"
            there.set(data[:size])
            assert a.transfer_sync_read(b.local_url, local, there.ptr, size) == 0, (name, size)
            assert a.read_bytes_from_buffer(local, size) == data[:size], f"read of {size} to {name}"
    print(f"{transport}: reads and writes of {len(SIZES)} sizes: ok")

    device.set(data)
    for round_ in range(20):
        there.set(bytes(1 << 20))
        sent = a.put_signal(b.local_url, device.ptr, there.ptr, 1 << 20, b"%d" % round_)
        assert b.recv_msg(20000)[1] == b"%d" % round_
        assert there.get(1 << 20) == data[: 1 << 20], "a signal came before its data"
        assert sent.wait(20000)
    print(f"{transport}: signals after their data: ok")

    flag, word = b.allocate_managed_buffer(8), a.allocate_managed_buffer(8)
    for round_ in range(1, 21):
        there.set(bytes(1 << 20))
        value = round_.to_bytes(8, "little")
        a.write_bytes_to_buffer(word, value, 8)
        chain = a.put_chain(b.local_url, [(device.ptr, there.ptr, 1 << 20), (word, flag, 8)])
        end = time.monotonic() + 20
        while b.read_bytes_from_buffer(flag, 8) != value:
            assert time.monotonic() < end, "the flag never came"
        assert there.get(1 << 20) == data[: 1 << 20], "a flag came before its data"
        assert chain.wait(20000)
    print(f"{transport}: chains in order: ok")

    strict = engine(2, allow_staging=False)
    assert strict.transfer_sync_read(b.local_url, device.ptr, there.ptr, 4095) == -4
    assert strict.transfer_sync_read(b.local_url, device.ptr, there.ptr, 4096) == 0
    print(f"{transport}: small transfers refused without staging: ok")
    paths = {path["path"] for path in a.stats()["paths"]}
    print(f"{transport}: over {sorted(paths)}, {a.stats()['staged_bytes'] >> 20} MiB staged")
    for each in (strict, a, b):
        each.close()


main()
