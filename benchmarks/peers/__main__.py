"""`python -m benchmarks.peers`: audits the loops of libraries that only the extra `peers` installs."""

from __future__ import annotations

from importlib import import_module

try:
    for library in ("accelerate", "lightning"):
        import_module(library)
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[peers]', then run this again.") from error

from benchmarks.peers.audit import main  # after that check, which needs no torch

main()
