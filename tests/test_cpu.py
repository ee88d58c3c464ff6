"""kernels/cpu.py: memory that is kept, products by oneDNN, and that nothing of it happens unasked."""

import platform
import subprocess
import sys

import pytest
import torch

from conftest import ROOT
from test_train import needs_compiler, network, residuals, sample

from common import train
from kernels import cpu


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_steps_fetch_no_memory():
    """Steps with arrays of 32 MB: without keep_memory() most of them fetch over 10 000 pages from the system; with it
    the heap grows a few times, by 8000 pages or so, and a usual step fetches none."""
    code = (
        "import resource, torch; from common import MLP, train; from kernels import cpu; pages = []\n"
        "cpu.keep_memory()\n"
        "now = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "sample = lambda g: pages.append(now()) or {'x': torch.rand(40_000, 2, generator=g)}\n"
        "train(MLP(2, 200, 2), sample, lambda net, batch: {'r': net(batch['x'])[:, 0]}, 20)\n"
        "print(sorted(b - a for a, b in zip(pages, pages[1:]))[10])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
                         timeout=120)  # fmt: skip
    assert int(out.stdout.split()[-1]) < 1000  # far from both; progress may be told above


@needs_compiler
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("seeds", [1, 2], ids=["one", "stacked"])
def test_products_by_onednn(seeds, monkeypatch):
    """As where MKL is slow: the compiled step calls oneDNN, and after four steps the losses are those of uncompiled
    training, to the rounding of float32."""
    make = lambda: [network(s, 40) for s in range(seeds)]
    monkeypatch.setattr(cpu, "half_speed_mkl", lambda: True)
    options = cpu.compile_options("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled = train(make(), sample, residuals, 4, compile=options)
    eager = train(make(), sample, residuals, 4)
    assert [row["loss"] for row in compiled] == pytest.approx([row["loss"] for row in eager], rel=1e-4)
    assert sum(e.count for e in profile.key_averages() if e.key == "sfli::mm") >= 2 * 5  # forwards, backwards


def test_without_onednn(monkeypatch, capsys):
    """PyTorch's private operators may go any day: one line, and the plain way."""

    def gone():
        raise AttributeError("no such operator\nand a long explanation")

    monkeypatch.setattr(cpu, "define_mm", gone)
    monkeypatch.setattr(cpu, "half_speed_mkl", lambda: True)
    assert cpu.compile_options("cuda") is True and capsys.readouterr().out == ""
    assert cpu.compile_options("cpu") is True
    assert capsys.readouterr().out == "oneDNN is not used (AttributeError: no such operator); MKL is\n"
    monkeypatch.setattr(cpu, "half_speed_mkl", lambda: False)
    assert cpu.compile_options("cpu") is True and capsys.readouterr().out == ""


@pytest.mark.skipif(not cpu.openblas(), reason="no AMD CPU, or no numpy with OpenBLAS")
def test_gram_by_openblas(float64):
    """Rows and columns, more of either; as many threads as torch has, and as before afterwards."""
    get, set = cpu.openblas()
    before, threads, seen = get(), torch.get_num_threads(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "openblas", lambda: (get, lambda n: (seen.append(n), set(n))))
        for A in (torch.randn(40, 70), torch.randn(40, 70).T, torch.randn(1, 3)):
            assert torch.allclose(cpu.gram(A), A @ A.T, rtol=1e-13, atol=1e-13)
    assert seen == 3 * [threads, before] and get() == before


def test_gram_without_numpy(monkeypatch):
    cpu.openblas.cache_clear()
    monkeypatch.setitem(sys.modules, "numpy.linalg", None)
    assert cpu.openblas() is None
    cpu.openblas.cache_clear()


def test_nothing_is_asked_by_importing_or_training():
    """half_speed_mkl() opens /proc/cpuinfo, which a fresh process sees here only when it calls that itself."""
    code = (
        "import sys, torch; from pathlib import Path; opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from kernels import cpu; from common import MLP, train\n"
        "sample = lambda g: {'x': torch.rand(8, 2, generator=g)}\n"
        "train(MLP(2, 4, 1), sample, lambda net, b: {'r': net(b['x'])[:, 0]}, 2)\n"
        "assert '/proc/cpuinfo' not in opened and not hasattr(torch.ops.sfli, 'mm')\n"
        "cpu.half_speed_mkl()\n"
        "assert '/proc/cpuinfo' in opened or not Path('/proc/cpuinfo').exists()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
