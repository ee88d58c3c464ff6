"""The fused Gaussian-Gram kernel: values, ranks, gradients, compilation without a GPU, refusals, its use."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from conftest import ROOT

from common import FirstLayer, eps_rank, gram_spectrum, grid, sfli
from kernels import gaussian_gram as module
from kernels.gaussian_gram import LAUNCH, gaussian_gram, reference

EPS = (1e-6, 1e-8, 1e-10, 1e-12)


def layer(batch, n, d, gamma, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    c = 2 * torch.rand(*batch, n, d, generator=generator, dtype=dtype) - 1
    return torch.full_like(c, gamma), -gamma * c


def points(N, d, seed=1, dtype=torch.float32):
    return 2 * torch.rand(N, d, generator=torch.Generator().manual_seed(seed), dtype=dtype) - 1


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N,n,d", [(100, 16, 1), (5000, 50, 2), (2049, 130, 7), (1024, 64, 50), (3, 65, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cpu_path_against_the_reference(N, n, d, weighted):
    """Both float64; the expanded square cancels gamma^2 d = 500 at worst, 500 * 2e-16 = 1e-13."""
    (w, b), x = layer((2, 3), n, d, 3.0), points(N, d)
    q = torch.rand(N) if weighted else None
    if weighted:
        q[::5] = 0
    M, want = gaussian_gram(x, w, b, q), gaussian_gram(x, w, b, q, impl="torch")
    assert M.shape == (2, 3, n, n) and M.dtype == torch.float64 and torch.equal(M, M.mT) and torch.equal(want, want.mT)
    assert (M - want).abs().max() <= 1e-13 * want.max()
    assert torch.equal(M, gaussian_gram(x, w, b, q))


def test_gauss_hermite_closed_form(float64):
    """d = 1 on a wide fine grid: integral of phi_i phi_j = sqrt(pi / 2) / gamma exp(-gamma^2 (c_i - c_j)^2 / 2)."""
    c, gamma = torch.tensor([-0.3, 0.0, 0.5]), 2.0
    x = torch.linspace(-8, 8, 4001)[:, None]
    M = gaussian_gram(x, torch.full((3, 1), gamma), -gamma * c[:, None], torch.full((4001,), 16 / 4000))
    want = (torch.pi / 2) ** 0.5 / gamma * torch.exp(-(gamma**2) * (c[:, None] - c) ** 2 / 2)
    assert torch.allclose(M, want, rtol=1e-13, atol=0)


def test_not_contiguous_and_empty():
    (w, b), x = layer((2,), 40, 3, 2.0), points(600, 3)
    y, q = x.T.contiguous().T[::2], torch.rand(600)[::2]
    assert torch.equal(
        gaussian_gram(y, w.mT.contiguous().mT, b, q), gaussian_gram(y.contiguous(), w, b, q.contiguous())
    )
    assert gaussian_gram(x[:0], w, b).shape == (2, 40, 40) and not gaussian_gram(x[:0], w, b).any()


def test_rank_is_that_of_the_features_themselves():
    """2e5 points, 50 smooth Gaussians: the truth are the singular values of sqrt(q) phi, which square no condition
    number (QR, then SVD). The same Gram matrix accumulated in float32 fails: nobody may optimise it back."""
    (w, b), x = layer((), 50, 1, 3.0), points(200_000, 1)
    q = torch.full((200_000,), 2 / 200_000)
    phi = module.features(x.double(), w.double(), b.double()) * q.double().sqrt()[:, None]
    truth = torch.linalg.svdvals(torch.linalg.qr(phi).R) ** 2
    count = lambda lam: [int((lam > eps * lam.max()).sum()) for eps in EPS]
    assert count(torch.linalg.eigvalsh(gaussian_gram(x, w, b, q))) == count(truth)
    assert len(set(count(truth))) == 4  # the thresholds tell apart
    phi32 = phi.float()
    wrong = count(torch.linalg.eigvalsh((phi32.T @ phi32).double()))
    assert wrong[3] > count(truth)[3] + 3 and wrong[2] != count(truth)[2]


def test_memory_does_not_grow_with_the_points():
    """1e6 points, 256 neurons: the features would take 2 GB; the peak may grow by less than 500 MB."""
    code = (
        "import torch, sys; sys.path.insert(0, sys.argv[1]); from kernels.gaussian_gram import gaussian_gram\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "x, w, b = torch.rand(10**6, 2), torch.full((256, 2), 7.5), -7.5 * torch.rand(256, 2)\n"
        "gaussian_gram(x[:5000], w, b)\n"
        "before = peak(); gaussian_gram(x, w, b); print(peak() - before)"
    )
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and float(done.stdout) < 500, done.stdout + done.stderr


# Gradients ----------------------------------------------------------------------------------------


def test_gradcheck(float64, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)  # several blocks
    (w, b), x = layer((2,), 5, 2, 1.5, dtype=torch.float64), points(37, 2, dtype=torch.float64)
    w, b, q = w.requires_grad_(), b.requires_grad_(), torch.rand(37)
    assert torch.autograd.gradcheck(lambda w, b: gaussian_gram(x, w, b, q), (w, b))
    assert torch.autograd.gradcheck(lambda w, b: gaussian_gram(x, w[0], b[0]), (w, b))


def test_gradient_of_an_objective_against_autograd():
    """log det M, float32 parameters: the gradient against PyTorch's own through the reference."""
    (w, b), x = layer((), 12, 2, 3.0), points(3000, 2)
    gradients = []
    for gram in (gaussian_gram, reference):
        v, a = w.clone().requires_grad_(), b.clone().requires_grad_()
        torch.logdet(gram(x, v, a)).backward()
        gradients.append(torch.cat([v.grad, a.grad]))
    assert gradients[0].dtype == torch.float32
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5 * gradients[1].abs().max().item())


