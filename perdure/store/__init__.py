"""The only SQL of the product: tables, repositories, migrations."""

from perdure.store.engine import Store, make_engine
from perdure.store.errors import InvalidCursor, StoreError, StoreRefused, StoreUnavailable

__all__ = ["InvalidCursor", "Store", "StoreError", "StoreRefused", "StoreUnavailable", "make_engine"]
