#!/bin/sh
# Checks on a real CUDA device, in a few minutes. From the root, after `cargo build --release -p cxrma` and with the wheel
# installed in the Python that $PYTHON names (python3): sh tests/gpu/run.sh
# tests/gpu/expected.md says what it should print. The first argument is the address to use, 127.0.0.1 by default.
set -eu
ip=${1:-127.0.0.1}
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
# The second device, or the first again.
peer=$("$python" - <<'PY'
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
    raise SystemExit("There is no GPU on this host.")
print(min(count.value - 1, 1))
PY
)
echo "== 1: correctness from Python, devices 0 and $peer"
for transport in tcp ucx; do
    "$python" tests/gpu/check.py "$ip" "$transport" "$peer"
done
echo "== 2: figures, every byte compared"
for transport in tcp ucx; do
    timeout 100 "$target/release/cxrma" local --ip "$ip" --transport "$transport" --gpu-owner 0 --gpu-reader "$peer" \
        --sizes 1K,4K,64K,1M,16M --only latency,stream,chain --budget-ms 500
done
echo "== all checks passed"
