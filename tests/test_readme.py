"""What the README says: its commands run, its snippets too; `python common.py`; bad command lines, many of them."""

import contextlib
import io
import random
import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ROOT

import exp_allen_cahn
import exp_function_fit
import exp_high_dim
import exp_ldc
import exp_ns_torus
import exp_parabolic
import exp_spectral_bias

README = (ROOT / "README.md").read_text()
SCRIPTS = [exp_allen_cahn, exp_function_fit, exp_high_dim, exp_ldc, exp_ns_torus, exp_parabolic, exp_spectral_bias]


def commands():
    """Every command of the README that starts python or torchrun, in code blocks and in the text."""
    text = README.replace("&&", "\n").replace("\\\n", " ")
    found = re.findall(r"(?:^|`)((?:python|torchrun) [^`\n#]+)", text, re.M)
    return sorted({c.strip() for c in found} - {"python3 -m venv .venv", "python common.py"})  # test_self_report


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
    done = subprocess.run([sys.executable, "common.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
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
        "sample": lambda g: {"x": torch.rand(6, 2, generator=g, dtype=torch.get_default_dtype())},
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
            if ".double()" in line:
                torch.set_default_dtype(torch.float64)
                here |= {"net": nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))}
            try:
                exec(line, here)
            except SyntaxError:  # a statement over several lines: the whole snippet at once
                here = dict(names)
                exec(text, here)
                names |= here
                ran += 1
                break
            finally:
                torch.set_default_dtype(torch.float32)
            names |= {k: v for k, v in here.items() if k not in ("net", "x") or '"t x y"' not in line}
            ran += 1
    assert ran >= 6


def test_deepxde_snippet():
    pytest.importorskip("deepxde", reason="DeepXDE is no requirement; install it to run this snippet")
    (text,) = [t for t in snippets() if "deepxde" in t]
    exec(text, {})


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_tells_what_to_expect(script, capsys):
    """Which example, the paper's value, ours, and the minutes of each preset on a CPU."""
    with pytest.raises(SystemExit) as e:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0
    for pattern in (r"^Example \d", r"(?i)\bpaper\b", r"(?i)\bours\b", r"Minutes on (one|2) CPU core", "laptop", "smoke"):
        assert re.search(pattern, text, re.M), pattern


INTEGERS = ["--steps", "--batch", "--width", "--seeds", "--save-steps"]
FLOATS = ["--lr", "--gamma", "--C", "--eps", "--damping", "--save-seconds"]
CHOICES = ["--sfli", "--preset", "--optimizer", "--dtype", "--compile"]
OWN = {
    exp_allen_cahn: (["--layers", "--initial"], ["--fourier", "--ic-weight"], ["--arch"]),
    exp_function_fit: ([], [], ["--figure"]),
    exp_high_dim: (["--dims", "--search-steps", "--search-seeds"], ["--C-grid"], []),
    exp_ldc: (["--layers", "--walls"], ["--fourier", "--Re", "--steepness"], ["--arch"]),
    exp_ns_torus: (["--layers", "--initial", "--windows"], ["--fade"], ["--arch", "--formulation"]),
    exp_parabolic: (["--dims"], [], []),
    exp_spectral_bias: ([], [], []),
}
CONFLICTS = ["--all --sfli", "--sfli --gamma 1 --C 1", "--damping 1", "--momentum 0.5", "--resume", "--device tpu",
             "--device cuda:99", "--optimizer ng --dtype float32", "--optimizer ng --seeds 2", "--sfl", "surplus",
             "--optimizer ng --compile on", "--optimizer soap --seeds 2", "--seed -1",
             "--momentum 1 --optimizer ng"]  # fmt: skip


def bad_line(rng, script):
    """One thing wrong, among others that are right."""
    integers, floats, choices = ([*shared, *own] for shared, own in zip((INTEGERS, FLOATS, CHOICES), OWN[script]))
    good = [
        ["--eps", "1e-5"],
        ["--no-plot"],
        ["--seed", "3"],
        ["--lr", "0.01"],
        ["--dtype", "float64"],
        ["--compile", "off"],
    ]
    kind = rng.randrange(5)
    if kind == 0:
        wrong = [
            rng.choice(integers),
            rng.choice(["0", "-3", "x", "1.5", "nan", "1e3", "", "0x10", "--", "99999999999999999999x"]),
        ]
    elif kind == 1:
        wrong = [rng.choice(floats), rng.choice(["0", "-1", "nan", "inf", "x", "1,5", "", "-inf", "1e999"])]
    elif kind == 2:
        wrong = [rng.choice(choices), rng.choice(["nothing", "GAUSS", "", "0", "adamw", "gauss,cos"])]
    elif kind == 3:
        wrong = [rng.choice([*integers, *floats, *choices[1:], "--out", "--device"])]  # no value
    else:
        wrong = rng.choice(CONFLICTS).split()
    before = [word for words in rng.sample(good, rng.randint(0, 3)) if words[0] not in wrong for word in words]
    return before + wrong


@pytest.mark.parametrize("script", SCRIPTS)
def test_fuzz(script, tmp_path, monkeypatch):
    """50 seeded bad command lines per script, 350 in all: status 2, one line on stderr, no traceback, no files."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(SCRIPTS.index(script))
    dtype = torch.get_default_dtype()
    for _ in range(50):
        line = bad_line(rng, script)
        preset = [] if "--preset" in line else ["--preset", "smoke"]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                script.main([*preset, *line])
                status = 0
            except SystemExit as e:
                status = e.code
        torch.set_default_dtype(dtype)
        assert status == 2 and err.getvalue().count("\n") == 1 and "Traceback" not in err.getvalue(), (
            line,
            err.getvalue(),
        )
        assert not list(tmp_path.iterdir()), line
