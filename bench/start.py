"""How long `import connex_rs` and `Engine(...)` take in a fresh process; prints JSON."""

import json
import subprocess
import sys

COUNT = 7
FRESH = """
import time
before = time.perf_counter_ns()
import connex_rs
engine = connex_rs.Engine("start", 0, listen_ip="127.0.0.1")
took = time.perf_counter_ns() - before
engine.close()
print(took)
"""

times = []
for _ in range(COUNT):
    done = subprocess.run([sys.executable, "-c", FRESH], check=True, capture_output=True, text=True)
    times.append(int(done.stdout.split()[-1]) / 1e3)
times.sort()
row = {"measure": "start", "count": COUNT, "p50_us": times[COUNT // 2]}
print(json.dumps({"schema": "connex-bench/1", "name": "start", "results": [row]}))