# Triton -------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(module.triton is None, reason="triton is not installed on this platform")


@needs_triton
def test_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "interpret_gram.py")],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0 and done.stdout.startswith("ok 8 shapes"), done.stdout + done.stderr


def compiled(name, target, d=2, weighted=True, phi64=False):
    """Every kernel of a launch configuration, compiled without a GPU."""
    from triton.compiler import ASTSource

    T, P, warps = (LAUNCH[name][k] for k in ("T", "P", "warps"))
    flags = dict(D=d, T=T, P=P, WEIGHTED=weighted, PHI64=phi64)
    if name == "rank_k":
        kernels = [(module.feature_kernel, flags), (module.rank_k_kernel, dict(T=T, P=P))]
    else:  # ONE: a single tile; the pairs of tiles exist for tile128 alone
        kernels = [
            (module.fused_kernel, flags | dict(ONE=one)) for one in ([True, False] if name == "tile128" else [True])
        ]
    pointers = {
        "x": "*fp32",
        "w": "*fp32",
        "b": "*fp32",
        "root": "*fp64",
        "pairs": "*i32",
        "out": "*fp64",
        "phi": "*fp64",
    }
    for kernel, constants in kernels:
        signature = {k: "constexpr" if k in constants else pointers.get(k, "i32") for k in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        yield kernel, module.triton.compile(source, target=target, options={"num_warps": warps})


@needs_triton
@pytest.mark.parametrize("d,weighted,phi64", [(1, False, False), (2, True, False), (50, True, False), (2, True, True)])
@pytest.mark.parametrize("name", LAUNCH)
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_for_nvidia(arch, name, d, weighted, phi64, tmp_path):
    """No register spills, shared memory within the 96 KB that every such card gives a block, float64 tensor cores."""
    from triton.backends.compiler import GPUTarget

    ptxas = os.path.join(os.path.dirname(module.triton.__file__), "backends", "nvidia", "bin", "ptxas")
    for kernel, binary in compiled(name, GPUTarget("cuda", arch, 32), d, weighted, phi64):
        ptx = binary.asm["ptx"]
        assert binary.metadata.shared <= 96 * 1024
        if kernel is not module.feature_kernel:
            assert re.search(r"mma\.sync\S*\.f64", ptx)
        (tmp_path / "kernel.ptx").write_text(ptx)
        gpu = re.search(r"\.target (\w+)", ptx).group(1)
        report = subprocess.run(
            [ptxas, "-v", "--gpu-name", gpu, str(tmp_path / "kernel.ptx"), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
        assert len(spills) == 2 and not any(spills), (kernel.__name__, report)


@needs_triton
@pytest.mark.parametrize("backend,arch,warp", [("cuda", 100, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)])
@pytest.mark.parametrize("name", LAUNCH)
def test_compiles_for_other_targets(backend, arch, warp, name):
    from triton.backends.compiler import GPUTarget

    for _, binary in compiled(name, GPUTarget(backend, arch, warp)):
        assert binary.metadata.shared <= 64 * 1024  # what gfx942 has
        assert binary.asm["cubin" if backend == "cuda" else "hsaco"]


# Refusals -----------------------------------------------------------------------------------------


def test_triton_refuses_where_it_cannot_run():
    (w, b), x = layer((), 5, 2, 1.0), points(9, 2)
    with pytest.raises(RuntimeError, match="impl='triton' needs"):
        gaussian_gram(x, w, b, impl="triton")


@pytest.mark.parametrize(
    "change,error,message",
    [
        (dict(x=torch.zeros(9)), ValueError, r"x: expected the shape \[N, d\]"),
        (dict(w=torch.zeros(5, 3)), ValueError, r"w: expected the shape \[..., n, 2\]"),
        (dict(w=torch.zeros(2)), ValueError, r"w: expected"),
        (dict(b=torch.zeros(4, 2)), ValueError, r"b: expected the shape of w, \[5, 2\]"),
        (dict(weights=torch.ones(8)), ValueError, r"weights: expected the shape \[9\]"),
        (dict(weights=-torch.ones(9)), ValueError, "weights: must not be negative"),
        (dict(x=torch.zeros(9, 2, dtype=torch.int64)), TypeError, "x: expected a tensor of floating-point"),
        (dict(b=[[0.0]]), TypeError, "b: expected a tensor"),
        (dict(w=torch.zeros(5, 2, device="meta")), ValueError, "w: is on meta, x on cpu"),
        (dict(x=torch.full((9, 2), float("nan"))), ValueError, "x: contains NaN or Inf"),
        (dict(w=torch.full((5, 2), float("inf"))), ValueError, "w: contains NaN or Inf"),
        (dict(b=torch.full((5, 2), float("nan"))), ValueError, "b: contains NaN or Inf"),
        (dict(x=torch.zeros(9, 2, requires_grad=True)), ValueError, "detach"),
        (dict(impl="cuda"), ValueError, "'cuda' is unknown"),
    ],
)
def test_refusals(change, error, message):
    arguments = dict(x=torch.zeros(9, 2), w=torch.ones(5, 2), b=torch.zeros(5, 2)) | change
    with pytest.raises(error, match=message):
        gaussian_gram(arguments.pop("x"), arguments.pop("w"), arguments.pop("b"), **arguments)


def test_a_kernel_that_fails(capsys, monkeypatch):
    """auto on CUDA: one line, and plain products take its place; "triton" lets the error through."""
    x, w, b = points(50, 2), torch.ones(5, 2), torch.zeros(5, 2)

    def broken(*arguments, **options):
        raise RuntimeError("no such driver")

    M = module.or_else(broken, module.cpu_gram)(x, w[None], b[None])[0]
    assert "the Triton kernel fails" in capsys.readouterr().out
    assert torch.allclose(M.triu(), module.reference(x, w, b).triu())


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device: for tensors on another one the guard comes first, then the launch."""
    seen, now = [], [0]

    class Elsewhere:  # a tensor of cuda:1, as far as triton_gram looks at it before it launches
        is_cuda, device, shape = True, torch.device("cuda:1"), (9, 2)

        def contiguous(self):
            seen.append(now[0])
            raise InterruptedError

    class Guard:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            now[0] = self.index

        def __exit__(self, *error):
            now[0] = 0

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    x = Elsewhere()
    w = torch.ones(1, 5, 2)
    with pytest.raises(InterruptedError):
        module.triton_gram(x, w, w)
    assert seen == [1]


# Use ----------------------------------------------------------------------------------------------


def test_self_check_command():
    done = subprocess.run(
        [sys.executable, "-m", "kernels.gaussian_gram"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.endswith("self-check passed\n"), done.stderr


def test_gamma_auto(tmp_path, capsys, monkeypatch):
    """One table of 16 candidates, the stated criterion, the layer that is then trained."""
    import exp_function_fit

    calls = []
    monkeypatch.setattr(module, "gaussian_gram", lambda *a: calls.append(a[1].shape) or gaussian_gram(*a))
    line = f"--sfli --gamma auto --width 50 --steps 2 --lr 1e-30 --no-plot --seed 3 --out {tmp_path}"
    exp_function_fit.main(line.split())
    assert calls == [(16, 50, 2)]  # all candidates in one call of the kernel
    rows = re.findall(
        r"^ *([\d.]+) +([\d.]+) +(\d+) +(\d+) +(\d+) +(\d+)( +<- chosen)?$", capsys.readouterr().out, re.M
    )
    assert [row[0] for row in rows] == [f"{k / 10:.1f}" for k in range(5, 21)]
    (chosen,) = [row for row in rows if row[6]]
    ranks = [int(row[3]) for row in rows]  # at eps = 1e-6
    assert int(chosen[3]) >= 45 and all(r < 45 for r, row in zip(ranks, rows) if float(row[0]) < float(chosen[0]))
    folder = tmp_path / "function_fit/sfli-gauss/seed3"
    gamma = json.loads((folder / "config.json").read_text())["network"]["gamma"]
    assert gamma == pytest.approx(float(chosen[1]), rel=1e-3)
    assert json.loads((folder / "result.json").read_text())["gamma"] == gamma
    parameters = torch.load(folder / "checkpoint.pt", weights_only=True)["params"]
    trained = FirstLayer("gauss", parameters["first.weight"], parameters["first.bias"])
    spectrum = gram_spectrum(trained(grid([(-1, 1)] * 2, 50)), 4.0)
    assert int((spectrum > 1e-6).sum()) == int(chosen[3])


@pytest.mark.parametrize("flags", ["--sfli tanh --gamma auto", "--gamma auto", "--sfli --gamma auto --width 1"])
def test_gamma_auto_refusals(flags, tmp_path, capsys):
    import exp_function_fit

    with pytest.raises(SystemExit) as e:
        exp_function_fit.main([*flags.split(), "--preset", "smoke", "--out", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and "--gamma" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_rank_of_a_layer_at_many_points(monkeypatch):
    """From 10^5 points on the features of a Gaussian layer are not stored: the rank of the kernel's Gram matrix."""
    first = sfli(nn.Linear(2, 30), [(-1, 1)] * 2, C=0.6, generator=torch.Generator().manual_seed(0))
    x, calls = points(100_001, 2), []
    monkeypatch.setattr(module, "gaussian_gram", lambda *a: calls.append(len(a[0])) or gaussian_gram(*a))
    rank = eps_rank(first, x, measure=4.0)
    assert calls == [100_001] and rank == eps_rank(first(x), measure=4.0) < 30
    assert abs(eps_rank(first, x[:20_000], measure=4.0) - rank) <= 1 and len(calls) == 1


def test_kernel_accepts_a_layer_on_its_own():
    first = sfli(nn.Linear(2, 30), [(-1, 1)] * 2, generator=torch.Generator().manual_seed(0))
    x = points(500, 2)
    phi = first(x).double()
    M = gaussian_gram(x, first.weight, first.bias)
    assert torch.allclose(M, phi.T @ phi, rtol=1e-6, atol=1e-6) and M.requires_grad
