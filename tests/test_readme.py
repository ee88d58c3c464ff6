"""What README.md and results/README.md say: their commands run, their snippets too; `python cli.py`."""

import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ROOT

README = "".join((ROOT / name).read_text() for name in ("README.md", "results/README.md"))


def commands():
    """Every command that starts python or torchrun, in code blocks and in the text."""
    text = README.replace("&&", "\n").replace("\\\n", " ")
    found = re.findall(r"(?:^|`)((?:python|torchrun) [^`\n#]+)", text, re.M)
    return sorted({c.strip() for c in found} - {"python3 -m venv .venv", "python cli.py"})  # test_self_report


def test_the_readme_has_commands():
    assert len([c for c in commands() if c.startswith("python exp_")]) >= 8


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("command", commands())
def test_readme_command(command, tmp_path):
    """The command in smoke form: presets, sizes and times replaced. The long benchmark shows its help, which imports
    all it needs."""
    argv = shlex.split(command)
    if "exp_" in command:
        for flag in ("--preset", "--seeds", "--steps", "--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--rdzv-id",
                     "--rdzv-backend"):  # fmt: skip
            if flag in argv:
                del argv[argv.index(flag) : argv.index(flag) + 2]
        if "--dims" in argv:
            at = argv.index("--dims")
            end = next((k for k in range(at + 1, len(argv)) if not argv[k].isdigit()), len(argv))
            argv[at:end] = ["--dims", "5"]
        elif "exp_high_dim" in command or "exp_parabolic" in command:
            argv += ["--dims", "5"]
        argv += ["--preset", "smoke", "--out", str(tmp_path), "--no-plot"]
    elif "tests/" in command:
        argv = [*argv[:2], "--smoke" if "bench_ng" in command else "--help"]
    if argv[0] == "torchrun":
        argv[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    else:
        argv[0] = sys.executable
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("side_by_side")
def test_self_report():
    done = subprocess.run([sys.executable, "cli.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for word in (
        f"torch {torch.__version__}",
        "threads",
        "--preset auto is",
        "torch.compile",
        "gaussian_gram works",
        "ms per step",
    ):
        assert word in done.stdout, word


def snippets():
    return re.findall(r"```python\n(.*?)```", README, re.S)


def test_snippets(monkeypatch):
    """The snippets that use common.py, one after the other in one namespace with what a user has at hand."""
    monkeypatch.chdir(ROOT)
    ran = 0
    names = {
        "nn": nn,
        "torch": torch,
        "net": nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)),
        "domain": [(-1, 1), (-1, 1)],
        "x": torch.rand(6, 2),
        "points": torch.rand(50, 2),
        "w": torch.ones(8, 2),
        "b": torch.zeros(8, 2),
        "weights": torch.ones(6),
        "sample": lambda g: {"x": torch.rand(6, 2, generator=g)},
        "residuals": lambda net, batch: {"fit": net(batch["x"])[:, 0]},
    }
    exec("from common import *", names)
    for text in snippets():
        if "deepxde" in text:
            continue
        text = re.sub(r"steps=[\d_]+", "steps=3", text)
        for line in text.splitlines():
            here = dict(names)
            if '"t x y"' in line:
                here |= {"net": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), "x": torch.rand(4, 3)}
            try:
                exec(line, here)
            except SyntaxError:  # a statement over several lines: the whole snippet at once
                here = dict(names)
                exec(text, here)
                names |= here
                ran += 1
                break
            names |= {k: v for k, v in here.items() if k not in ("net", "x") or '"t x y"' not in line}
            ran += 1
    assert ran >= 6


def test_deepxde_snippet():
    pytest.importorskip("deepxde", reason="DeepXDE is no requirement; install it to run this snippet")
    (text,) = [t for t in snippets() if "deepxde" in t]
    exec(text, {})
