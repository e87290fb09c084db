from connex_rs._connex_rs import Engine as Engine
from connex_rs._connex_rs import Transfer as Transfer
from connex_rs._connex_rs import __version__ as __version__
from connex_rs._connex_rs import now_ns as now_ns

__all__ = ["Engine", "Transfer", "__version__", "now_ns"]
