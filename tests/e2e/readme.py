"""README's blocks: what a reader pastes."""

from __future__ import annotations

import re

from tests.e2e.clone import ROOT

TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FILES = {name[1]: block for block in PYTHON if (name := re.match(r"# (\w+\.py)\n", block))}
"""Python blocks that are files, by name."""
EXPERIMENTS = re.findall(r"`?(dvc exp run [^`\n]+)`?", TEXT)
"""Every experiment, those in tables and sentences included."""
