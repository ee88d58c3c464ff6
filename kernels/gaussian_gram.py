"""Gram matrix of a Gaussian first layer, without ever storing its features.

    M = sum_p q_p phi(x_p) phi(x_p)^T,    phi_i(x) = exp(-sum_k (w_ik x_k + b_ik)^2)

The eps-rank of the paper counts the eigenvalues of M above eps, so M must be right to eps times its largest entry, and
that decides the precision: products and sums must be float64. Then the eigenvalues are clean down to 5e-16 of the
largest; float32 or TF32 sums have a noise floor of 1e-9 .. 1e-5 and invent rank. The features themselves may be less
exact, float32 rounding would do; but beside the T products that each of them enters, a float64 exponent and a short
polynomial for the exponential cost little and are right to 5e-9 (phi64: the float64 exponential).

    python -m kernels.gaussian_gram        self-check: which path runs here, its error, the rank it sees
"""
import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not on this platform; the CPU path and the reference do without
    triton = None

# Reference ----------------------------------------------------------------------------------------


def features(x, w, b):
    """phi [..., N, n], the formula as it stands, in the precision of the arguments."""
    z = x[:, None, :] * w[..., None, :, :] + b[..., None, :, :]  # [..., N, n, d]
    return torch.exp(-z.square().sum(-1))


def reference(x, w, b, weights=None):
    """Plain PyTorch in float64, all features at once."""
    phi = features(x.double(), w.double(), b.double())
    if weights is not None:
        phi = phi * weights.double().sqrt()[:, None]
    return phi.mT @ phi


# CPU ----------------------------------------------------------------------------------------------

CHUNK = 1024  # points per block: 1024 x 256 doubles are 2 MB, about the second-level cache of a core
STRIP = 64  # rows of M per product; with n = 256 the upper triangle costs 5/8 of the full product


def expanded(w, b):
    """A [B, n, 2 d + 1] with -|w x + b|^2 = A [x^2, x, 1]: one thin product. It cancels up to gamma^2 |x|^2, which is
    harmless in float64 and forbidden in float32."""
    w, b = w.double(), b.double()
    return torch.cat([w * w, 2 * w * b, (b * b).sum(-1, keepdim=True)], -1).neg()


def chunks(x, A, weights):
    """sqrt(q) phi [B, n, P] for successive blocks of points, in float64."""
    root = None if weights is None else weights.double().sqrt()
    for start in range(0, len(x), CHUNK):
        y = x[start : start + CHUNK].double()
        phi = (A @ torch.cat([y * y, y, torch.ones_like(y[:, :1])], 1).T).exp_()
        yield start, phi if root is None else phi.mul_(root[start : start + CHUNK])


def cpu_gram(x, w, b, weights=None):
    """float64 in blocks of points, memory independent of N. x [N, d], w, b [B, n, d] -> upper triangle [B, n, n]."""
    B, n, _ = w.shape
    M = torch.zeros(B, n, n, dtype=torch.float64, device=x.device)
    for _, phi in chunks(x, expanded(w, b), weights):
        for k in range(B):
            for i in range(0, n, STRIP):
                M[k, i : i + STRIP, i:].addmm_(phi[k, i : i + STRIP], phi[k, i:].T)
    return M


