"""Natural gradient: Gauss-Newton in function space, d = J^T (J J^T + lam I)^-1 r with J = d r / d theta.

common.train(optimizer="ng") takes it from here, so copy this folder beside common.py if you want it in your project.
"""
import math

import torch

from common import Jet, Refused

try:
    from kernels import cpu
except ImportError:  # this file was copied without it
    cpu = None

NG_BYTES = 4e9  # limit for J and its Gram matrix


class NaturalGradient:
    """theta <- theta - eta d,  d = J^T (J J^T + lam I)^-1 r: the Gauss-Newton step in function space by the Woodbury
    identity (ENGD-W, arXiv 2505.12149). r stacks all residuals, each scaled by sqrt(weight / count), so |r|^2 is the
    loss that the other optimisers minimise. With momentum mu it is SPRING (arXiv 2401.10190): d minimises
    |J d - r|^2 + lam |d - mu d_old|^2.

    eta: halved from `lr`, at most TRIES times, until the loss falls on the same batch. lam: divided by 1.5 after a
    step that needed no halving, doubled after more than two; a step that never falls is rejected, doubles lam and
    forgets d_old. What happened is in the history: damping, eta, and the number of steps rejected so far."""

    TRIES = 12

    def __init__(self, net, residuals, lr=1.0, damping=1e-3, momentum=0.0):
        if not 0 < damping < math.inf or not 0 <= momentum < 1:
            raise Refused(f"damping, momentum: 0 < damping and 0 <= momentum < 1 are wanted, got {damping:g}, "
                          f"{momentum:g}")
        self.net, self.residuals, self.params = net, residuals, trained(net)
        if any(p.dtype != torch.float64 for p in self.params):
            raise Refused("dtype: natural gradient computes in float64; use that, net.double() in your own code")
        self.momentum, self.param_groups = momentum, [{"lr": lr}]
        self.damping, self.eta, self.rejected, self.d, self.J, self.jacobian = damping, 0.0, 0, None, None, None

    def state_dict(self):
        return self.report() | {"d": self.d}

    def load_state_dict(self, state):
        vars(self).update(state)

    def report(self):
        return {"damping": self.damping, "eta": self.eta, "rejected": self.rejected}

    def natural_gradient(self, problem, batch, w):
        """The direction for common.train(), loss weights w and causal weights included. -> {name: mean(r^2) [1]}"""
        r = self.direction(batch, lambda r: row_factors(problem, r, w))
        one = row_factors(problem, r, {k: torch.ones_like(v) for k, v in w.items()})
        return {k: (one[k] * r[k]).square().sum(0, keepdim=True) for k in r}

    def direction(self, batch, scale):
        """Direction d for this batch; scale(r) -> {name: [B]} are the factors of the rows. Returns r."""
        if self.jacobian is None:
            self.J, self.jacobian = self.choose_jacobian(batch)
        r, factor, J = self.jacobian(self.residuals, self.net, batch, scale, self.J)
        self.batch, self.factor = batch, factor
        R = torch.cat([factor[k] * r[k] for k in r])
        self.loss = (R @ R).item()
        wide = J.shape[0] <= J.shape[1]  # J^T (J J^T + lam)^-1 = (J^T J + lam)^-1 J^T: whichever is smaller
        G = gram(J if wide else J.T)
        if not G.diagonal().isfinite().all():
            raise Refused("optimizer: the Jacobian of the residuals is not finite; try a smaller gamma, and "
                             "look for a square root or a division in the residuals")
        old = torch.zeros_like(J[0]) if self.d is None else self.momentum * self.d.to(J)
        b = R - J @ old if self.momentum else R
        while True:  # rounding may leave J J^T indefinite by 1e-16 of its size: more damping then
            G.diagonal().add_(self.damping)
            L, failed = torch.linalg.cholesky_ex(G)
            if not failed:
                break
            G.diagonal().sub_(self.damping)
            self.damping *= 10
        solve = lambda b: torch.cholesky_solve(b[:, None], L)[:, 0]
        self.d = old + (J.T @ solve(b) if wide else solve(J.T @ b))
        return r

    @torch.no_grad()
    def step(self):
        def move(eta):
            for p, p_0, d in zip(self.params, theta, self.d.split([p.numel() for p in self.params])):
                p.copy_(p_0 - eta * d.view_as(p))

        theta = [p.clone() for p in self.params]
        eta = top = self.param_groups[0]["lr"]
        for _ in range(self.TRIES):
            move(eta)
            with torch.set_grad_enabled(self.jacobian is jacobian_by_rows):  # they may differentiate by x themselves
                r = self.residuals(self.net, self.batch)
            if sum((self.factor[k] * r[k]).square().sum().item() for k in r) < self.loss:  # not where it is nan
                break
            eta /= 2
        else:
            move(0.0)
            eta, self.d, self.rejected = 0.0, None, self.rejected + 1
        self.eta = eta
        if eta == top:
            self.damping = max(self.damping / 1.5, 1e-13)
        elif eta < top / 4:
            self.damping *= 2

    def size(self, batch):
        """Rows and columns of J; refuses what does not fit NG_BYTES."""
        P = sum(p.numel() for p in self.params)

        def check(R):
            size = 8 * (R * P + min(R, P) ** 2)
            if size > NG_BYTES:
                raise Refused(f"batch: J has {R} rows x {P} parameters, {size / 1e9:.1f} GB with its Gram matrix, "
                              f"over the limit of {NG_BYTES / 1e9:g} GB; use fewer points, a smaller width, or "
                              "another optimizer")
            return R, P

        check(max((len(v) for v in batch.values() if v.dim()), default=0))  # before the residuals take as much memory
        return check(sum(len(v) for v in self.residuals(self.net, batch).values()))

    def choose_jacobian(self, batch):
        """Buffer for J and the way to fill it: jacobian() where J z is the derivative of r along z for a random z, else
        jacobian_by_rows(), many times slower, for what jacobian() does not know."""
        R, P = self.size(batch)
        print(f"natural gradient: J {R} x {P} in float64, {8e-6 * R * P:.0f} MB", flush=True)
        J = torch.empty(R, P, dtype=torch.float64, device=self.params[0].device)
        try:
            jacobian(self.residuals, self.net, batch, ones, J)
            z = torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=J.dtype).to(J)
            difference = J @ z - derivative_along(z, self.residuals, self.net, batch)
            if not difference.norm() > 1e-9 * J.norm():  # rounding; nan is for direction() to report
                return J, jacobian
            why = "residuals of several samples, or parameters that enter by no linear map"
        except Exception as e:  # whatever it is, the other way meets it too if it is an error of the residuals
            why = f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"natural gradient: backward row by row, slowly ({why})", flush=True)
        return None, jacobian_by_rows


