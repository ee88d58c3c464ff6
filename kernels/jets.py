"""Rules for common.jet: what modules contain beyond the basic set of common.py, and short cuts for some of that set.

jet reads this file at its first call and does without if it is missing; copy the folder beside common.py to have it.
Most rules are made of others. A rule of its own is one of three: Taylor coefficients of an elementwise function, a map
that is linear in each of its jets, or something without derivatives, of which the values are enough.
"""
import functools
import math

import torch
import torch.nn.functional as F

from common import RULES, Jet, Refused, _as_jet, _plan, _plus, _pointwise, _scale, _summed

value = lambda a: a.channels[0] if isinstance(a, Jet) else a
of_values = lambda op: lambda *args, **kwargs: op(*map(value, args), **kwargs)
named = lambda name: next(getattr(place, name) for place in (torch.Tensor, torch, F) if hasattr(place, name))

# Elementwise functions ----------------------------------------------------------------------------


def by_derivative(f, derivative):
    """f, given f' in terms of other rules: a jet in one variable has all that follow."""

    def taylor(z, order):
        if order == 0:
            return [f(z)]
        plan = _plan("z", " ".join("z" * k for k in range(1, order)), False)
        line = [z, z.new_ones(())] + [None] * (order - 2)
        return [f(z)] + _as_jet(derivative(Jet(line[:order], plan)), plan).channels

    return functools.partial(_pointwise, taylor)


def by_autograd(f, highest=math.inf):
    """Any f, by its own repeated derivative: order n takes 2^n times the operations of f. None above `highest`."""

    def rule(a, *args, **kwargs):
        if any(v is True for v in (*args, *kwargs.values())):
            raise TypeError(f"no rule for {f.__name__} in place, or in training mode")

        def taylor(z, order):
            if order == 0:
                return (f(z, *args, **kwargs),)
            if order > highest:
                return *taylor(z, order - 1), None
            y, dy = torch.func.jvp(lambda z: taylor(z, order - 1), (z,), (torch.ones_like(z),))
            return *y, dy[-1]

        return _pointwise(taylor, a)

    return rule


def elu(a, alpha=1.0, inplace=False, rate=1.0):
    """z where z > 0, else alpha (exp(rate z) - 1); exp sees no z > 0, where it may overflow."""
    f = lambda z: torch.where(z > 0, z, alpha * torch.expm1(rate * z.clamp(max=0.0)))
    below = lambda z: torch.exp(clamp(z, None, 0.0) * rate) * (alpha * rate)
    return by_derivative(f, lambda z: where(z > 0, 1.0, below(z)))(a, inplace)


def softplus(a, beta=1.0, threshold=20.0):
    return by_derivative(lambda z: F.softplus(z, beta, threshold), lambda z: torch.sigmoid(z * beta))(a)


def gelu(a, approximate="none"):
    if approximate == "tanh":
        return a * 0.5 * (torch.tanh((a + a**3 * 0.044715) * math.sqrt(2 / math.pi)) + 1)
    return a * 0.5 * torch.erfc(a * -math.sqrt(0.5))


def power(a, p):
    if isinstance(p, Jet):
        return torch.exp(p * (math.log(a) if isinstance(a, (int, float)) else torch.log(a)))

    def taylor(z, order):
        factors = [torch.ones_like(p)]
        for k in range(order):
            factors.append(factors[-1] * (p - k))
        return [m * z ** torch.where(m == 0, 0, p - k) for k, m in enumerate(factors)]

    return _pointwise(taylor, a) if isinstance(p, torch.Tensor) else basic_pow(a, p)