# Triton -------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def phi_tile(x, w, b, root, rows, cols, N, n, D: tl.constexpr, WEIGHTED: tl.constexpr, PHI64: tl.constexpr):
        """sqrt(q) phi [P, T] in float64 at the points `rows` for the neurons `cols`; zero outside."""
        in_rows, in_cols = rows < N, cols < n
        s = tl.zeros([rows.shape[0], cols.shape[0]], dtype=tl.float64)
        for k in range(D):
            x_k = tl.load(x + rows * D + k, mask=in_rows, other=0.0).to(tl.float64)
            w_k = tl.load(w + cols * D + k, mask=in_cols, other=0.0).to(tl.float64)
            b_k = tl.load(b + cols * D + k, mask=in_cols, other=0.0).to(tl.float64)
            z = tl.fma(x_k[:, None], w_k[None, :], b_k[None, :])
            s = tl.fma(z, z, s)
        if PHI64:
            phi = tl.exp(-s)
        else:  # exp(-s) = 2^-k exp(t), |t| <= 0.35, by its Taylor polynomial to 5e-9
            s = tl.minimum(s, 700.0)
            k = tl.floor(s * 1.4426950408889634 + 0.5)
            t = k * 0.6931471805599453 - s
            p = 1 + t * (1 / 7)
            p = 1 + t * (1 / 6) * p
            p = 1 + t * (1 / 5) * p
            p = 1 + t * (1 / 4) * p
            p = 1 + t * (1 / 3) * p
            p = 1 + t * (1 / 2) * p
            p = 1 + t * p
            phi = p * ((1023 - k.to(tl.int64)) << 52).to(tl.float64, bitcast=True)
        phi = tl.where(in_rows[:, None] & in_cols[None, :], phi, 0.0)
        if WEIGHTED:
            phi = phi * tl.load(root + rows, mask=in_rows, other=0.0)[:, None]
        return phi

    @triton.jit
    def fused_kernel(x, w, b, root, pairs, out, N, n, per_split, D: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
                     ONE: tl.constexpr, WEIGHTED: tl.constexpr, PHI64: tl.constexpr):
        """out[split, batch, pair]: tile (i, j) of M over `per_split` blocks of P points, the features made on chip."""
        split, pair, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        i, j = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        w, b = w + batch * n * D, b + batch * n * D
        cols = tl.arange(0, T)
        acc = tl.zeros([T, T], dtype=tl.float64)
        for t in range(per_split):
            rows = (split * per_split + t).to(tl.int64) * P + tl.arange(0, P)
            phi_i = phi_tile(x, w, b, root, rows, i * T + cols, N, n, D, WEIGHTED, PHI64)
            phi_j = phi_i if ONE else phi_tile(x, w, b, root, rows, j * T + cols, N, n, D, WEIGHTED, PHI64)
            acc += tl.dot(tl.trans(phi_i), phi_j, input_precision="ieee", out_dtype=tl.float64)
        at = (split * tl.num_programs(2) + batch).to(tl.int64) * tl.num_programs(1) + pair
        tl.store(out + at * T * T + cols[:, None] * T + cols[None, :], acc)

    @triton.jit
    def feature_kernel(x, w, b, root, phi, start, N, n, stride, D: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
                       WEIGHTED: tl.constexpr, PHI64: tl.constexpr):
        """sqrt(q) phi of a chunk of points -> phi [batch, points, stride], float64."""
        block, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        local, cols = block * P + tl.arange(0, P), tile * T + tl.arange(0, T)
        rows = start + local
        value = phi_tile(x, w + batch * n * D, b + batch * n * D, root, rows, cols, N, n, D, WEIGHTED, PHI64)
        at = (batch * tl.num_programs(0) * P + local).to(tl.int64)
        tl.store(phi + at[:, None] * stride + cols[None, :], value)

    @triton.jit
    def rank_k_kernel(phi, pairs, out, points, stride, per_split, T: tl.constexpr, P: tl.constexpr):
        """out[split, batch, pair] += phi_i^T phi_j over `per_split` blocks of P points of the chunk."""
        split, pair, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        i, j = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        cols = tl.arange(0, T)
        at = (split * tl.num_programs(2) + batch).to(tl.int64) * tl.num_programs(1) + pair
        tile = out + at * T * T + cols[:, None] * T + cols[None, :]
        acc = tl.load(tile)
        for t in range(per_split):
            rows = (batch * points + (split * per_split + t) * P + tl.arange(0, P)).to(tl.int64)
            phi_i = tl.load(phi + rows[:, None] * stride + i * T + cols[None, :])
            phi_j = tl.load(phi + rows[:, None] * stride + j * T + cols[None, :])
            acc += tl.dot(tl.trans(phi_i), phi_j, input_precision="ieee", out_dtype=tl.float64)
        tl.store(tile, acc)


