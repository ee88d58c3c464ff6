"""Runs that are killed, interrupted, starved of disk, broken into or diverging."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT

import cli
import common
from common import MLP, Refused, Save, train, uniform
from kernels import checkpoint
from kernels.process import answered, held

DRIVER = """
import sys, time, torch
from pathlib import Path
sys.path.insert(0, {root!r})
from kernels.process import answered, held
from common import MLP, Save, Schedule, train, uniform
torch.set_num_threads(1)
torch.manual_seed(0)
net, folder = MLP(1, 8, 2), sys.argv[1]
def sample(g):
    time.sleep(0.004)
    return {{"x": uniform([(-1, 1)], 16, g)}}
with answered(), held(Path(folder)) as stop:
    print("go", flush=True)
    residuals = lambda net, b: {{"fit": net(b["x"])[:, 0] - b["x"][:, 0] ** 2}}
    train(net, sample, residuals, 500, lr=Schedule(decay=0.5), stop=stop, evaluate=lambda net: {{"e": 0.0}},
          save=Save(folder, {{"a": 1}}, "--resume" in sys.argv, steps=5))
print("done", flush=True)
"""


def listen():
    """In a process about to start: signals act as in a terminal, also where the tests themselves run under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(folder, run, *argv):
    """folder / driver.py, training into folder / run."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER.format(root=str(ROOT)))
    process = subprocess.Popen([sys.executable, str(driver), str(folder / run), *argv], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen)  # fmt: skip
    assert process.stdout.readline() == "go\n", process.communicate()[1]
    return process


def state(folder):
    """Parameters and history without its clock, as the checkpoint holds them."""
    s = torch.load(folder / "checkpoint.pt", weights_only=True)
    return s["params"], [{k: v for k, v in row.items() if k != "seconds"} for row in s["history"]], s["step"]


def same(a, b):
    return a[1:] == b[1:] and all(torch.equal(a[0][k], b[0][k]) for k in a[0])


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_at_random_moments(number, tmp_path):
    """Six times by SIGKILL, twice by SIGTERM or SIGINT: in the end the parameters and the history of the
    undisturbed run. The polite signals finish the step, save, and print the command that continues."""
    rng = random.Random(number)
    whole = start(tmp_path, "whole")  # side by side with the other
    times, argv = 6 if number == signal.SIGKILL else 2, []
    for k in range(times):
        process = start(tmp_path, "cut", *argv)
        if not k:
            while not cli.has_checkpoint(tmp_path / "cut"):
                time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 128 + number and "Traceback" not in err and err.count("\n") == 1
            match = re.fullmatch(r"driver.py: stopped after step (\d+) of 500; continue with: python (.*)\n", err)
            assert state(tmp_path / "cut")[2] == int(match.group(1)) + 1  # nothing lost
            assert shlex.split(match.group(2)) == [str(tmp_path / "driver.py"), str(tmp_path / "cut"), "--resume"]
        argv = ["--resume"]
    process = start(tmp_path, "cut", *argv)
    assert all(p.communicate(timeout=120)[0].endswith("done\n") for p in (process, whole))
    assert same(state(tmp_path / "cut"), state(tmp_path / "whole"))
    left = {"checkpoint.pt", "checkpoint_previous.pt", "history.csv"}
    names = {p.name for p in (tmp_path / "cut").iterdir()}
    assert left <= names and all(n.startswith(".") for n in names - left)  # a temporary file of a killed write


@pytest.mark.usefixtures("side_by_side")
def test_script_prints_the_command_that_continues(tmp_path):
    """SIGTERM to a real script; the printed command, run as printed, finishes the run."""
    argv = ["exp_function_fit.py", "--sfli", "--preset", "smoke", "--steps", "1500", "--compile", "off", "--out",
            str(tmp_path / "a b"), "--no-plot"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = tmp_path / "a b/function_fit/sfli-gauss/seed0"
    while not (folder / "history.csv").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and err.count("\n") == 1
    again = shlex.split(err.split("continue with: ")[1])
    assert again == ["python", *argv, "--resume"]
    done = subprocess.run([sys.executable, *again[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "RESULT function_fit sfli-gauss" in done.stdout


def script(*argv, **options):
    options = dict(stderr=subprocess.PIPE, preexec_fn=listen) | options
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=ROOT, text=True, **options)


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("seconds", [0.5, 3.0], ids=["importing", "reference"])
def test_interrupted_before_training(seconds, tmp_path):
    """Ctrl-C while PyTorch is imported or the reference is computed: one line, 130, nothing written."""
    process = script("exp_ldc.py", "--sfli", "--out", tmp_path / "out", stdout=subprocess.PIPE)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    try:
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and err.count("\n") == 1 and "interrupted" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("side_by_side")
def test_nohup(tmp_path):
    """A hang-up that is ignored stays ignored."""
    folder = tmp_path / "function_fit/baseline/seed0"
    argv = ["exp_function_fit.py", "--preset", "smoke", "--steps", "400", "--no-plot", "--out", tmp_path]
    process = script(*argv, stdout=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    while not (folder / "history.csv").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0 and (folder / "result.json").exists()


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("reader", ["head", "full", "closed"])
def test_nobody_reads(reader, tmp_path):
    """| head -1, a full disk behind stdout, a closed stdout: training goes on, results are written, nothing is said."""
    argv = ["exp_function_fit.py", "--preset", "smoke", "--out", tmp_path]
    if reader == "head":
        process = script(*argv, stdout=subprocess.PIPE)
        process.stdout.close()
    elif reader == "full":
        process = script(*argv, stdout=open("/dev/full", "w"))
    else:
        process = script(*argv, preexec_fn=lambda: os.close(1))
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == ""
    assert (tmp_path / "function_fit/baseline/seed0/fig_fun.png").exists()


def small(folder, resume=False):
    torch.manual_seed(0)
    net = MLP(1, 4, 2)
    train(net, lambda g: {"x": uniform([(-1, 1)], 8, g)}, lambda net, b: {"fit": net(b["x"])[:, 0] - b["x"][:, 0]}, 10,
          save=Save(folder, {"a": 1}, resume, steps=2))  # fmt: skip
    return net


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_killed_between_the_renames(links, tmp_path, monkeypatch):
    """Before each change of a name in a save the checkpoint is there and whole, the old one or the new one; on a file
    system without hard links it or the previous one."""
    path, seen = tmp_path / "checkpoint.pt", []
    replace, link = os.replace, os.link

    def look(*args):
        seen.append(checkpoint.read_checkpoint(tmp_path)["step"])
        assert path.exists() or not links
        return args

    def no_link(*args):
        raise OSError("no hard links here")

    whole = dict.fromkeys(["config", *common.State.__dataclass_fields__])
    checkpoint.save_checkpoint(path, whole | {"step": 0})
    monkeypatch.setattr(os, "replace", lambda *args: replace(*look(*args)))
    monkeypatch.setattr(os, "link", (lambda *args: link(*look(*args))) if links else no_link)
    for step in (1, 2):
        checkpoint.save_checkpoint(path, whole | {"step": step})
    look()
    assert seen == ([0, 0, 0, 1, 1, 1, 2] if links else [0, 0, 1, 1, 2])
    assert torch.load(checkpoint.previous(path))["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt", "checkpoint_previous.pt"]


class Hostile:
    def __reduce__(self):
        return os.system, ("touch " + shlex.quote(self.path),)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "hostile", "missing", "foreign"])
def test_damaged_checkpoints(damage, tmp_path, capsys):
    """The previous checkpoint takes over and gives the same end; with both damaged the message names the first; code
    in a checkpoint is never run."""
    whole = small(tmp_path / "whole")
    folder = tmp_path / "run"
    small(folder)
    path, before = folder / "checkpoint.pt", folder / "checkpoint_previous.pt"

    def harm(path):
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-200])
        elif damage == "missing":
            path.unlink()
        elif damage == "hostile":
            code = Hostile()
            code.path = str(tmp_path / "harmed")
            torch.save({"config": {"a": 1}, "step": code}, path)
        elif damage == "foreign":
            torch.save({"model": torch.ones(3)}, path)
        else:
            path.write_bytes(b"" if damage == "empty" else os.urandom(500))

    harm(path)
    capsys.readouterr()
    net = small(folder, resume=True)
    assert "checkpoint.pt cannot be read" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), whole.parameters()))
    harm(path), harm(before)
    with pytest.raises(ValueError, match="resume: .*checkpoint.pt"):
        small(folder, resume=True)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.usefixtures("side_by_side")
def test_a_full_disk(tmp_path):
    """A limit on the size of files, met by the checkpoint after the disk was fine before: one line, status 2, and the
    last checkpoint is still there and whole; with room again the run ends as one that was never disturbed."""
    whole, process = start(tmp_path, "whole"), start(tmp_path, "run")
    while not cli.has_checkpoint(tmp_path / "run"):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    driver = tmp_path / "driver.py"
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
        f"sys.argv = [{str(driver)!r}, {str(tmp_path / 'run')!r}, '--resume']; runpy.run_path({str(driver)!r})"
    )
    before = state(tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "folder: cannot write" in done.stderr, (
        done.stderr
    )
    assert same(state(tmp_path / "run"), before)  # no checkpoint is below 3000 bytes: none was written since
    resumed = start(tmp_path, "run", "--resume")
    assert all(p.communicate(timeout=120)[0].endswith("done\n") for p in (resumed, whole))
    assert same(state(tmp_path / "run"), state(tmp_path / "whole"))


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as e, answered(), held(tmp_path / "file" / "run"):
        pass
    assert e.value.code == 2 and "cannot write to" in capsys.readouterr().err


def test_two_runs_in_one_folder(tmp_path, capsys):
    """The second is refused and leaves the first alone; when the first is gone the folder is free."""
    first = start(tmp_path, "run")
    with pytest.raises(SystemExit) as e, answered(), held(tmp_path / "run"):
        raise AssertionError("not reached")
    assert e.value.code == 2 and "another run is writing" in capsys.readouterr().err
    first.kill()
    first.communicate()
    with answered(), held(tmp_path / "run"):
        pass


def test_a_folder_is_not_left_behind(tmp_path):
    with pytest.raises(SystemExit), answered(), held(tmp_path / "a" / "b"):
        raise Refused("x: refused")
    assert not list(tmp_path.iterdir())


def test_divergence(tmp_path, capsys):
    """The loss jumps from 1e-2 to 1e12: step, term and advice, status 1; the history up to there."""
    calls = []

    def sample(g):
        calls.append(1)
        return {"x": uniform([(-1, 1)], 8, g), "size": torch.full((8,), 1e6 if len(calls) > 60 else 0.1)}

    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as e, answered(), held(folder) as stop:
        torch.manual_seed(0)
        residuals = lambda net, b: {"fit": b["size"] * (net(b["x"])[:, 0] + 1), "other": b["x"][:, 0]}
        train(MLP(1, 4, 2), sample, residuals, 100, save=Save(folder), stop=stop)
    error = capsys.readouterr().err
    assert e.value.code == 1 and re.search(r"the loss has diverged: .* at step 60, most of it fit", error)
    assert "smaller lr" in error and error.count("\n") == 1
    assert len((folder / "history.csv").read_text().splitlines()) == 62
