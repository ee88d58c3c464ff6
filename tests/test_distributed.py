"""torchrun on the CPU (gloo): two processes against one, real scripts, resume."""

import csv
import subprocess
import sys

import pytest
import torch

from conftest import ROOT

pytestmark = pytest.mark.usefixtures("side_by_side")

DRIVER = """
import sys, torch
sys.path.insert(0, {root!r})
from kernels.process import Together, leave, world
from common import MLP, Save, jet, train, uniform
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
if len(sys.argv) > 2:
    torch.distributed.init_process_group("gloo")
rank, ranks = world()
if {weighting!r} == "ntk":  # the random signs, the same for one and for two
    torch.randint = lambda low, high, size, **k: torch.arange(rank, ranks * size[0], ranks) % 3 % 2
torch.manual_seed(0)
net, calls = MLP(2, 8, 2), [0]
def sample(generator):  # every second point of the batch of one process: the same chunks of time
    calls[0] += 1
    x = uniform([(0, 1), (-1, 1)], 32, torch.Generator().manual_seed(calls[0]))
    return {{"x": x[x[:, 0].argsort()][rank::ranks]}}
def residuals(net, b):
    u, heat = jet(net, b["x"], "t x", "t-0.1*xx")
    return {{"res": (heat[:, 0] + u[:, 0] ** 3, u[:, 0]), "fit": u[:, 0] - b["x"][:, 1]}}
train(net, sample, residuals, 60, weighting={weighting!r}, causal=dict(terms=["res"], tol=1.0, chunks=4), lr=1e-2,
      pseudo_time=True, save=Save(sys.argv[1]), **(dict(processes=Together()) if ranks > 1 else {{}}),
      evaluate=lambda net: {{"norm": sum(p.norm().item() for p in net.parameters())}})
if ranks > 1:
    leave()
"""

RESUME = """
import contextlib, sys, torch
sys.path.insert(0, {root!r})
from kernels.process import Together, leave, world
from common import MLP, Save, Schedule, Stopped, jet, train, uniform
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = world()[0]
def sample(generator):
    x = uniform([(0, 1), (-1, 1)], 16, generator)
    return {{"x": x[x[:, 0].argsort()]}}
def residuals(net, b):
    u, heat = jet(net, b["x"], "t x", "t-0.1*xx")
    return {{"res": (heat[:, 0] + u[:, 0] ** 3, u[:, 0]), "fit": u[:, 0] - b["x"][:, 1]}}
def run(folder, resume=False, stop=None):
    torch.manual_seed(0)
    net = MLP(2, 8, 2)
    train(net, sample, residuals, 60, lr=Schedule(1e-2, 5, 0.9, 10), optimizer="soap", weighting="ntk",
          pseudo_time=True, causal=dict(terms=["res"], tol=1.0, chunks=4), save=Save(folder, resume=resume),
          stop=stop, processes=Together(),
          evaluate=lambda net: {{"norm": sum(p.norm().item() for p in net.parameters())}})
    torch.save(net.state_dict(), f"{{folder}}/params{{rank}}.pt")
folder, asked = sys.argv[1], []
if "--resume" in sys.argv:
    run(folder + "/cut", resume=True)
else:
    run(folder + "/whole")
    with contextlib.suppress(Stopped):  # rank 1 is asked to stop after step 23, both do with the next tenth
        run(folder + "/cut", stop=lambda: asked.append(1) or rank == 1 and len(asked) > 23)
leave()
"""


def torchrun(*argv, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, *argv]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)


def rows(folder):
    with open(folder / "history.csv", newline="") as f:
        return [{k: float(v) for k, v in row.items() if k != "seconds"} for row in csv.DictReader(f)]


