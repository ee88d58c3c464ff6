"""The flags that all scripts share: help, presets, refusals."""

import contextlib
import io
import random
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import cli
import exp_allen_cahn
import exp_function_fit
import exp_high_dim
import exp_ldc
import exp_ns_torus
import exp_parabolic
import exp_spectral_bias
from kernels import cpu

SCRIPTS = [exp_allen_cahn, exp_function_fit, exp_high_dim, exp_ldc, exp_ns_torus, exp_parabolic, exp_spectral_bias]
SHARED = """--sfli --all --preset --steps --batch --width --first --lr --optimizer --damping --momentum --seed --seeds --gamma
    --C --eps --device --dtype --compile --out --resume --overwrite --save-seconds --save-steps --no-plot""".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    """Every shared flag, which example, the paper's value, ours, and the minutes of each preset on a CPU."""
    with pytest.raises(SystemExit) as e:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0 and all(flag in text for flag in SHARED)
    said = (r"^Example 4\.\d", r"(?i)\bpaper\b", r"(?i)\bours\b", r"Minutes on (one|2) CPU core", "laptop", "smoke")
    for pattern in said:
        assert re.search(pattern, text, re.M), pattern


BAD = [
    ("--sfli relu", "--sfli"),
    ("--steps 0", "--steps"),
    ("--steps -3", "--steps"),
    ("--steps ten", "--steps"),
    ("--batch 0", "--batch"),
    ("--width 0", "--width"),
    ("--lr 0", "--lr"),
    ("--lr nan", "--lr"),
    ("--lr inf", "--lr"),
    ("--gamma -1 --sfli", "--gamma"),
    ("--C 0 --sfli", "--C"),
    ("--gamma 1 --C 1 --sfli", "--C"),
    ("--gamma 3", "--sfli"),
    ("--eps 0", "--eps"),
    ("--seed -1", "--seed"),
    ("--seed 99999999999999999999", "--seed"),
    ("--seeds 0", "--seeds"),
    ("--preset huge", "--preset"),
    ("--optimizer sgd", "--optimizer"),
    ("--dtype float16", "--dtype"),
    ("--compile maybe", "--compile"),
    ("--device tpu", "--device"),
    ("--device cuda:99", "--device"),
    ("--all --sfli", "--sfli"),
    ("--frobnicate", "--frobnicate"),
    ("stray", "stray"),
    ("--ste 5", "--ste"),
    ("--resume", "--resume"),
    ("--all --resume", "--resume"),
    ("--optimizer soap --seeds 2", "--seeds"),
    ("--optimizer ng --seeds 2", "--seeds"),
    ("--optimizer ng --damping 0", "--damping"),
    ("--optimizer ng --damping -1e-6", "--damping"),
    ("--optimizer ng --momentum 1", "--momentum"),
    ("--optimizer ng --dtype float32", "--dtype"),
    ("--optimizer ng --compile on", "--compile"),
    ("--damping 1e-6", "--optimizer ng"),
    ("--momentum 0.5 --optimizer soap", "--optimizer ng"),
    ("--sfli --width 1 --C 1", "--width"),
    ("--width 1000000", "--width"),
    ("--first 0", "--first"),
    ("--batch 1000000000000", "--batch"),
]


