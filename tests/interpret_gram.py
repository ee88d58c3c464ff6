"""The Triton kernels on CPU tensors. Run by test_gaussian_gram.py in a process of its own with TRITON_INTERPRET=1."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels.gaussian_gram import choose, gaussian_gram, reference  # noqa: E402


def layer(B, n, d, generator):
    """Gaussians on [-1, 1]^d by eq. (choice)."""
    gamma = (n ** (1 / d) - 1) / 2
    return torch.full((B, n, d), gamma), -gamma * (2 * torch.rand(B, n, d, generator=generator) - 1)


def exact(x, w, b, q):
    """M in extended precision: the float64 reference itself is off by up to 2e-15."""
    x, w, b = (t.numpy().astype(np.longdouble) for t in (x, w, b))
    phi = np.exp(-((x[:, None] * w[:, None] + b[:, None]) ** 2).sum(-1))  # [B, N, n]
    weights = 1 if q is None else q.numpy().astype(np.longdouble)[:, None]
    return np.einsum("bpi,bpj->bij", weights * phi, phi)


def check(x, w, b, q):
    """|dM| / max|M|: 4e-8 is float32 rounding averaged over the points, the polynomial promises 1e-8 (5e-9 for each of
    two factors); with the float64 exponential 1e-15, float64 rounding."""
    want = exact(x, w, b, q)
    for phi64, bound in ((False, 1e-8), (True, 1e-15)):
        M = gaussian_gram(x, w, b, q, impl="triton", phi64=phi64)
        error = float(np.abs(M.numpy() - want).max() / want.max())
        assert M.dtype == torch.float64 and torch.equal(M, M.mT) and error <= bound, (w.shape, phi64, error)
    assert torch.equal(M, gaussian_gram(x, w, b, q, impl="triton", phi64=True))  # deterministic


def main():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    shapes = [
        (1, 100, 16, 1),
        (2, 333, 50, 2),
        (1, 257, 70, 7),
        (2, 130, 33, 50),
        (1, 300, 130, 2),
        (1, 5, 20, 2),
        (2, 150, 260, 2),
        (1, 90, 140, 20),
    ]
    for B, N, n, d in shapes:
        x, (w, b) = 2 * torch.rand(N, d, generator=generator) - 1, layer(B, n, d, generator)
        q = torch.rand(N, generator=generator)
        q[::7] = 0
        for weights in (None, q):
            check(x, w, b, weights)
        seen.add(choose(n, d))
    assert seen == {"tile64", "tile128", "rank_k"}

    x, (w, b) = 2 * torch.rand(2, 200, generator=generator) - 1, layer(2, 40, 2, generator)
    check(x.T, w.mT.contiguous().mT, b.flip(0), torch.rand(400, generator=generator)[::2])  # not contiguous
    M = gaussian_gram(torch.zeros(0, 2), w, b, impl="triton")
    assert M.shape == (2, 40, 40) and not M.any()
    y = gaussian_gram(x.T, w, b, impl="triton", launch=dict(T=64, P=16, warps=2))
    assert torch.allclose(y, reference(x.T, w, b), rtol=0, atol=1e-8 * y.max().item())

    # rank against the singular values of the features themselves, which need no Gram matrix
    x, (w, b) = 2 * torch.rand(400, 1, generator=generator) - 1, layer(1, 30, 1, generator)
    w, b = 3 * w / w.max(), 3 * b / w.max()
    lam = torch.linalg.eigvalsh(gaussian_gram(x, w, b, impl="triton")[0])
    phi = torch.exp(-((x.double()[:, None] * w[0].double() + b[0].double()) ** 2).sum(-1))
    truth = torch.linalg.svdvals(phi) ** 2
    for eps in (1e-6, 1e-8, 1e-10, 1e-12):
        assert (lam > eps * lam.max()).sum() == (truth > eps * truth.max()).sum(), eps
    print(f"ok {len(shapes)} shapes")


if __name__ == "__main__":
    main()