@pytest.mark.parametrize("weighting", ["grad_norm", "ntk"])
def test_two_processes_are_one_with_their_joint_batch(weighting, tmp_path):
    """Losses, weights, causal weights, lam and parameters of 60 steps in float64. Adam divides by the root of squared
    gradients, which carries the rounding of the average of two halves; 1e-9 leaves two digits for 60 steps of it."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT), weighting=weighting))
    subprocess.run([sys.executable, driver, tmp_path / "one"], check=True, timeout=120)
    done = torchrun(driver, tmp_path / "two", "distributed")
    assert done.returncode == 0, done.stderr
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == 61 and {"weight_res", "causal_last", "lam_res", "norm"} <= set(one[0])
    for a, b in zip(one, two):
        for key in set(a) - {"causal_last"}:  # of the last point: one process has it
            assert a[key] == pytest.approx(b[key], rel=1e-9), (a["step"], key)
    assert one[-1]["loss_fit"] < one[0]["loss_fit"]


def test_two_processes_resume_bit_for_bit(tmp_path):
    """Stopped in the middle and started anew: history and parameters of both processes are those of the undisturbed
    run, with SOAP, NTK weights, causal weights and pseudo-time, each of which has a state or draws of its own."""
    pytest.importorskip("pytorch_optimizer")
    driver = tmp_path / "driver.py"
    driver.write_text(RESUME.format(root=str(ROOT)))
    done = torchrun(driver, tmp_path)
    assert done.returncode == 0, done.stderr
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert torch.load(cut / "checkpoint.pt", weights_only=True)["step"] == 30 and len(rows(cut)) == 30
    done = torchrun(driver, tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert rows(cut) == rows(whole) and len(rows(cut)) == 61
    want = torch.load(whole / "params0.pt", weights_only=True)
    for folder, rank in ((whole, 1), (cut, 0), (cut, 1)):
        got = torch.load(folder / f"params{rank}.pt", weights_only=True)
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("script, config", [("allen_cahn", "at-sfli-gauss"), ("ldc", "re100-sfli-gauss"),
                                            ("ns_torus", "sfli-gauss")])  # fmt: skip
def test_torchrun(script, config, tmp_path):
    """The real command. One process speaks and writes; the same command with --resume finds the run finished; one
    process alone refuses the checkpoint of two."""
    argv = [
        f"exp_{script}.py",
        "--sfli",
        "--preset",
        "smoke",
        "--out",
        tmp_path,
        *(["--at"] if "at-" in config else []),
    ]
    done = torchrun(*argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"RESULT {script} {config} ") == 1
    folder = tmp_path / script / config / "seed0"
    assert not list(folder.glob("process*")) and (folder / "result.json").exists()
    if script == "allen_cahn":
        before = (folder / "history.csv").read_text()
        again = torchrun(*argv, "--resume")
        assert again.returncode == 0 and (folder / "history.csv").read_text() == before, again.stderr
        alone = subprocess.run([sys.executable, *map(str, argv), "--resume"], cwd=ROOT, capture_output=True, text=True)
        assert alone.returncode == 2 and "processes differ" in alone.stderr


def test_seeds_are_split(tmp_path):
    """--seeds 3 on two processes: the errors of the same three seeds in one process."""
    argv = ["exp_parabolic.py", "--sfli", "--dims", "5", "--seeds", "3", "--preset", "smoke", "--dtype", "float64"]
    done = torchrun(*argv, "--out", tmp_path / "two")
    assert done.returncode == 0 and done.stdout.count("RESULT") == 1, done.stderr
    subprocess.run([sys.executable, *argv, "--out", tmp_path / "one"], cwd=ROOT, check=True, capture_output=True)
    one, two = (rows(tmp_path / k / "parabolic/d5-sfli-gauss/seeds0-2") for k in ("one", "two"))
    assert [r["seed"] for r in two] == [r["seed"] for r in one]
    assert [r["rel_l2"] for r in two] == pytest.approx([r["rel_l2"] for r in one], rel=1e-9)


def test_the_search_for_C_is_split(tmp_path):
    """Three values of C with one seed each on two processes, then two seeds with the best: the choice, its validation
    errors and the table of one process."""
    argv = ["exp_high_dim.py", "--all", "--C-grid", "0.7", "1.3", "1.6", "--dims", "5", "--seeds", "2", "--preset",
            "smoke", "--dtype", "float64", "--no-plot"]  # fmt: skip
    two = torchrun(*argv, "--out", tmp_path / "two")
    one = subprocess.run([sys.executable, *argv, "--out", tmp_path / "one"], cwd=ROOT, capture_output=True, text=True)
    assert two.returncode == 0 == one.returncode, two.stderr + one.stderr
    told = lambda done: [line for line in done.stdout.splitlines() if "taken C*" in line]
    assert told(one) == told(two) and len(told(one)) == 1
    assert len(list((tmp_path / "two/high_dim/d5-search/seeds0-1").glob("process*/checkpoint.pt"))) == 2
    table = "high_dim/all/seeds0-1/table.md"
    assert (tmp_path / "one" / table).read_text() == (tmp_path / "two" / table).read_text()


def test_refusals_under_torchrun(tmp_path):
    for argv, message in [(["exp_allen_cahn.py", "--optimizer", "ng"], "--seeds, --optimizer: several processes"),
                          (["exp_high_dim.py", "--all", "--C-grid", "1", "--search-seeds", "1"], "--C-grid: 1 x 1"),
                          (["exp_parabolic.py"], "--seeds: 2 seeds do not occupy 3 processes")]:  # fmt: skip
        processes = 3 if "3 processes" in message else 2
        done = torchrun(*argv, "--preset", "smoke", "--out", tmp_path / "out", processes=processes)
        assert done.returncode != 0 and message in done.stderr and not (tmp_path / "out").exists()
