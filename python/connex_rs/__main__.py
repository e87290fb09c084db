"""`python -m connex_rs doctor`."""

import argparse
import sys
from typing import List, Optional

from connex_rs import __version__


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m connex_rs", description="Chores around connex-rs."
    )
    parser.add_argument("--version", action="version", version=f"connex-rs {__version__}")
    chores = parser.add_subparsers(dest="chore", metavar="CHORE", required=True)
    doctor = chores.add_parser(
        "doctor",
        help="say what an engine on this host would do, and prove that it works",
        description="Says what an engine on this host would do, warns of what makes it slower "
        "or less safe than it could be, "
        "and moves a megabyte through loopback between two processes as proof. "
        "Exits with 0 if all is well, with 1 if "
        "something is wrong.",
    )
    doctor.add_argument(
        "--ip",
        help="the address that an engine would listen on (default: that of the default route)",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    from connex_rs import doctor as chore

    return chore.run(ip=options.ip, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