# Launch configurations, fixed so that nothing is tuned at run time; `launch` overrides them. T: neurons per tile, P:
# points per block. The accumulator is T^2 doubles over 32 * warps threads: T = 128 on 8 warps is 128 registers a
# thread, half of what there is, and 16 points per block keep the operands of the product small beside it.
LAUNCH = {
    "tile64": dict(T=64, P=32, warps=4),  # n <= 64
    "tile128": dict(T=128, P=16, warps=8),  # n <= 128: one tile; n <= 256 and d < 20: its three upper tiles
    "rank_k": dict(T=128, P=16, warps=8),  # beyond: features once per chunk, not once per tile of M
}
PROGRAMS = 1024  # tiles x splits over the points; the few output tiles alone would leave a GPU idle
CHUNK_BYTES = 16 * 2**20  # features of one chunk for rank_k: they stay in the second-level cache


def choose(n, d):
    if n <= 64:
        return "tile64"
    return "tile128" if n <= 128 or (n <= 256 and d < 20) else "rank_k"


def triton_gram(x, w, b, weights=None, phi64=False, launch=None):
    """x [N, d], w, b [B, n, d] on a CUDA device (anywhere under TRITON_INTERPRET=1) -> upper triangle [B, n, n]."""
    (N, d), (B, n, _) = x.shape, w.shape
    if x.is_cuda and x.device.index != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(x.device):
            return triton_gram(x, w, b, weights, phi64, launch)
    name = choose(n, d)
    options = LAUNCH[name] | (launch or {})
    T, P, warps = options["T"], options["P"], options["warps"]
    x, w, b = (t.contiguous() for t in (x, w, b))
    root = x if weights is None else weights.double().sqrt().contiguous()
    tiles = triton.cdiv(n, T)
    upper = [(i, j) for i in range(tiles) for j in range(i, tiles)]
    pairs = torch.tensor(upper, dtype=torch.int32, device=x.device)
    flags = dict(WEIGHTED=weights is not None, PHI64=phi64)

    def split(blocks):  # programs over the points, blocks of points for each
        programs = max(1, min(blocks, PROGRAMS // (B * len(upper))))
        each = triton.cdiv(blocks, programs)
        return triton.cdiv(blocks, each), each

    if name != "rank_k":
        splits, each = split(triton.cdiv(N, P))
        out = x.new_empty(splits, B, len(upper), T, T, dtype=torch.float64)
        launcher = fused_kernel[(splits, len(upper), B)]
        launcher(x, w, b, root, pairs, out, N, n, each, D=d, T=T, P=P, ONE=tiles == 1, **flags, num_warps=warps)
    else:
        stride = tiles * T
        splits, each = split(max(1, min(triton.cdiv(N, P), CHUNK_BYTES // (8 * B * stride * P))))
        points = splits * each * P
        phi = x.new_empty(B, points, stride, dtype=torch.float64)
        out = x.new_zeros(splits, B, len(upper), T, T, dtype=torch.float64)
        for start in range(0, N, points):
            feature_kernel[(splits * each, tiles, B)](x, w, b, root, phi, start, N, n, stride, D=d, T=T, P=P, **flags,
                                                      num_warps=warps)
            rank_k_kernel[(splits, len(upper), B)](phi, pairs, out, points, stride, each, T=T, P=P, num_warps=warps)
    # The second stage of the sum, in a fixed order: the result does not depend on which program ends first.
    part = out.sum(0)  # [B, pairs, T, T]
    M = x.new_zeros(B, tiles * T, tiles * T, dtype=torch.float64)
    for p, (i, j) in enumerate(upper):
        M[:, i * T : (i + 1) * T, j * T : (j + 1) * T] = part[:, p]
    return M[:, :n, :n]


# Public -------------------------------------------------------------------------------------------


class GaussianGram(torch.autograd.Function):
    """dM = sum_p q_p (phi dphi^T + dphi phi^T); the backward makes phi again, block by block, in plain PyTorch."""

    @staticmethod
    def forward(ctx, x, w, b, weights, compute):
        ctx.save_for_backward(x, w, b, weights)
        M = compute(x, w, b, weights)
        return M.triu() + M.triu(1).mT  # exactly symmetric, whatever the path left below the diagonal

    @staticmethod
    def backward(ctx, G):
        x, w, b, weights = ctx.saved_tensors
        H = (G + G.mT).double()
        # u_ip = q_p phi_i (H phi)_i; d phi_i / d w_ik = -2 phi_i (w_ik x_k + b_ik) x_k: moments of u are all it takes.
        u1, ux, uxx = 0, 0, 0
        for start, phi in chunks(x, expanded(w, b), weights):
            y = x[start : start + phi.shape[-1]].double()
            u = (H @ phi) * phi  # [B, n, P]
            u1, ux, uxx = u1 + u.sum(-1, keepdim=True), ux + u @ y, uxx + u @ (y * y)
        return None, (-2 * (w * uxx + b * ux)).to(w), (-2 * (w * ux + b * u1)).to(b), None, None


def or_else(compute, instead):
    """compute, or with one line `instead`, where a driver or compiler fails."""

    def try_first(*t):
        try:
            return compute(*t)
        except Exception as e:
            print(f"gaussian_gram: the Triton kernel fails ({type(e).__name__}: {str(e)[:100]!r}); plain float64 "
                  "products take its place", flush=True)
            return instead(*t)

    return try_first


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def gaussian_gram(x, w, b, weights=None, *, impl="auto", phi64=False, launch=None):
    """M [..., n, n], float64, exactly symmetric, of x [N, d], w and b [..., n, d], weights q [N] (default 1).

    Leading dimensions of w and b are independent layers (seeds, candidates for gamma, two encoders).
    impl: "auto" takes triton for CUDA tensors and the blocked CPU path otherwise; "triton" raises where it cannot run;
    "torch" is the plain reference. phi64: the float64 exponential in the Triton kernel too (elsewhere it always is).
    Differentiable with respect to w and b; deterministic."""
    arguments = {"x": x, "w": w, "b": b} | ({} if weights is None else {"weights": weights})
    for name, t in arguments.items():
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            kind = getattr(t, "dtype", type(t).__name__)
            raise TypeError(f"{name}: expected a tensor of floating-point numbers, got {kind}")
        if t.device != x.device:
            raise ValueError(f"{name}: is on {t.device}, x on {x.device}; move them to one device")
    if x.dim() != 2:
        raise ValueError(f"x: expected the shape [N, d], got {list(x.shape)}")
    if w.dim() < 2 or w.shape[-1] != x.shape[1]:
        raise ValueError(f"w: expected the shape [..., n, {x.shape[1]}] for x {list(x.shape)}, got {list(w.shape)}")
    if b.shape != w.shape:
        raise ValueError(f"b: expected the shape of w, {list(w.shape)}, got {list(b.shape)}")
    if weights is not None and weights.shape != x.shape[:1]:
        raise ValueError(f"weights: expected the shape [{len(x)}], got {list(weights.shape)}")
    for name, t in arguments.items():
        if not t.isfinite().all():
            raise ValueError(f"{name}: contains NaN or Inf")
    if weights is not None and (weights < 0).any():
        raise ValueError("weights: must not be negative")
    if x.requires_grad or weights is not None and weights.requires_grad:
        raise ValueError("x, weights: the gradient is for w and b only; detach() them")
    if impl not in ("auto", "triton", "torch"):
        raise ValueError(f"impl: {impl!r} is unknown; choose auto, triton or torch")
    if impl == "triton" and (triton is None or not (x.is_cuda or interpreted())):
        missing = "the package triton" if triton is None else "CUDA tensors (or TRITON_INTERPRET=1 before the import)"
        raise RuntimeError(f"impl='triton' needs {missing}; impl='auto' runs on a CPU")
    batch, (n, d) = w.shape[:-2], w.shape[-2:]
    if len(x) == 0 or w.numel() == 0:
        return (w.sum() + b.sum()).double() * 0 + torch.zeros(*batch, n, n, dtype=torch.float64, device=x.device)
    by_kernel = lambda *t: triton_gram(*t, phi64=phi64, launch=launch)
    if impl == "auto":
        compute = or_else(by_kernel, cpu_gram) if x.is_cuda and triton is not None else cpu_gram
    else:
        compute = by_kernel if impl == "triton" else reference
    M = GaussianGram.apply(x, w.reshape(-1, n, d), b.reshape(-1, n, d), weights, compute)
    return M.reshape(*batch, n, n)


def scan_gamma(n, domain, x=None, eps=1e-6, measure=None, embed=None, generator=None, enough=0.9):
    """Shape parameter for n Gaussians by looking at the rank: gamma of Eq. (3.3) for C = 0.5, 0.6, .. 2.0, all with
    the centres that `generator` draws, their Gram matrices at the points x (2500 uniform ones) in one batched call.

    Rank grows with gamma, but narrow bumps share no information: taken is the smallest C whose rank is at least
    `enough` n (the gamma of Examples 4.1 and 4.2 are at 0.83 and 0.90), or the highest rank where none is. measure:
    |Omega| up to three dimensions, else 1."""
    from common import FirstLayer, sfli, shape_parameter, uniform, volume

    embed = torch.nn.Identity() if embed is None else embed
    generator = torch.Generator() if generator is None else generator
    x = uniform(domain, 2500, torch.Generator(generator.device).manual_seed(3)) if x is None else x
    measure = (volume(domain) if len(domain) <= 3 else 1.0) if measure is None else measure
    candidates, layers, state = [k / 10 for k in range(5, 21)], [], generator.get_state()
    with torch.no_grad():
        z = embed(x)
        for C in candidates:
            generator.set_state(state)
            net = torch.nn.Sequential(embed, torch.nn.Linear(z.shape[1], n, device=z.device), torch.nn.Tanh())
            layers += [m for m in sfli(net, domain, "gauss", C=C, generator=generator) if isinstance(m, FirstLayer)]
        generator.set_state(state)
        w, b = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        spectra = torch.linalg.eigvalsh(gaussian_gram(z, w, b) * (measure / len(z)))  # [16, n]
    ranks = (spectra > eps).sum(-1).tolist()
    best = next((k for k, r in enumerate(ranks) if r >= enough * n), ranks.index(max(ranks)))
    thresholds = sorted({1e-4, 1e-6, 1e-8, 1e-10, eps}, reverse=True)
    print(f"{'C':>4} {'gamma':>8}  first-layer rank of {n} at eps = " + ", ".join(f"{e:g}" for e in thresholds))
    for k, C in enumerate(candidates):
        counts = " ".join(f"{int((spectra[k] > e).sum()):6}" for e in thresholds)
        print(f"{C:4.1f} {shape_parameter(n, domain, C):8.4g}  {counts}{'   <- chosen' if k == best else ''}")
    return shape_parameter(n, domain, candidates[best])


def self_check():
    """Error against the float64 reference and rank for three layers, on the path that `auto` takes here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = "triton" if device == "cuda" and triton is not None else "torch, float64 in blocks"
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, triton {triton.__version__ if triton else 'absent'}, {device} ({where}): {path}")
    generator, ok = torch.Generator().manual_seed(0), True
    for n, d, gamma in [(50, 1, 3.0), (128, 2, 5.0), (256, 2, 7.5), (300, 3, 3.0)]:
        x, c = (2 * torch.rand(m, d, generator=generator) - 1 for m in (20_000, n))
        x, w, b = (t.to(device) for t in (x, torch.full((n, d), gamma), -gamma * c))
        M, exact = gaussian_gram(x, w, b), reference(x, w, b)
        error = ((M - exact).abs().max() / exact.max()).item()
        rank = lambda M: int((lambda lam: (lam > 1e-10 * lam.max()).sum())(torch.linalg.eigvalsh(M)))
        good = error < 1e-7 and abs(rank(M) - rank(exact)) <= 1
        ok &= good
        print(f"n = {n:3}, d = {d}, gamma = {gamma:g}: error {error:.1e}, rank at 1e-10 {rank(M)}, "
              f"reference {rank(exact)}{'' if good else '  WRONG'}")
    print("self-check passed" if ok else "self-check FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(self_check())
