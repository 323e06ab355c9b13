"""The working tree, cloned into a temporary folder with params small enough to run in seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MARK = "@@ next command"

SMALL: dict[str, dict[str, Any]] = {
    "equivalence": {"effective_batch": 8, "accum_steps": [1, 4], "cuts": [[5, 3]]},
    "ablation": {"effective_batch": 8, "accum_steps": [2, 4], "num_steps": 3},
    "throughput": {
        "accum_steps": [1, 2, 8],
        "num_steps": 4,
        "frontier": {"effective_batch": 16, "micro_batch": [1, 4, 16], "num_steps": 2},
        "repeats": 2,
    },
    "memory": {"micro_batch": [1, 16], "accum_steps": [1, 3], "budget_bytes": 2**20},
    "plan": {"target_effective_batch": 16},
    "efficiency": {"accum_steps": [1, 2, 8], "samples": 64, "seeds": [1, 2, 3]},
    "distributed": {"accum_steps": [1, 3], "num_steps": 1, "repeats": 1},
    "scaling": {
        "seeds": [1, 2, 3],
        "decay": "linear",
        "linear": {"micro_batch": 8, "accum_steps": [1, 2], "samples": 32, "base_lr": 0.05, "warmup_fraction": 0.5},
        "half_life": {"micro_batch": 8, "accum_steps": [1, 2], "samples": 32, "base_lr": 1e-3, "base_beta2": 0.95},
    },
}


@dataclass(frozen=True)
class Clone:
    """A clone of the working tree, what is not committed included."""

    root: Path

    def run(
        self, *command: str, check: bool = True, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a user with the environment active would."""
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environment
        done = subprocess.run(
            command, cwd=self.root, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done

    def script(self, *commands: str, timeout: float = 500, **environment: str) -> dict[str, str]:
        """Run commands one after the other in one shell, as if pasted; what each printed, errors included."""
        lines = ["set -e", "exec 2>&1", *(f"echo {MARK}\n{command}" for command in commands)]
        said = self.run("bash", "-c", "\n".join(lines), timeout=timeout, **environment).stdout
        return dict(zip(commands, said.split(f"{MARK}\n")[1:], strict=True))

    def take_environment(self) -> None:
        """Make this Python's environment the clone's .venv, so that make installs nothing."""
        (self.root / ".venv").mkdir()
        for entry in Path(sys.prefix).iterdir():
            (self.root / ".venv" / entry.name).symlink_to(entry)
        installed = self.root / ".venv/.installed"
        installed.unlink(missing_ok=True)
        installed.touch()

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments).stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("-c", "user.name=n", "-c", "user.email=n@example.org", "commit", "--quiet", "--message", message)

    def restore(self) -> None:
        """Put everything back to what was committed; what git ignores stays."""
        self.git("reset", "--quiet", "--hard")
        self.git("clean", "--quiet", "--force")
        self.run("dvc", "checkout", "--force", "--quiet")

    def json(self, path: str) -> Any:
        return json.loads((self.root / path).read_text())

    def set(self, section: str, **values: Any) -> None:
        params = yaml.safe_load((self.root / "params.yaml").read_text())
        params[section].update(values)
        (self.root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text
        (self.root / path).write_text(text.replace(old, new))


def clone_working_tree(root: Path) -> Clone:
    """Every file that git tracks or would, in a new repository."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    clone = Clone(root)
    clone.git("init", "--quiet", "--initial-branch", "main")
    clone.git("config", "user.name", "n")
    clone.git("config", "user.email", "n@example.org")
    for section, values in SMALL.items():
        clone.set(section, **values)
    clone.commit("Begin")
    return clone
