"""The scripts as a user runs them: smoke runs, files, resume; common.py copied alone."""

import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from conftest import ROOT

import exp_function_fit
import exp_spectral_bias
from cli import cached, load, relative_l2
from common import grid

KINDS = ["baseline", "sfli-gauss", "sfli-tanh", "sfli-cos", "sfli-hat"]
CONFIGS = {
    "function_fit": KINDS,
    "spectral_bias": KINDS,
    "allen_cahn": ["baseline", "sfli-gauss", "at", "at-sfli-gauss"],
    "ldc": ["re100-baseline", "re100-sfli-gauss"],
}
def command(*argv, cwd, **options):
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=300, **options
    )


def png(path):
    return path.stat().st_size > 5000 and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("experiment", CONFIGS)
def test_all_from_another_folder(experiment, tmp_path):
    """The real command in a fresh process and folder: every configuration, every file, the figure, the last line."""
    done = command(ROOT / f"exp_{experiment}.py", "--all", "--preset", "smoke", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    pattern = rf"RESULT {experiment} (\S+) rel_l2=[\d.e+-]+ eps_rank=[\d.]+→[\d.]+/\d+ seconds=[\d.]+"
    assert [re.fullmatch(pattern, line).group(1) for line in results] == CONFIGS[experiment]
    for config in CONFIGS[experiment]:
        folder = tmp_path / "runs" / experiment / config / "seed0"
        files = ["checkpoint.pt", "config.json", "history.csv", "result.json"]
        own = {"allen_cahn": ["fig_ac.png"], "ldc": ["fig_ldc.png"]}.get(experiment, [])
        assert sorted(p.name for p in folder.iterdir()) == sorted(files + own)
        result = json.loads((folder / "result.json").read_text())
        keys = """experiment config preset seeds steps rel_l2 rel_l2_mean eps eps_rank_initial eps_rank_final width
            seconds steps_per_second device dtype torch commit argv paper"""
        assert set(keys.split()) <= set(result) and len(result["rel_l2"]) == 1
        assert result["preset"] == "smoke" and result["argv"] == ["--all", "--preset", "smoke"]
        rows = list(csv.DictReader((folder / "history.csv").open()))
        assert [int(row["step"]) for row in rows] == list(range(21))
        assert (
            float(rows[-1]["rel_l2"]) == result["rel_l2"][0]
            and int(rows[0]["eps_rank"]) == result["eps_rank_initial"][0]
        )
    assert png(next((tmp_path / "runs" / experiment / "all/seed0").glob("fig_*.png")))


def test_figures_of_function_fit(tmp_path, capsys):
    exp_function_fit.main(["--figure", "staircase", "--preset", "smoke", "--out", str(tmp_path)])
    exp_function_fit.main(["--figure", "basis", "--preset", "smoke", "--out", str(tmp_path)])
    exp_function_fit.main(["--sfli", "hat", "--preset", "smoke", "--out", str(tmp_path)])
    assert png(tmp_path / "function_fit/staircase-baseline/seed0/fig_staircase.png")
    assert png(tmp_path / "function_fit/fig_basis.png") and png(tmp_path / "function_fit/sfli-hat/seed0/fig_fun.png")
    rows = list(csv.DictReader((tmp_path / "function_fit/staircase-baseline/seed0/history.csv").open()))
    assert {"eps_rank_1", "eps_rank_2", "eps_rank_3", "eps_rank_4"} <= set(rows[0])


def test_flags_reach_the_run(tmp_path, capsys):
    exp_spectral_bias.main(
        f"--sfli tanh --preset smoke --steps 12 --batch 30 --width 16 --lr 0.01 --seed 5 --seeds 3 --C 1.5 --eps "
        f"1e-3 --dtype float64 --compile off --no-plot --device cpu --out {tmp_path}".split()
    )
    folder = tmp_path / "spectral_bias/sfli-tanh/seeds5-7"
    config, result = (json.loads((folder / name).read_text()) for name in ("config.json", "result.json"))
    want = {
        "steps": 12,
        "batch": 30,
        "width": 16,
        "lr": 0.01,
        "seeds": [5, 6, 7],
        "C": 1.5,
        "gamma": None,
        "eps": 1e-3,
        "dtype": "float64",
    }
    assert {k: config[k] for k in want} == want
    assert len(result["rel_l2"]) == 3 and result["dtype"] == "float64" and not list(folder.glob("*.png"))
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["params"]["first.weight"]
    assert state.shape == (3, 16, 1) and state.dtype == torch.float64
    assert torch.allclose(
        state.abs(), torch.tensor(1.5 * 15 / 2, dtype=torch.float64), atol=0.2
    )  # Eq. (3.3), 12 steps on


def test_resume_of_all(tmp_path, capsys):
    """--all --resume: the finished configuration is kept, the missing one is trained."""
    arguments = ["--preset", "smoke", "--out", str(tmp_path), "--no-plot"]
    exp_function_fit.main(["--all", *arguments])
    folder = tmp_path / "function_fit"
    before = (folder / "baseline/seed0/history.csv").read_text()
    shutil.rmtree(folder / "sfli-cos")
    exp_function_fit.main(["--all", "--resume", *arguments])
    assert (folder / "sfli-cos/seed0/result.json").exists() and (folder / "baseline/seed0/history.csv").read_text() == before


def run_fit(tmp_path, *flags):
    exp_function_fit.main(["--preset", "smoke", "--no-plot", "--out", str(tmp_path), *flags])
    return tmp_path / "function_fit/baseline/seed0"


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_finished_is_lost(tmp_path, capsys):
    """Seeds side by side; a run of other settings and one that has not ended are refused, with the remedy; the same
    settings again say so; --overwrite does as told."""
    folder = run_fit(tmp_path)
    run_fit(tmp_path, "--seed", "1")
    run_fit(tmp_path, "--seed", "1", "--seeds", "2")
    assert {p.name for p in folder.parent.iterdir()} == {"seed0", "seed1", "seeds1-2"}
    before = contents(tmp_path)
    for flags in (["--steps", "10"], ["--optimizer", "soap"], ["--batch", "9"]):
        with pytest.raises(SystemExit) as e:
            run_fit(tmp_path, *flags)
        err = capsys.readouterr().err
        assert e.value.code == 2 and flags[0][2:] in err and "--overwrite" in err and err.count("\n") == 1
    assert contents(tmp_path) == before
    run_fit(tmp_path)
    assert "made anew" in capsys.readouterr().out
    run_fit(tmp_path, "--steps", "10", "--overwrite")
    assert json.loads((folder / "result.json").read_text())["steps"] == 10
    (folder / "result.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(SystemExit):
        run_fit(tmp_path, "--steps", "10")
    assert "--resume" in capsys.readouterr().err and contents(tmp_path) == before


def test_resume_with_more_steps(tmp_path, capsys):
    """A finished run of 20 goes on to 30, which is said; fewer are refused; a run of 30 has the same rows up to 20, as
    the rate is constant."""
    folder = run_fit(tmp_path / "a")
    capsys.readouterr()
    run_fit(tmp_path / "a", "--resume", "--steps", "30")
    assert "20 steps were meant; on to 30" in capsys.readouterr().out
    whole = run_fit(tmp_path / "b", "--steps", "30")
    rows = lambda f: [(r["step"], r["loss"]) for r in csv.DictReader((f / "history.csv").open())]
    assert rows(folder)[:21] == rows(whole)[:21] and rows(folder)[-1][0] == "30"
    assert json.loads((folder / "config.json").read_text())["steps"] == 30
    with pytest.raises(SystemExit) as e:
        run_fit(tmp_path / "a", "--resume", "--steps", "5")
    assert e.value.code == 2 and "--steps" in capsys.readouterr().err


def test_resume_restores_the_files(tmp_path, capsys):
    folder = run_fit(tmp_path)
    kept = {name: (folder / name).read_text() for name in ("config.json", "history.csv", "result.json")}
    for name in kept:
        (folder / name).unlink()
    run_fit(tmp_path, "--resume")
    again = {name: (folder / name).read_text() for name in kept}
    assert again["history.csv"] == kept["history.csv"] and again["config.json"] == kept["config.json"]
    assert json.loads(again["result.json"])["rel_l2"] == json.loads(kept["result.json"])["rel_l2"]


@pytest.mark.parametrize("wrong", ["key", "shape"])
def test_checkpoints_that_do_not_fit(wrong, tmp_path, capsys):
    folder = run_fit(tmp_path)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    if wrong == "key":
        del saved["optimizer"]
    else:
        saved["params"]["out.weight"] = torch.zeros(2, 2)
    torch.save(saved, folder / "checkpoint.pt")
    with pytest.raises(SystemExit) as e:
        run_fit(tmp_path, "--resume")
    err = capsys.readouterr().err
    assert e.value.code == 2 and "--resume" in err and err.count("\n") == 1


def test_a_foreign_reference_is_computed_anew(tmp_path, capsys):
    """A cache with other names, shapes or values that are not finite is not believed."""
    import numpy as np

    calls, shapes = [], {"u": (2,)}
    compute = lambda: calls.append(1) or {"u": np.ones(2)}
    for foreign in ({"v": np.ones(2)}, {"u": np.ones(3)}, {"u": np.full(2, np.nan)}):
        np.savez(tmp_path / "ref.npz", **foreign)
        assert (cached(tmp_path, "ref", shapes, compute)["u"] == 1).all()
    cached(tmp_path, "ref", shapes, compute)
    assert len(calls) == 3


def test_load(tmp_path, capsys):
    """The trained network of every script's folder, one of several seeds too, gives the error that was recorded."""
    import exp_allen_cahn
    import exp_ldc

    flags = ["--preset", "smoke", "--no-plot", "--out", str(tmp_path)]
    exp_function_fit.main(["--sfli", "--seeds", "2", *flags])
    folder = tmp_path / "function_fit/sfli-gauss/seeds0-1"
    x = grid([(-1.0, 1.0)] * 2, 100)
    for k in (0, 1):
        net = load(folder, seed=k)
        assert net.domain == [(-1.0, 1.0)] * 2
        error = relative_l2(net(x)[:, 0], exp_function_fit.target("fun", x))
        assert error == pytest.approx(json.loads((folder / "result.json").read_text())["rel_l2"][k], rel=1e-5)
    for seed in (None, 7):
        with pytest.raises(ValueError, match="seed: .*0, 1"):
            load(folder, seed)
    exp_allen_cahn.main(["--sfli", "--at", *flags])
    exp_ldc.main(["--fourier", "2", *flags])
    assert load(tmp_path / "allen_cahn/at-sfli-gauss/seed0")(torch.rand(5, 2)).shape == (5, 1)
    assert load(tmp_path / "ldc/re100-fourier-2/seed0")(torch.rand(5, 2)).shape == (5, 3)
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path)


def test_sfli_changes_only_the_first_layer(tmp_path, capsys):
    for flags in ([], ["--sfli"]):
        exp_function_fit.main(
            [*flags, "--preset", "smoke", "--steps", "1", "--lr", "1e-30", "--no-plot", "--out", str(tmp_path)]
        )
    base, new = (
        torch.load(tmp_path / f"function_fit/{c}/seed0/checkpoint.pt", weights_only=True)["params"]
        for c in ("baseline", "sfli-gauss")
    )
    rest = [k for k in new if not k.startswith("first")]
    assert len(rest) == 6 and all((base[k] - new[k]).abs().max() < 1e-20 for k in rest)


def test_natural_gradient_in_a_script(tmp_path, capsys):
    """The flags reach it, what it does is in the history, and a J that does not fit leaves earlier results alone."""
    run = lambda *flags: exp_spectral_bias.main(
        ["--sfli", "--preset", "smoke", "--optimizer", "ng", "--no-plot", "--out", str(tmp_path), *flags]
    )
    run("--damping", "1e-3", "--momentum", "0.5")
    assert "natural gradient: J 41 x 901 in float64" in capsys.readouterr().out
    folder = tmp_path / "spectral_bias/sfli-gauss/seed0"
    config = json.loads((folder / "config.json").read_text())
    assert (config["damping"], config["momentum"], config["lr"], config["dtype"]) == (1e-3, 0.5, 1.0, "float64")
    rows = list(csv.DictReader((folder / "history.csv").open()))
    assert {"damping", "eta", "rejected"} <= set(rows[0]) and float(rows[-1]["rel_l2"]) < float(rows[0]["rel_l2"])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit) as e:
        run("--batch", "2000000", "--overwrite")
    err = capsys.readouterr().err
    assert e.value.code == 2 and "--batch: J has 2000000 rows x 901 parameters" in err and err.count("\n") == 1
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_resume_of_another_configuration(tmp_path, capsys):
    run = lambda *flags: exp_function_fit.main([*flags, "--preset", "smoke", "--no-plot", "--out", str(tmp_path)])
    run()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit) as e:
        run("--resume", "--batch", "51")
    err = capsys.readouterr().err
    assert e.value.code == 2 and "--resume" in err and "batch" in err and err.count("\n") == 1
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_divergence_stops_the_script(tmp_path, capsys):
    """One line, status 1; the history up to there stays, and no result of an earlier run beside it."""
    exp_function_fit.main(["--preset", "smoke", "--no-plot", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as e:
        exp_function_fit.main(["--preset", "smoke", "--lr", "1e30", "--steps", "50", "--overwrite", "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert e.value.code == 1 and "not finite at step" in err and "smaller lr" in err and err.count("\n") == 1
    left = sorted(p.name for p in (tmp_path / "function_fit/baseline/seed0").iterdir())
    assert left == ["config.json", "history.csv"]


def test_spectrum_is_the_papers(float64):
    """y = 0.5 + 2 cos 3 pi x + sin 20 pi x has |y_0|^2 = 1/4, |y_3|^2 + |y_-3|^2 = 2, |y_20|^2 + |y_-20|^2 = 1/2."""
    x = exp_spectral_bias.grid([(-1, 1)], 512)[:, 0]
    p = exp_spectral_bias.spectrum(0.5 + 2 * torch.cos(3 * torch.pi * x) + torch.sin(20 * torch.pi * x))
    want = torch.zeros(256)
    want[0], want[3], want[20] = 0.25, 2.0, 0.5
    assert torch.allclose(p, want, atol=1e-14)
    y = torch.randn(512)
    assert exp_spectral_bias.spectrum(y).sum() <= y.square().mean() + 1e-12


def test_aliasing_is_below_the_errors_shown(float64):
    """Low coefficients of f on the grid used against a grid 64 times finer: squared differences below 1e-6 in sum."""
    low = lambda n: (
        torch.fft.fft(exp_spectral_bias.f(exp_spectral_bias.grid([(-1, 1)], n)[:, 0]))[: exp_spectral_bias.DELTA + 1]
        / n
    )
    n = exp_spectral_bias.GRID
    k = torch.arange(exp_spectral_bias.DELTA + 1)
    phase = lambda n: torch.exp(-1j * torch.pi * k * (1 / n - 1))  # of the first midpoint
    difference = low(n) * phase(n) - low(64 * n) * phase(64 * n)
    assert 2 * difference.abs().square().sum() < 1e-6


def closure(*roots):
    """Installed distributions that `roots` require, themselves included."""
    found, todo = {}, list(roots)
    while todo:
        name = re.split(r"[ ;<>=!~\[(]", todo.pop())[0].lower().replace("_", "-")
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = dist
            todo += [r for r in dist.requires or [] if "extra ==" not in r]
    return found


ALONE = """
import importlib.util
import torch
from torch import nn
from common import eps_rank, grid, jet, sfli, train, uniform

assert not any(importlib.util.find_spec(p) for p in ("scipy", "matplotlib", "pytorch_optimizer", "triton", "kernels"))
omega = [(-1, 1), (-1, 1)]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
low = eps_rank(net, grid(omega, 30), measure=4.0)
net = sfli(net, omega)
high = eps_rank(net, grid(omega, 30), measure=4.0)
x = uniform(omega, 5).requires_grad_()
u, u_xy = jet(net, x.detach(), "x y", "xy")
g = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
assert torch.allclose(u_xy[:, 0], torch.autograd.grad(g[:, 0].sum(), x)[0][:, 1], atol=1e-4)
f = lambda x: torch.cos(5 * x[:, 0]) * torch.cos(5 * x[:, 1])
sample = lambda generator: {"x": uniform(omega, 200, generator)}
residuals = lambda net, batch: {"fit": net(batch["x"])[:, 0] - f(batch["x"])}
history = train(net, sample, residuals, 400)
assert history[-1]["loss"] < 0.05 * history[0]["loss"], history[-1]
try:
    train(net, sample, residuals, 1, optimizer="ng")
except ValueError as e:
    assert "kernels/natural_gradient.py" in str(e), e
else:
    raise AssertionError("no natural gradient without kernels/")
print("rank", low, high)
"""
WITH_KERNELS = """
import torch
from common import MLP, train, uniform
torch.manual_seed(0)
net = MLP(1, 10, 2).double()
sample = lambda generator: {"x": uniform([(-1, 1)], 50, generator, torch.float64)}
history = train(net, sample, lambda net, b: {"fit": net(b["x"])[:, 0] - b["x"][:, 0] ** 2}, 20, optimizer="ng", lr=1.0)
assert history[-1]["loss"] < 1e-6, history[-1]
"""


@pytest.mark.usefixtures("side_by_side")
def test_common_alone_with_torch_only(tmp_path):
    """common.py in an empty folder, in an environment that holds torch and what it requires, nothing else: SFLI, rank,
    derivatives, training. With kernels/natural_gradient.py beside it: natural gradient."""
    site, project = tmp_path / "site", tmp_path / "project"
    site.mkdir(), project.mkdir()
    packages = closure("torch")
    packages.pop("triton", None)  # which torch asks for only where there is CUDA
    assert not {"scipy", "matplotlib", "pytorch-optimizer", "numpy"} & set(packages)
    for dist in packages.values():
        for name in {Path(f).parts[0] for f in dist.files if Path(f).parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                os.symlink(dist.locate_file(name), site / name)
    shutil.copy(ROOT / "common.py", project)
    (project / "mine.py").write_text(ALONE)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = command("-S", "mine.py", cwd=project, env=environment)
    assert done.returncode == 0, done.stderr
    low, high = map(int, done.stdout.splitlines()[-1].split()[1:])  # progress may be told above
    assert high > 2 * low and sorted(p.name for p in project.iterdir()) == ["common.py", "mine.py"]
    others = lambda folder, names: set(names) - {"__init__.py", "natural_gradient.py"}
    shutil.copytree(ROOT / "kernels", project / "kernels", ignore=others)
    (project / "mine.py").write_text(WITH_KERNELS)
    done = command("-S", "mine.py", cwd=project, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("side_by_side")
def test_importing_has_no_side_effects(tmp_path):
    """Importing prints nothing, writes nothing, loads no optional package, changes no torch setting."""
    code = (
        "import sys, torch; settings = lambda: (torch.get_default_dtype(), torch.get_num_threads()); "
        "before, loaded = settings(), set(sys.modules); "
        "import common, exp_allen_cahn, exp_function_fit, exp_high_dim, exp_ldc, exp_ns_torus; "
        "import exp_parabolic, exp_spectral_bias; "
        "assert before == settings(); new = {name.split('.')[0] for name in set(sys.modules) - loaded}; "
        "assert not {'matplotlib', 'tqdm', 'scipy', 'pytorch_optimizer', 'triton'} & new, new"
    )
    done = command("-c", code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr
