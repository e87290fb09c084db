"""The client's control plane, its front router, which ends with the driver: python control.py API EVENTS"""

import os
import sys
import threading

from connex import front_router


def end_with_the_driver():
    """Its standard input ends when the driver does, however that ends."""
    sys.stdin.read()
    os._exit(0)


threading.Thread(target=end_with_the_driver, daemon=True).start()
sys.argv = [sys.argv[0], "--api-address", sys.argv[1], "--event-address", sys.argv[2]]
front_router.main()