def trained(net):
    return [p for p in net.parameters() if p.requires_grad]


def ones(r):
    return {k: torch.ones_like(v) for k, v in r.items()}


def derivative_along(z, residuals, net, batch):
    """d r(theta + s z) / d s at s = 0, [rows], by two backward passes: J^T v is linear in v, and d (z . J^T v) / d v
    is J z. Forward mode would want rules that not every operation has."""
    r, params = torch.cat(list(residuals(net, batch).values())), trained(net)
    v = torch.zeros_like(r, requires_grad=True)
    grads = torch.autograd.grad(r, params, v, create_graph=True, allow_unused=True, materialize_grads=True)
    return torch.autograd.grad(torch.cat([g.flatten() for g in grads]), v, z)[0]


def row_factors(problem, r, w):
    """What makes |factor * r|^2 the loss of the network: sqrt(weight * causal weight / count), {name: [B]}."""
    c = problem.causality({k: v.unsqueeze(0) for k, v in r.items()})
    return {k: torch.sqrt(w[k] * c.get(k, torch.ones_like(v)) / len(v)).expand(1, len(v))[0] for k, v in r.items()}


def gram(A):
    """Lower triangle of A A^T (what Cholesky reads), by blocks of rows: little more than half the work. On a CPU by
    OpenBLAS where that is faster."""
    if A.device.type == "cpu" and cpu and cpu.openblas():
        return cpu.gram(A)
    n = len(A)
    G, block = A.new_zeros(n, n), -(-n // 8)
    for i in range(0, n, block):
        torch.mm(A[i : i + block], A[: i + block].T, out=G[i : i + block, : i + block])
    return G


class Tape(torch.overrides.TorchFunctionMode):
    """Records every operation through which parameters meet samples: linear(a, W, b), and a number that is trained (a
    coefficient of the equation, the alpha of a PirateNet) in any operation with an array of samples."""

    def __init__(self):
        super().__init__()
        self.maps = []  # (channels of the input, W, b, channels of the output)
        self.numbers = []  # (number, its copies, one for each sample)

    def __enter__(self):
        Jet.short_cuts = False  # past linear()
        return super().__enter__()

    def __exit__(self, *error):
        Jet.short_cuts = True
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "linear":
            return func(*self.copied(args), **kwargs)
        out = func(*args, **kwargs)
        a, W, b = [*args, *kwargs.values(), None][:3]
        if W.requires_grad or b is not None and b.requires_grad:
            if isinstance(out, Jet):  # gradients per sample want a row per sample, also where all rows are equal
                out = Jet([None if c is None else out.full(k) for k, c in enumerate(out.channels)], out.plan)
            self.maps.append((channels(a), W, b, channels(out)))
        return out

    def copied(self, args):
        """args with a copy per sample, [B] or [B, 1], of each number that is trained: backward tells them apart. The
        copies are cut off from the number, to which the chain rule leads on in number_rows()."""
        shapes = [channels(a)[0].shape for a in args if isinstance(a, (Jet, torch.Tensor))]
        shape = max(shapes, key=len, default=())
        if not shape:
            return args
        rows, out = (shape[0],) if len(shape) == 1 else (shape[-2], 1), []
        for a in args:
            if isinstance(a, torch.Tensor) and a.requires_grad and a.numel() == 1 and a.dim() < 2:
                self.numbers.append((a, a.detach().expand(rows).clone().requires_grad_()))
                a = self.numbers[-1][1]
            out.append(a)
        return out


def channels(a):
    return a.channels if isinstance(a, Jet) else [a]


class Rows:
    """The rows of J that belong to one residual, [B, parameters]: put() writes, then adds to, the columns of p."""

    def __init__(self, J, params):
        ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
        self.block = {p: J[:, end - p.numel() : end] for p, end in zip(params, ends)}
        self.written = set()

    def put(self, p, g):  # [B, *p.shape]
        self.block[p].add_(g.flatten(1)) if p in self.written else self.block[p].copy_(g.flatten(1))
        self.written.add(p)

    def finish(self):
        for p in set(self.block) - self.written:
            self.block[p].zero_()


def jacobian(residuals, net, batch, scale, J):
    """r {name: [B]}, its factors scale(r), and J [rows, parameters] = d (factor * r) / d theta of all residuals, one
    below the other, in the order of net.parameters() without the frozen ones, written to the buffer J if its size fits.

    Every residual depends on its own sample alone, so one backward pass of sum r gives, at the output of each linear
    map, the gradients of all samples side by side; with the map's input they make the rows of J, summed over the
    channels of a jet. One backward pass per name."""
    params = trained(net)
    with Tape() as tape:
        r = residuals(net, batch)
    with torch.no_grad():
        factor = scale({k: v.detach() for k, v in r.items()})
        R, P = sum(len(v) for v in r.values()), sum(p.numel() for p in params)
        J = J if J is not None and J.shape == (R, P) else params[0].new_empty(R, P)
        varies = lambda c: c is not None and c.requires_grad
        outputs = [c for *_, out in tape.maps for c in out if varies(c)] + [copies for _, copies in tape.numbers]
        row = 0
        for k, v in r.items():
            grads = iter(torch.autograd.grad(v, outputs, factor[k], retain_graph=True, allow_unused=True))
            rows = Rows(J[row : row + len(v)], params)
            row += len(v)
            for a, W, b, out in tape.maps:
                delta = [next(grads) if varies(c) else None for c in out]
                used = [(d, c) for d, c in zip(delta, a) if d is not None]
                used = [(e, f) for d, c in used for e, f in (zip(d, c) if d.dim() > 2 else [(d, c)])]  # groups apart
                if W.dim() != 2 or any(d.dim() != 2 or len(d) != len(v) for d, _ in used):
                    raise NotImplementedError("a residual per sample and maps of [B, n] are wanted")
                if used:
                    linear_rows(rows, W, b, used, delta[0], params)
            for (number, _), d in zip(tape.numbers, grads):
                if d is not None:
                    number_rows(rows, number, d.flatten(), params)
            rows.finish()
    return {k: v.detach() for k, v in r.items()}, factor, J


def number_rows(rows, number, d, params):
    """d [B] is the gradient at the copies of a number; where it is made of parameters the chain rule leads on."""
    if number in rows.block:
        return rows.put(number, d.unsqueeze(1))
    for p, g in zip(params, torch.autograd.grad(number, params, retain_graph=True, allow_unused=True)):
        if g is not None:
            rows.put(p, torch.outer(d, g.flatten()))


def linear_rows(rows, W, b, used, at_b, params):
    """a W^T + b: outer products of gradient and input, summed over the channels, used = [(gradient, input)] [B, n].
    Where W and b are made of parameters (factorized weights, a Gaussian layer) the chain rule leads on to them."""
    at_b = torch.zeros_like(used[0][0]) if at_b is None else at_b
    made = {}  # what is no parameter itself: gradients [B, *shape]
    if W.requires_grad:
        at_W = outer_products(rows, W, used, len(at_b))
        made |= {} if W in rows.block else {W: at_W}
    if b is not None and b.requires_grad:
        rows.put(b, at_b) if b in rows.block else made.update({b: at_b})
    options = dict(retain_graph=True, allow_unused=True, is_grads_batched=True)
    for p, g in zip(params, torch.autograd.grad(list(made), params, list(made.values()), **options) if made else []):
        if g is not None:
            rows.put(p, g)


def outer_products(rows, W, used, B):
    """[B, *W.shape], in the columns of W or, where it is no parameter, in a new array."""
    own = W in rows.block
    to = rows.block[W].unflatten(1, W.shape) if own else W.new_empty(B, *W.shape)
    add = own and W in rows.written
    used = [(d.unsqueeze(2), c.expand(B, -1).unsqueeze(1)) for d, c in used]
    size = max(1, 2**18 // W.numel())  # rows at a time, so that all channels meet them in the cache
    for lo in range(0, B, size):
        part = to[lo : lo + size]
        for i, (d, c) in enumerate(used):
            d, c = d[lo : lo + size], c[lo : lo + size]
            part.addcmul_(d, c) if i or add else torch.mul(d, c, out=part)
    if own:
        rows.written.add(W)
    return to


def jacobian_by_rows(residuals, net, batch, scale, J):
    """The same for any residuals, by one backward pass per row, 64 at a time."""
    params = trained(net)
    r = residuals(net, batch)
    stacked, r = torch.cat(list(r.values())), {k: v.detach() for k, v in r.items()}
    factor = scale(r)
    parts = []
    for v in torch.diag(torch.cat([factor[k] for k in r])).split(64):
        grads = torch.autograd.grad(stacked, params, v, retain_graph=True, is_grads_batched=True, allow_unused=True,
                                    materialize_grads=True)
        parts.append(torch.cat([g.reshape(len(v), -1) for g in grads], 1))
    return r, factor, torch.cat(parts)
