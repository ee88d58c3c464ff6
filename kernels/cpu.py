"""CPUs: what makes a training step faster here and belongs to no mathematics. Nothing is switched on by importing.

keep_memory() and compile_options() are asked for by cli.py; a program of your own may ask too. They use private
interfaces of glibc and PyTorch: where one of them fails, one line says so and everything goes the plain way.
"""
import contextlib
import ctypes
import functools
import os
import shutil
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

import torch


def keep_memory():
    """Let large arrays that one step frees serve the next, for the rest of the process. glibc hands them back to the
    system otherwise, and fetches them anew page by page."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-4, 0)  # M_MMAP_MAX: no array by mmap
            mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap


def can_compile():
    """What torch.compile needs on a CPU: a C++ compiler and the Python headers that its kernels include."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return bool(compiler) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def half_speed_mkl():
    """Whether MKL, by which PyTorch multiplies matrices, is slower here than oneDNN: AMD CPUs with AVX-512."""
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text()
        return "AuthenticAMD" in cpu and "avx512f" in cpu and torch.backends.mkldnn.is_available()
    return False


def compile_options(device):
    """For train(compile=...) on `device`: products by oneDNN where MKL is slow, else nothing special, True."""
    if device != "cpu" or not half_speed_mkl():
        return True
    try:
        define_mm()
        a, b = torch.rand(33, 40), torch.rand(40, 35)
        assert torch.allclose(torch.ops.sfli.mm(a, b), a @ b, rtol=1e-4), "wrong product"
        return {"options": {"post_grad_custom_post_pass": by_onednn()}}
    except Exception as e:
        print(f"oneDNN is not used ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}); MKL is")
        return True


def define_mm():
    """The operator sfli::mm: products of float32 matrices, or batches of them, by oneDNN."""
    if hasattr(torch.ops.sfli, "mm"):
        return
    one = lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
    define_mm.library = library = torch.library.Library("sfli", "DEF")  # lasts as long as it is referred to
    library.define("mm(Tensor a, Tensor b) -> Tensor")
    library.impl("mm", lambda a, b: one(a, b) if a.dim() == 2 else torch.stack(list(map(one, a, b))), "CPU")
    library.impl("mm", lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]), "Meta")


def by_onednn():
    """A pass for torch.compile that leaves products to sfli::mm where the left matrix lies row by row."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    aten, mm = torch.ops.aten, torch.ops.sfli.mm.default

    class ByOneDNN(CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                if node.kwargs or node.target not in (aten.mm.default, aten.bmm.default, aten.addmm.default):
                    continue
                *bias, a, b = node.args
                left, right = a.meta["val"], b.meta["val"]
                thin = min(left.shape[-1], right.shape[-1]) < 32
                if thin or left.dtype != torch.float32 or left.stride(-1) != 1:
                    continue
                if not bias:
                    node.target = mm
                    continue
                with graph.inserting_before(node):
                    product = graph.call_function(mm, (a, b))
                product.meta = dict(node.meta)
                node.target, node.args = aten.add.Tensor, (product, *bias)

        def uuid(self):
            return get_hash_for_files((__file__,))

    return ByOneDNN()


@functools.cache
def openblas():
    """Where PyTorch's MKL is slow in float64, on AMD CPUs: how numpy's OpenBLAS tells and takes its number of threads,
    (get, set), or None. By machine and not by a timing, so that a run repeated gives the same bits."""
    with contextlib.suppress(ImportError, OSError, AttributeError):  # no numpy, no Linux
        from numpy.linalg import _umath_linalg

        if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
            return None
        library = ctypes.CDLL(_umath_linalg.__file__)
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads"):
            if hasattr(library, name.format("set")):
                return [getattr(library, name.format(verb)) for verb in ("get", "set")]
    return None


def gram(A):
    """A A^T of a float64 matrix by OpenBLAS, which computes half of it, with as many threads as torch takes."""
    get, set = openblas()
    before = get()
    set(torch.get_num_threads())
    try:
        array = A.detach().numpy()
        return torch.from_numpy(array @ array.T)
    finally:
        set(before)


def self_report():
    """python cli.py: what this machine has, what works on it, and how fast it is."""
    from common import PirateNet, Stopped, jet, sfli, train, uniform
    from kernels.gaussian_gram import gaussian_gram

    def version(package):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
        return "absent"

    packages = ("torch", "numpy", "scipy", "matplotlib", "triton", "pytorch-optimizer")
    print(f"python {sys.version.split()[0]}, " + ", ".join(f"{p} {version(p)}" for p in packages))
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ", ".join(torch.cuda.get_device_name(k) for k in range(cuda)) or "no CUDA device"
    print(f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads; {gpus}")
    print(f"--preset auto is {'paper' if cuda else 'laptop'}")
    device = "cuda" if cuda else "cpu"
    try:
        if not (cuda or can_compile()):
            raise RuntimeError("it needs a C++ compiler and Python.h")
        x = torch.ones(3, device=device)
        assert torch.equal(torch.compile(lambda x: torch.tanh(x) + 1)(x), torch.tanh(x) + 1)
        print("torch.compile works")
    except Exception as e:
        print(f"torch.compile does not work ({str(e).splitlines()[0]}); runs train uncompiled")
    gaussian_gram(*(torch.rand(n, 2, device=device) for n in (64, 8, 8)))
    print(f"gaussian_gram works, {'by its Triton kernel' if cuda else 'on the CPU; the Triton kernel needs CUDA'}")
    net, times = sfli(PirateNet(2, 128, 2), [(0, 1), (-1, 1)]).to(device), []

    def sample(generator):
        times.append(time.perf_counter())
        return {"x": uniform([(0, 1), (-1, 1)], 512, generator)}

    def residuals(net, batch):
        u, heat = jet(net, batch["x"], "t x", "t-1e-4*xx")
        return {"res": (heat + u)[:, 0]}

    start = time.perf_counter()
    with contextlib.suppress(Stopped):
        train(net, sample, residuals, 500, stop=lambda: time.perf_counter() - start > 8)
    print(f"speed: {1e3 * min(b - a for a, b in zip(times, times[1:])):.1f} ms per step of a heat equation, PirateNet "
          "2 x 128, batch 512, uncompiled")