basic_pow, bell = RULES["pow"], lambda z: torch.exp(-z * z) * (2 / math.sqrt(math.pi))
RULES.update({f.__name__: by_derivative(f, derivative) for f, derivative in {
    torch.log: lambda z: z**-1, torch.log1p: lambda z: (z + 1) ** -1, torch.expm1: torch.exp, torch.sinh: torch.cosh,
    torch.erf: bell, torch.erfc: lambda z: -bell(z), torch.tan: lambda z: torch.cos(z) ** -2, torch.cosh: torch.sinh,
    torch.atan: lambda z: (z * z + 1) ** -1, torch.asinh: lambda z: (z * z + 1) ** -0.5,
    F.logsigmoid: lambda z: torch.sigmoid(-z),
}.items()})  # fmt: skip
SMOOTH = "acos acosh asin atanh digamma erfinv i0 lgamma log10 log2 logit sinc"
RULES.update({name: by_autograd(named(name)) for name in SMOOTH.split()})
PIECES = "leaky_relu prelu relu6 hardtanh hardshrink softshrink _threshold rrelu"
RULES.update({name: by_autograd(getattr(F, name), highest=1) for name in PIECES.split()})
RULES.update({
    "pow": power,
    "sqrt": lambda a: a**0.5, "rsqrt": lambda a: a**-0.5, "reciprocal": lambda a: a**-1,
    "exp2": lambda a: torch.exp(a * math.log(2)), "softplus": softplus, "gelu": gelu, "elu": elu,
    "celu": lambda a, alpha=1.0, inplace=False: elu(a, alpha, inplace, 1 / alpha),
    "selu": lambda a, inplace=False: elu(a, 1.6732632423543772, inplace) * 1.0507009873554805,
    "hardsigmoid": lambda a, inplace=False: RULES["hardtanh"](a / 3, -1.0, 1.0, inplace) * 0.5 + 0.5,
    "hardswish": lambda a, inplace=False: a * RULES["hardsigmoid"](a, inplace),
    "mish": lambda a, inplace=False: a * RULES["tanh"](softplus(a), inplace),
    "softsign": lambda a: a / (torch.abs(a) + 1), "tanhshrink": lambda a: a - torch.tanh(a),
    "glu": lambda a, dim=-1: a.chunk(2, dim)[0] * torch.sigmoid(a.chunk(2, dim)[1]),
})  # fmt: skip

# Maps that are linear in each of their jets -------------------------------------------------------


def product(op):
    """op of one jet, channel by channel, or of two, by Leibniz; vmap over the variables of a group."""

    def rule(*args, **kwargs):
        at = [k for k, a in enumerate(args) if isinstance(a, Jet)]
        if len(at) not in (1, 2):
            raise TypeError(f"no rule for {op.__name__} of {len(at)} jets")
        plan = args[at[0]].plan

        def call(*tensors):
            return op(*(tensors[at.index(k)] if k in at else a for k, a in enumerate(args)), **kwargs)

        def of(*numbers):  # of channels, one for each jet
            if any(args[k].channels[c] is None for k, c in zip(at, numbers)):
                return None
            axes = tuple(0 if plan.groups[c] else None for c in numbers)
            mapped = torch.vmap(call, axes) if 0 in axes else call
            return mapped(*(args[k].full(c) for k, c in zip(at, numbers)))

        def channel(c):
            if len(at) == 1 or c == 0:
                return of(*[c] * len(at))
            y = _plus(of(0, c), of(c, 0))
            for (i, j), m in plan.leibniz[c]:
                y = _plus(y, _scale(_summed(plan.groups[i], of(i, j)), m))
            return y

        y = [channel(c) for c in range(len(plan.leibniz))]
        if isinstance(y[0], torch.Tensor):
            return Jet(y, plan)
        return tuple(Jet([None if c is None else c[k] for c in y], plan) for k in range(len(y[0])))

    return rule


def where(condition, a, b):
    zero = value(a if isinstance(a, Jet) else b).new_zeros(())
    pick = lambda mask, a: torch.where(mask, a, zero)
    part = lambda mask, a: product(pick)(mask, a) if isinstance(a, Jet) else pick(mask, a)
    return part(condition, a) + part(~condition, b)


