"""What README.md and results/README.md say: their commands run, their snippets too; `python cli.py`."""

import math
import re
import shlex
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from conftest import ROOT

import exp_function_fit

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
        argv += ["--preset", "smoke", "--out", str(tmp_path), *([] if "basis" in command else ["--no-plot"])]
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


def test_snippets(monkeypatch, tmp_path, capsys):
    """All but DeepXDE's, one after the other in one namespace with what a user has at hand, and with few steps."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    exp_function_fit.main(["--sfli", "--preset", "smoke", "--no-plot"])

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.trunk = nn.Linear(2, 8), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    names = {"nn": nn, "mine": Mine(), "points": torch.rand(50, 2)}
    exec("from common import eps_rank, sfli_", names)
    texts = [re.sub(r"steps=[\d_]+", "steps=5", text) for text in snippets() if "deepxde" not in text]
    assert len(texts) >= 6
    for text in texts:
        exec(text, names)
    assert names["history"][-1]["step"] == 5 and names["net"].domain == [(-1.0, 1.0)] * 2
    assert names["u"].shape == (1, 1) and (tmp_path / "burgers.pt").exists()


def test_the_problem_of_the_readme_is_solved(monkeypatch, tmp_path):
    """Burgers as printed, but 600 steps: the error against Cole and Hopf's solution falls below that of u = 0 by half;
    the inverse problem finds k = 2.5."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    burgers, inverse = [text for text in snippets() if "jet(net" in text]
    exec(burgers.replace("10_000", "600").replace("every=1500", "every=90"), names)
    nu = 0.01 / math.pi
    z, w = map(torch.as_tensor, numpy.polynomial.hermite.hermgauss(60))
    t, x = torch.meshgrid(torch.linspace(0.05, 1, 20), torch.linspace(-1, 1, 101), indexing="ij")
    eta = x[..., None] - torch.sqrt(4 * nu * t)[..., None] * z
    f = torch.exp(-torch.cos(math.pi * eta) / (2 * math.pi * nu))
    u = -((w * torch.sin(math.pi * eta) * f).sum(-1) / (w * f).sum(-1)).float()
    error = lambda net: ((net(torch.stack([t, x], -1))[..., 0] - u).norm() / u.norm()).item()
    assert error(names["net"]) < 0.5
    exec(inverse, names)
    assert names["net"].k.item() == pytest.approx(2.5, rel=0.05)


def test_deepxde_snippet():
    pytest.importorskip("deepxde", reason="DeepXDE is no requirement; install it to run this snippet")
    (text,) = [t for t in snippets() if "deepxde" in t]
    names = {}
    exec(text, names)
    assert names["eps_rank"](names["net"], torch.rand(500, 2)) > 30  # of 50