@pytest.mark.parametrize("k", range(len(BAD)))
def test_bad_input(k, tmp_path, capsys):
    """One line that names the flag, status 2, no files. The scripts take turns."""
    flags, named = BAD[k]
    preset = [] if "--preset" in flags else ["--preset", "smoke"]
    with pytest.raises(SystemExit) as e:
        SCRIPTS[k % len(SCRIPTS)].main([*flags.split(), *preset, "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and err.count("\n") == 1 and named in err and "RESULT" not in out
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_no_cuda(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        exp_function_fit.main(["--device", "cuda", "--out", str(tmp_path / "out")])
    assert e.value.code == 2 and "--device cpu" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_unwritable_out(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", "/proc/nowhere"):
        for flags in (["--preset", "smoke"], ["--figure", "basis"]):
            with pytest.raises(SystemExit) as e:
                exp_function_fit.main([*flags, "--out", str(out)])
            err = capsys.readouterr().err
            assert e.value.code == 2 and "--out" in err and err.count("\n") == 1


def test_soap_without_its_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(SystemExit) as e:
        exp_function_fit.main(["--optimizer", "soap", "--preset", "smoke", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and "pip install pytorch-optimizer" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("compiler,steps,want", [("g++", 2000, "on"), ("g++", 1999, "off"), (None, 2000, "off")])
def test_compile_auto(compiler, steps, want, monkeypatch):
    """Only for long runs, and only where a compiler and the Python headers are found."""
    monkeypatch.setattr(cpu.shutil, "which", lambda name: compiler)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    args = cli.parse_args("x", "", exp_function_fit.PRESETS, ["--preset", "paper", "--steps", str(steps)])
    assert args.compile == (want if headers else "off")


def test_auto_preset_says_so(tmp_path, capsys):
    exp_function_fit.main(["--steps", "2", "--no-plot", "--device", "cpu", "--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith("preset laptop (device cpu")


def refused(capsys, main, line):
    """The one line that `line` ends with, status 2."""
    with pytest.raises(SystemExit) as e:
        main(line.split())
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1, err
    return err


def test_means_that_are_missing(tmp_path, capsys, monkeypatch):
    """A compiler, matplotlib, scipy, memory for so many inputs: one line before anything is computed or written."""
    out = f"--preset smoke --out {tmp_path / 'out'}"
    assert "--width" in refused(capsys, exp_high_dim.main, f"--sfli --dims 1000000 {out}")
    assert "--width" in refused(capsys, exp_parabolic.main, f"--sfli --dims 1000000 {out}")
    with monkeypatch.context() as patch:
        patch.setattr(cpu.shutil, "which", lambda name: None)
        assert "--compile" in refused(capsys, exp_spectral_bias.main, f"--compile on {out}")
    with monkeypatch.context() as patch:
        patch.setattr(cli.importlib.util, "find_spec", lambda name: None)
        assert "--no-plot" in refused(capsys, exp_spectral_bias.main, out)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    assert "scipy" in refused(capsys, exp_ldc.main, f"--no-plot {out}")
    assert not (tmp_path / "out").exists()


def test_memory_that_runs_out(capsys, monkeypatch):
    """The allocator's own words become one line; other errors of PyTorch keep their traceback."""
    for error, status in ((MemoryError(), 2), (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2)):
        with pytest.raises(SystemExit) as e, cli.answered():
            raise error
        assert e.value.code == status and "memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError), cli.answered():
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize("bug", [ValueError("a bug"), OSError("a bug"), KeyError("a bug")])
def test_bugs_keep_their_traceback(bug, tmp_path, monkeypatch):
    def broken(*args):
        raise bug

    monkeypatch.setattr(exp_spectral_bias, "f", broken)
    with pytest.raises(type(bug)):
        exp_spectral_bias.main(["--preset", "smoke", "--no-plot", "--out", str(tmp_path)])


def test_flags_that_would_do_nothing(tmp_path, capsys):
    out = f"--preset smoke --out {tmp_path / 'out'}"
    assert "--no-plot" in refused(capsys, exp_function_fit.main, f"--figure basis --no-plot {out}")
    assert "--C-grid" in refused(capsys, exp_high_dim.main, f"--sfli --search-seeds 2 {out}")
    assert "--C-grid" in refused(capsys, exp_high_dim.main, f"--sfli --search-steps=2 {out}")
    for script in (exp_allen_cahn, exp_ldc, exp_ns_torus, exp_parabolic):
        assert "second derivative" in refused(capsys, script.main, f"--sfli hat {out}")
    assert not (tmp_path / "out").exists()


def test_home_in_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    exp_spectral_bias.main(["--preset", "smoke", "--no-plot", "--out=~/z"])
    assert (tmp_path / "z/spectral_bias/baseline/seed0/result.json").exists() and not (tmp_path / "~").exists()


def test_no_nan_in_json(tmp_path):
    with pytest.raises(ValueError):
        cli.write_json(tmp_path / "a.json", {"rel_l2": float("nan")})
    assert not list(tmp_path.iterdir())


def test_an_error_that_is_not_finite(tmp_path, capsys, monkeypatch):
    """Training is fine, its measure is not: status 1, no result.json."""
    monkeypatch.setattr(exp_spectral_bias, "relative_l2", lambda y, f: float("nan"))
    with pytest.raises(SystemExit) as e:
        exp_spectral_bias.main(["--preset", "smoke", "--no-plot", "--out", str(tmp_path)])
    assert e.value.code == 1 and "not finite" in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))


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
    """Eight seeded bad command lines per script: status 2, one line on stderr, no traceback, no files."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(SCRIPTS.index(script))
    dtype = torch.get_default_dtype()
    for _ in range(8):
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


def test_each_process_has_its_own_gpu(monkeypatch):
    """Under torchrun the current device is the process's own before NCCL starts: it talks through that one."""
    from kernels import process

    seen = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: seen.append(backend))
    monkeypatch.setattr(process.atexit, "register", lambda f: None)
    assert process.choose_device("auto") == "cuda:2" and seen == ["cuda:2", "nccl"]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_lattice(d, float64):
    """In the unit cube; shifted at random; the mean of a smooth function over 1000 points is four times closer than
    independent points bring it."""
    f = lambda x: torch.cos(2 * torch.pi * x).prod(1) + x.prod(1)
    g = torch.Generator().manual_seed(0)
    draws = [cli.lattice(d, 1000, g) for _ in range(20)]
    assert draws[0].shape == (1000, d) and all(0 <= x.min() and x.max() <= 1 for x in draws)
    off = torch.stack([f(x).mean() - 0.5**d for x in draws]).square().mean().sqrt()
    alone = torch.stack([f(torch.rand(1000, d)).mean() - 0.5**d for _ in range(20)]).square().mean().sqrt()
    assert 0 < off < 0.25 * alone