def clamp(a, min=None, max=None):
    a = a if min is None else where(a < min, min, a)
    return a if max is None else where(a > max, max, a)


def softmax(a, dim, _stacklevel=3, dtype=None, log=False):
    """Of a less its largest entry with its derivatives, powers of which need not cancel then where the result is 1."""
    a = a if dtype is None else a.to(dtype)
    a = a - a.gather(dim, value(a).argmax(dim, keepdim=True))
    e = torch.exp(a)
    return a - torch.log(e.sum(dim, keepdim=True)) if log else e / e.sum(dim, keepdim=True)


def layer_norm(a, shape, weight=None, bias=None, eps=1e-5):
    last = tuple(range(-len(shape), 0))
    a = a - a.mean(last, keepdim=True)
    y = a * ((a * a).mean(last, keepdim=True) + eps) ** -0.5
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def dropout(a, p=0.5, training=True, inplace=False):
    if training and p > 0:
        raise Refused("f: Dropout is random in training mode, so that it has no derivatives; call net.eval() first")
    return a


LINEAR = """reshape flatten unflatten squeeze unsqueeze transpose swapaxes permute movedim t expand broadcast_to repeat
    tile flip roll narrow select index_select gather diagonal tril triu split chunk unbind tensor_split sum mean cumsum
    contiguous clone float double mm bmm mv dot inner outer tensordot"""
RULES.update({name: product(named(name)) for name in LINEAR.split()})
RULES.update({
    "view": RULES["reshape"], "expand_as": lambda a, b: a.expand(b.shape), "view_as": lambda a, b: a.reshape(b.shape),
    "stack": lambda parts, dim=0: torch.cat([a.unsqueeze(dim) for a in parts], dim),
    "einsum": lambda formula, *a: product(torch.einsum)(formula, *(a[0] if isinstance(a[0], (list, tuple)) else a)),
    "prod": lambda a, dim: functools.reduce(lambda b, c: b * c, a.unbind(dim)),
    "addmm": lambda b, a, w: a @ w + b, "rsub": lambda a, b: b - a,
    "where": where, "masked_fill": lambda a, mask, fill: where(mask, fill, a), "clamp": clamp, "clamp_min": clamp,
    "clamp_max": lambda a, max: clamp(a, None, max), "minimum": lambda a, b: -torch.maximum(-a, -b),
    "maximum": lambda a, b: where(a > b, a, where(a < b, b, a * 0.5 + b * 0.5)),
    "softmax": softmax, "softmin": lambda a, *args, **kwargs: softmax(-a, *args, **kwargs),
    "log_softmax": functools.partial(softmax, log=True), "layer_norm": layer_norm,
    "remainder": lambda a, b: a - torch.floor(value(a) / value(b)) * b,
    **dict.fromkeys("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split(), dropout),
})  # fmt: skip

# Without derivatives: attributes, comparisons, step functions -------------------------------------


def in_place(rule):
    def method(a, b):
        a.channels, a.is_input = rule(a, b).channels, False
        return a

    return method


STEPS = """lt le gt ge eq ne isnan isinf isfinite any all sign floor ceil round trunc floor_divide argmax argmin argsort
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty new_tensor
    dim size numel stride is_floating_point item tolist detach"""
RULES.update({name: of_values(named(name)) for name in STEPS.split()})
RULES["requires_grad_"] = lambda a, *_: a
SAME = "multiply=mul subtract=sub divide=div true_divide=div negative=neg absolute=abs concat=cat clip=clamp"
RULES.update({new: RULES[old] for new, old in (pair.split("=") for pair in SAME.split())})
for name in "shape dtype device ndim layout is_cuda is_nested requires_grad".split():
    setattr(Jet, name, property(lambda a, name=name: getattr(a.channels[0], name), lambda a, new: None))
for name in "lt le gt ge eq ne".split():
    setattr(Jet, f"__{name}__", RULES[name])
for name, rule in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div"}.items():
    setattr(Jet, f"__i{name}__", in_place(RULES[rule]))
Jet.T, Jet.mT = property(lambda a: a.permute(*range(a.ndim)[::-1])), property(lambda a: a.transpose(-1, -2))
Jet.__len__, Jet.__bool__, Jet.__float__ = map(of_values, (len, bool, float))
Jet.__iter__, Jet.__abs__, Jet.__mod__ = lambda a: iter(a.unbind(0)), RULES["abs"], RULES["remainder"]
Jet.__pow__, Jet.__rpow__ = RULES["pow"], lambda a, b: RULES["pow"](b, a)
Jet.__hash__, Jet.__array_ufunc__ = object.__hash__, None  # numbers of NumPy leave operators to us

# Short cuts for the basic set ---------------------------------------------------------------------


def group(wanted, d):
    """Variables that occur only as squares, in the same entries with the same factors, two or more of them: groups as
    {channel of the first: all}, and `wanted` with the first variable of each in the place of all."""
    roles = {}
    for v in range(d):
        uses = [(e, term == (v, v), m) for e, entry in enumerate(wanted) for term, m in entry if v in term]
        squares = uses and all(square for _, square, _ in uses)
        roles.setdefault(tuple(uses) if squares else v, []).append(v)
    stay = {members[0] for members in roles.values()}
    wanted = [tuple((term, m) for term, m in entry if set(term) <= stay) for entry in wanted]
    return {(((members[0],), 1),): members for members in roles.values() if len(members) > 1}, wanted


def matmul(a, w):
    """One product over all channels where they have the value's shape. Their rows are put one below the other:
    [channels, batch, n] stacked over seeds inductor takes for a channels-last image and transposes."""
    if not isinstance(a, Jet) or isinstance(w, Jet) or w.dim() > 2:
        return product(torch.matmul)(a, w)
    v = a.channels[0]
    if w.shape[-1] < 8 or any(c.shape[-v.dim() :] != v.shape for c in a.channels if c is not None):
        return basic_matmul(a, w)  # also at the output, where not every channel is read
    at = [k for k, c in enumerate(a.channels) if c is not None]
    parts, channels = [a.channels[k].reshape(-1, v.shape[-1]) for k in at], [None] * len(a.channels)
    for k, c in zip(at, torch.matmul(torch.cat(parts), w).split([len(c) for c in parts])):
        channels[k] = c.reshape(*a.channels[k].shape[:-1], *w.shape[1:])
    return Jet(channels, a.plan)


def by_unit_vectors(square, x, w, b):
    """squared_distance of the network's own input, where the first derivatives of a group are unit vectors: that in x_k
    is 2 w_ik^2 x_k + 2 w_ik b_ik, a product of depth two, which torch.compile leaves in one piece."""
    plan, v = x.plan, x.channels[0]
    s = square(Jet([None if group else c for c, group in zip(x.channels, plan.groups)], plan), w, b)
    for k, group in enumerate(plan.groups):
        if group:
            w_k, b_k, v_k = w.mT[group], b.mT[group], v.mT[group]  # [variables, n] and [variables, batch]
            factors = torch.stack([2 * w_k * w_k, 2 * w_k * b_k], 1)  # [variables, 2, n]
            s.channels[k] = torch.stack([v_k, torch.ones_like(v_k)], -1) @ factors
            for c, pairs in enumerate(plan.leibniz):
                for m in [m for pair, m in pairs if pair == (k, k)]:
                    s.channels[c] = _plus(s.channels[c], m * (w_k * w_k).sum(0))
    return s


basic_matmul = RULES["matmul"]
RULES.update(matmul=matmul, by_unit_vectors=by_unit_vectors, group=group)
Jet.__matmul__, Jet.__rmatmul__ = matmul, lambda a, b: matmul(b, a)
