"""Jets against nested float64 autograd, the definition of the derivative they replace."""

import importlib.util
import itertools
import math
import random
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
from cli import FourierFeatures
from common import KINDS, MLP, ModifiedMLP, Periodic, PirateNet, Plan, Refused, ResNet, jet, sfli, uniform
from kernels import jets  # noqa: F401  jet would read it at its first call; Plan alone would not
from kernels.natural_gradient import Tape

DOMAIN = [(0, 1), (-1, 1), (-2, 1)]
NETS = [MLP, ResNet, ModifiedMLP, PirateNet]
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def no_fallback(monkeypatch):
    """What a rule is claimed for must not be left to nested autograd."""

    def nested(f, x, eye, wanted, missing):
        raise AssertionError(missing)

    monkeypatch.setattr(common, "_nested", nested)


def autograd(f, x, variables, derivatives):
    """The oracle: one nested torch.autograd.grad per factor, per term, per output."""
    names = variables.split()
    x = x.clone().requires_grad_()
    y = f(x)

    def derivative(column, factors):
        for v in factors:
            if not column.requires_grad:
                return torch.zeros(len(x))
            g = torch.autograd.grad(column.sum(), x, create_graph=True, allow_unused=True)[0]
            column = torch.zeros(len(x)) if g is None else g[:, names.index(v)]
        return column

    out = [y]
    for entry in derivatives.split():
        terms = []
        for term in filter(None, entry.replace("-", "+-").split("+")):
            factor, _, product = term.removeprefix("-").rpartition("*")
            sign = -1.0 if term.startswith("-") else 1.0
            terms.append((sign * float(factor or 1), re.findall(r"[A-Za-z]\d*", product)))
        out.append(torch.stack([sum(m * derivative(column, term) for m, term in terms) for column in y.unbind(1)], 1))
    return [o.detach() for o in out]


def check(f, x, variables, derivatives):
    """Both evaluate the same function in float64; sums of a few hundred rounded terms stay below 1e-10 relative."""
    mine, want = jet(f, x, variables, derivatives), autograd(f, x, variables, derivatives)
    assert len(mine) == len(want)
    for a, b, name in zip(mine, want, ["value", *derivatives.split()]):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-10 * max(b.abs().max(), 1e-3), name


def network(Net, kind, embed=None, d=3, sfli=sfli):
    net = Net(d if embed is None else d + 1, 12, 3, out=2, rwf=(1.0, 0.1), embed=embed)
    for block in net.blocks:
        if hasattr(block, "alpha"):
            nn.init.constant_(block.alpha, 0.4)  # at the initial 0 the blocks would not be tested
    for p in net.parameters():
        p.data += 0.05 * torch.randn_like(p)  # biases too
    return sfli(net, DOMAIN, kind, gamma=1.5) if kind else net


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("Net", NETS)
def test_every_architecture_and_kind(Net, kind):
    net, x = network(Net, kind), uniform(DOMAIN, 6)
    for derivatives in ("t x y", "tt tx xx xy yy", "tt+xx+yy t", "txy xxx+xyy xxy+yyy"):
        check(net, x, "t x y", derivatives)


@pytest.mark.parametrize("Net", NETS)
def test_embeddings(Net):
    x = uniform(DOMAIN, 5)
    check(network(Net, "gauss", Periodic(3, {1: 2.0})), x, "t x y", "t x xx+yy txx xxx+xyy")
    check(network(Net, None, nn.Sequential(FourierFeatures(3, 4))), x, "t x y", "t x xx+yy txx xxx+xyy")
    check(network(Net, "gauss", Periodic(3, {1: 2.0})), x, "t x y", "t xx+yy")
    check(network(Net, None, nn.Sequential(FourierFeatures(3, 4))), x, "t x y", "tt+xx+yy")


@pytest.mark.parametrize("seed", range(20))
def test_random_channel_lists(seed):
    """Random linear combinations of random products, orders mixed and terms repeated."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    products = ["".join(p) for k in (1, 2, 3) for p in itertools.product("abc", repeat=k)]
    factors = ["", "", "0.5*", "2*", "3.25*"]
    term = lambda k: rng.choice("+-" if k else ["", "-"]) + rng.choice(factors) + rng.choice(products)
    entries = ["".join(map(term, range(rng.randint(1, 4)))) for _ in range(rng.randint(1, 6))]
    entries = entries[:1] + [entry.removeprefix("-") for entry in entries[1:]]  # a sign would join it to the one before
    net = network(rng.choice(NETS), rng.choice([None, *KINDS]))
    check(net, uniform(DOMAIN, 4), "a b c", " ".join(entries))


def test_foreign_functions():
    """Every rule of the TABLE, in operator and function form, with constants on either side."""
    w, c = torch.randn(3, 4), torch.rand(4) + 0.5
    silu = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1))

    def f(x):
        a, b = x @ w, torch.matmul(x, 2 * w) * 0.3
        y = c * torch.sin(a) - torch.exp(-b * b) / c + (2 - torch.cos(a)) / (3 + torch.sigmoid(b) ** 2)
        y = c - y + torch.relu(a) * torch.square(b) - torch.abs(b) / 2 + c / (4 + torch.tanh(a)) + a**3
        rows = torch.cat([y, x[:, 1:2] * x[..., 0:1], c.expand(len(w) + 2, 4)], dim=-1)
        return torch.cat([rows[:, ::2], silu(x)], -1)

    check(f, torch.randn(5, 3), "x y z", "x xy zzz xx+yy+zz xyz yyz")
    check(f, torch.randn(5, 3), "x y z", "xx+yy+zz")


def sample_lists(name):
    """A random list of orders 1 to 4, with combinations; a Laplacian alone, which makes a group; the biharmonic."""
    rng = random.Random(name)
    products = ["".join(p) for k in (1, 2, 3, 4) for p in itertools.product("xy", repeat=k)]
    single, (a, b, c) = rng.sample(products, 2), rng.sample(products, 3)
    return [" ".join([*single, f"{a}-0.5*{b}+3*{c}"]), "xx+yy", "xxxx+2*xxyy+yyyy"]


W = torch.tensor([[0.9, -0.5, 0.3, 0.7], [0.4, 0.8, -0.6, 0.2]], dtype=torch.float64)
C, TABLE = torch.linspace(0.4, 1.6, 4).double(), torch.linspace(-1, 1, 12).double().reshape(3, 4)
inside = lambda x: 0.5 + 0.4 * torch.sin(3 * (x @ W))  # in (0.1, 0.9)
around = lambda x: 2.5 * torch.sin(2 * (x @ W)) + 0.1
tokens = lambda z: torch.stack([z * C, torch.sin(z), z * z], 1)  # [B, 3, 4]
ELEMENTWISE = {
    **{name: (getattr(torch, name), inside) for name in """log log2 log10 log1p sqrt rsqrt reciprocal asin acos atanh
        erfinv lgamma digamma logit""".split()},
    **{name: (getattr(torch, name), around) for name in """tanh sin cos exp sigmoid abs square neg relu erf erfc atan
        asinh sinh cosh tan expm1 exp2 sinc i0""".split()},
    **{name: (getattr(F, name), around) for name in """silu gelu mish softplus elu celu selu leaky_relu relu6 hardtanh
        hardswish logsigmoid softsign tanhshrink softshrink hardshrink""".split()},
    "acosh": (lambda z: torch.acosh(1 + z), inside),
    **{repr(m): (m, around) for m in (
        nn.GELU("tanh"), nn.Softplus(2.0, 30.0), nn.ELU(0.7), nn.CELU(0.5), nn.LeakyReLU(0.2), nn.PReLU(4).double(),
        nn.RReLU().eval(), nn.Hardtanh(-0.5, 0.7), nn.Threshold(0.1, 0.2), nn.Softshrink(0.3), nn.Tanh())},
    "powers": (lambda z: z**-1.5 + z**0.3 + torch.pow(z, 3) + z**C + 2**z + C**z + z**z, inside),
    "powers of any sign": (lambda z: z**3 + z ** torch.arange(4) + z ** torch.tensor(2.0) + (z - z) ** 2, around),
    "quotients": (lambda z: 1 / z + C / (1 + z) + z / C + z / 3 + z / (z * z + 1) - (1 - z) * (C - z), inside),
}  # fmt: skip


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions(name):
    f, domain = ELEMENTWISE[name]
    for derivatives in sample_lists(name):
        check(lambda x: f(domain(x))[:, 1:3], torch.rand(3, 2), "x y", derivatives)


def test_hardsigmoid():
    """Twice PyTorch does not differentiate it, and once only to float32; the formula it stands for it does."""
    x = torch.randn(5, 2)
    functions = (lambda x: F.hardsigmoid(around(x)), lambda x: F.relu6(around(x) + 3) / 6)
    mine, want = (jet(f, x, "x y", "x xy yy") for f in functions)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(mine, want))


def increments(z):
    y = z * 2
    alias = y
    y += z
    y *= z
    y -= C
    y /= 2
    return alias


SHAPES = {
    "stack, flatten": lambda z: tokens(z).flatten(1),
    "stack in front": lambda z: torch.stack([z, z * z]).permute(1, 0, 2).reshape(len(z), -1),
    "cat": lambda z: torch.cat([z, TABLE[:1].expand(len(z), 4), z * z], 1),
    "split": lambda z: torch.cat([z.split(2, -1)[1] * z[:, :1], *torch.split(z, [1, 3], dim=-1)], -1),
    "chunk": lambda z: torch.chunk(z, 2, -1)[0] * z.chunk(2, dim=1)[1],
    "unbind": lambda z: (lambda a, b, c, d: torch.stack([a * b, c * d], -1))(*z.unbind(-1)),
    "reshape, view": lambda z: z.reshape(-1, 2, 2).transpose(1, 2).flatten(1) * z.view(len(z), 4),
    "mT, T": lambda z: z.view(-1, 2, 2).mT.reshape(len(z), -1) * (2 * z.T).T,
    "permute": lambda z: tokens(z).permute(0, 2, 1).reshape(len(z), -1) ** 2,
    "squeeze, index": lambda z: z.unsqueeze(1).squeeze(1) * z[:, None].squeeze(-2) * z[:, [0]],
    "expand": lambda z: z[:, :1].expand(-1, 3) * z[:, 1:] * z[:, 1:2].expand_as(z[:, 1:]),
    "sum": lambda z: torch.stack([z.sum(-1), z.sum(dim=1) ** 2, torch.sum(z, -1)], -1),
    "mean": lambda z: z.mean(-1, keepdim=True) * z + torch.mean(z, dim=1, keepdim=True),
    "prod": lambda z: z.prod(-1).unsqueeze(-1) * z[:, :2].prod(1)[:, None],
    "einsum": lambda z: torch.einsum("bi,ij->bj", z, TABLE.T),
    "einsum of two": lambda z: torch.einsum("bti,btj->bij", tokens(z), torch.sin(tokens(z)))[:, 2],
    "constant @ jet": lambda z: (TABLE @ z.T).T,
    "constants @ jet": lambda z: torch.matmul(TABLE.T, tokens(z)).flatten(1),
    "jet @ constants": lambda z: torch.matmul(tokens(z), torch.stack([TABLE.T] * len(z))).flatten(1),
    "jet @ vector": lambda z: (z @ C)[:, None] * torch.matmul(tokens(z), C),
    "jet @ jet": lambda z: (torch.bmm(tokens(z), tokens(z).transpose(1, 2)) + tokens(z) @ tokens(z).mT)[:, 1],
    "linear of one column": lambda z: F.linear(z[:, :1] + C, TABLE),
    "where": lambda z: torch.where(z > 0.2, z * z, torch.sin(z)) + torch.where(z > 0.3, z**3, 0.5),
    "where, a constant first": lambda z: torch.where(z < 0, C, z) * torch.where(C > 1, 0.5, z),
    "maximum, minimum": lambda z: torch.maximum(z, z * z) + torch.minimum(z, C) * z,
    "clamp": lambda z: torch.clamp(z, -0.5, 0.8) * z + z.clamp(min=0.1) ** 2 + z.clamp_max(0.3),
    "masked_fill, remainder": lambda z: z.masked_fill(z > 0.5, 0.7) * z + z % 1.5 * z,
    "like": lambda z: z * torch.ones_like(z) + torch.zeros_like(z) + torch.full_like(z, 2.0) * z * z,
    "comparisons": lambda z: z * (z > 0) + z * z * (z <= 0) + (z == 0) * z + (z != 0) * torch.sin(z) + (C < z) * z**3,
    "methods": lambda z: z.tanh() + z.sin() * z.exp() + z.square() + z.sigmoid().sqrt() + (z * z + 1).log() + z.relu()
    + z.pow(3) + z.neg().mul(2).add(1).div(3).sub(z) + z.double().contiguous().abs() * F.tanh(z) * F.sigmoid(z),
    "attributes": lambda z: z * z.shape[0] + z.size(1) * z.dim() + len(z) * z.ndim * z
    + torch.ones(z.shape[0], 1, dtype=z.dtype, device=z.device) * z**2 + 0 * z.requires_grad,
    "detach": lambda z: z * z.detach() + z,
    "rows": lambda z: torch.stack([row * row for row in z]),
    "in place": increments,
    "NumPy": lambda z: np_two * z * z + z * np_two,
    "lerp": lambda z: torch.lerp(z, z * z, 0.3) + torch.lerp(z, torch.sin(z), C),
    "glu": lambda z: nn.GLU()(z),
    "softmax": lambda z: torch.softmax(4 * z, -1) + F.softmax(z, dim=1) + nn.Softmin(-1)(z) + z.softmax(-1),
    "log_softmax": lambda z: F.log_softmax(4 * z, -1) * nn.LogSoftmax(-1)(z),
    "dropout": lambda z: nn.Dropout().eval()(z) * F.dropout(z, 0.3, training=False),
    "constant": lambda z: TABLE[:, :2],
}  # fmt: skip
np_two = pytest.importorskip("numpy").float64(2.0)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_sums_products_and_choices(name):
    for derivatives in sample_lists(name):
        check(lambda x: SHAPES[name](around(x)), torch.rand(3, 2), "x y", derivatives)


@pytest.mark.usefixtures("no_fallback")
def test_layer_norm():
    """Against its formula: PyTorch's own derivatives of layer_norm are wrong from the third on."""
    norm = nn.LayerNorm(4)
    for p in norm.parameters():
        nn.init.normal_(p)

    def formula(x):
        z = around(x) - around(x).mean(-1, keepdim=True)
        return z / torch.sqrt((z * z).mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias

    x = torch.rand(3, 2)
    for derivatives in sample_lists("layer_norm"):
        for f in (lambda x: norm(around(x)), lambda x: F.layer_norm(around(x), (4,), norm.weight, norm.bias)):
            mine, want = jet(f, x, "x y", derivatives), autograd(formula, x, "x y", derivatives)
            assert all((a - b).abs().max() <= 1e-10 * b.abs().max() for a, b in zip(mine, want))


class Transformer(nn.Module):
    """Attention over the coordinates, by hand."""

    def __init__(self, n=6):
        super().__init__()
        self.embed, self.position = nn.Linear(1, n), nn.Parameter(torch.randn(2, n))
        self.qkv, self.norm, self.out = nn.Linear(n, 3 * n, bias=False), nn.LayerNorm(n), nn.Linear(2 * n, 2)
        self.mix = nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.Dropout(0.1), nn.Linear(n, n))

    def forward(self, x):
        h = self.embed(x.unsqueeze(-1)) + self.position  # [B, 2, n]
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5, dim=-1)
        h = h + torch.matmul(weights, v)
        h = h + self.mix(h)
        return self.out(h.reshape(h.size(0), -1))


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.sin(3.0 * layer(x))
        return self.layers[-1](x)


class Residual(nn.Module):
    """Blocks with +=, a trained slope, and a look at the input."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.slope = nn.PReLU(6)

    def forward(self, x):
        assert x.dim() == 2 and x.dtype == torch.float64
        y = F.elu(self.first(x))
        for _ in range(2):
            skip = y
            y = self.b(F.softplus(self.a(self.slope(y))))
            y += skip
        return self.last(torch.tanh(y))


def normed():
    layers = [nn.Linear(2, 8), nn.LayerNorm(8), nn.Mish(), nn.Linear(8, 8), nn.Softplus(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(8, 2))


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("Net", [Transformer, Siren, Residual, normed])
def test_ordinary_modules(Net):
    """Values, derivatives and the gradients of a residual; PyTorch's own LayerNorm is right up to the second order."""
    net, x = Net().double().eval(), torch.rand(3, 2)
    has_norm = any(isinstance(m, nn.LayerNorm) for m in net.modules())
    for derivatives in ["x xy yy", "xx+yy"] if has_norm else sample_lists(Net.__name__):
        check(net, x, "x y", derivatives)
    mine = torch.autograd.grad(jet(net, x, "x y", "x")[1].square().sum(), list(net.parameters()), allow_unused=True)
    z = x.clone().requires_grad_()
    u_x = [torch.autograd.grad(u.sum(), z, create_graph=True)[0][:, 0] for u in net(z).unbind(1)]
    want = torch.autograd.grad(torch.stack(u_x).square().sum(), list(net.parameters()), allow_unused=True)
    for a, b in zip(mine, want):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 1e-10 * max(b.abs().max(), 1e-3))


def test_any_order():
    """Closed forms: eight derivatives of a sine, Kuramoto-Sivashinsky's operator, and the biharmonic as one channel."""
    x = torch.rand(6, 2)
    phase = x @ torch.tensor([[0.7], [1.3]])  # of sin(0.7 x + 1.3 y)
    f = lambda x: torch.sin(x @ torch.tensor([[0.7], [1.3]]))
    u, eighth, ks, biharmonic = jet(f, x, "t x", "x" * 8 + " t + xx + xxxx tttt + 2*ttxx + xxxx")
    assert torch.allclose(eighth, 1.3**8 * torch.sin(phase), rtol=1e-12)
    assert torch.allclose(ks, 0.7 * torch.cos(phase) + (1.3**4 - 1.3**2) * torch.sin(phase), rtol=1e-12)
    assert torch.allclose(biharmonic, (0.7**2 + 1.3**2) ** 2 * torch.sin(phase), rtol=1e-12)
    assert len(Plan("x y", "xxxx+2*xxyy+yyyy").leibniz) == 11  # the value, nine derivatives below, the sum


def test_lists_are_read_with_spaces_and_fractions():
    wanted = lambda derivatives: Plan("t x", derivatives).wanted
    assert wanted("t - 0.1*xx") == wanted("t-0.1*xx") == wanted(" t -0.1 * xx ") == [(((0,), 1.0), ((1, 1), -0.1))]
    assert wanted("x  t + xx xx") == [(((1,), 1.0),), (((0,), 1.0), ((1, 1), 1.0)), (((1, 1), 1.0),)]
    assert wanted("-1/2*xx 1e-4*t 1/3*x .5*tx 2.5e+1*t") == [
        (((1, 1), -0.5),), (((0,), 1e-4),), (((1,), 1 / 3),), (((0, 1), 0.5),), (((0,), 25.0),)]  # fmt: skip
    assert Plan("x1 x11 theta", "x11x1 thetatheta").wanted == [(((0, 1), 1.0),), (((2, 2), 1.0),)]


def test_tuples_and_constants():
    x, w = torch.rand(4, 2), torch.rand(2, 3)
    parts = [lambda x: torch.tanh(x @ w), lambda x: torch.ones(4, 1), lambda x: x[:, :1] ** 2]
    got = jet(lambda x: tuple(part(x) for part in parts), x, "x y", "x xx+yy")
    assert isinstance(got, tuple) and len(got) == 3
    for mine, part in zip(got, parts):
        assert all(torch.equal(a, b) for a, b in zip(mine, jet(part, x, "x y", "x xx+yy")))
    assert all(torch.equal(c, torch.zeros(4, 1)) for c in got[1][1:])


def by_item(x):
    y = torch.zeros(len(x), 2, dtype=x.dtype)
    y[:, 0] = torch.sin(x[:, 0] * x[:, 1])
    return y * x


def strict(x):
    assert isinstance(x, torch.Tensor), "no tensor"
    return x**3


conv, attention = nn.Conv1d(1, 3, 2).double(), nn.MultiheadAttention(4, 2, batch_first=True).double()
encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double().eval()
FALLBACKS = {
    "special_log_ndtr": lambda x: torch.special.log_ndtr(around(x)),
    "conv1d": lambda x: torch.tanh(conv(x.unsqueeze(1))).flatten(1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "inplace=True": nn.Sequential(nn.Linear(2, 4), nn.SiLU(inplace=True)).double(),
    "sin_": lambda x: (2 * x).sin_() * x,
    "__setitem__": by_item,
    "no tensor": strict,
    "einsum of 3 jets": lambda x: torch.einsum("bi,bi,bi->bi", x, x, x),
    "multi_head_attention_forward": lambda x: attention(*[tokens(around(x))] * 3)[0][:, 1]
    + encoder(tokens(around(x)))[:, 2],
}  # fmt: skip


@pytest.mark.parametrize("missing", FALLBACKS)
def test_nested_autograd_takes_over(missing, capsys):
    """One line that names the operation, once."""
    common._say.__defaults__[0].clear()
    order = "x xy xx+yy" if "attention" in missing else "x xy xx+yy yyy"  # because of its LayerNorm, see above
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivatives
        for _ in range(2):
            check(FALLBACKS[missing], torch.rand(3, 2), "x y", order)
    line = f"jet: (no rule for )?{re.escape(missing)}; nested autograd takes over, slower\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_nested_autograd_where_broadcasting_adds_dimensions(capsys):
    """The variables of a group are in front of the value's dimensions; two of another kind could be taken for them."""
    a = torch.rand(2, 1, 1)
    for f in (lambda x: (a * torch.sin(x)).sum(0), lambda x: (torch.sin(x) + a).prod(0)):
        check(f, torch.rand(3, 2), "x y", "xx+yy")
    assert "no rule for more dimensions" in capsys.readouterr().out


def test_nested_autograd_in_tuples_and_transforms():
    net, x = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), torch.rand(4, 2)
    f = lambda z, p: torch.logaddexp(torch.func.functional_call(net, p, (z,)), torch.ones(()))
    params = dict(net.named_parameters())
    got = jet(lambda x: (f(x, params), x, torch.ones(4, 1)), x, "x y", "x xy")
    assert all(torch.equal(a, b) for a, b in zip(got[0], jet(lambda x: f(x, params), x, "x y", "x xy")))
    assert torch.equal(got[1][1], torch.tensor([1.0, 0]).expand(4, 2)) and torch.equal(got[2][1], torch.zeros(4, 1))
    loss = lambda p, x: sum((c**2).sum() for c in jet(lambda z: f(z, p), x, "x y", "x xy"))
    want = torch.autograd.grad(loss(params, x), list(net.parameters()))
    twice = {k: torch.stack([v.detach(), v.detach()]) for k, v in params.items()}
    stacked = torch.func.vmap(torch.func.grad(loss))(twice, torch.stack([x, x]))
    assert all(torch.allclose(a[1], b, rtol=1e-10) for a, b in zip(stacked.values(), want))


def test_nested_autograd_is_not_for_the_tape_of_natural_gradient():
    """It would record tensors of a transform; told so, natural gradient takes torch.func."""
    with Tape(), pytest.raises(NotImplementedError, match="no rule for conv1d"):
        jet(FALLBACKS["conv1d"], torch.rand(3, 2), "x y", "x")
    assert common.Jet.short_cuts


def test_layer_norm_in_nested_autograd():
    """PyTorch's second forward derivative of layer_norm is wrong; beside a function without a rule ours is taken."""

    def formula(x):
        z = around(x) - around(x).mean(-1, keepdim=True)
        return torch.special.log_ndtr(z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-5))

    x = torch.rand(3, 2)
    mine = jet(lambda x: torch.special.log_ndtr(F.layer_norm(around(x), (4,))), x, "x y", "xy xxx")
    want = autograd(formula, x, "x y", "xy xxx")
    assert all((a - b).abs().max() <= 1e-10 * b.abs().max() for a, b in zip(mine, want))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, g):
        return g


def test_refusals_of_functions():
    x = torch.rand(4, 2)

    def without_grad(x):
        with torch.no_grad():
            return x * x

    for f, message in [
        (nn.Dropout(), "Dropout is random in training mode.*net.eval"),
        (lambda x: F.dropout(torch.special.log_ndtr(x)), "Dropout is random in training mode"),
        (without_grad, "torch.no_grad"),
        (Cube.apply, "autograd.Function"),
        (lambda x: torch.cdist(x, x), "no rule for cdist, and nested autograd fails"),
        (lambda x: None, "nested autograd fails"),
    ]:
        with pytest.raises(Refused, match=f"^f: .*{message}"):
            jet(f, x, "x y", "x")
    for f in (lambda x: x.foo(), lambda x: x @ torch.rand(5, 5), lambda x: x / "a"):
        with pytest.raises((AttributeError, RuntimeError, TypeError)) as mine:
            jet(f, x, "x y", "x")
        with pytest.raises(type(mine.value), match=f"^{re.escape(str(mine.value))}$"):  # the error of f itself
            f(x)


def test_without_kernels(monkeypatch, capsys):
    """common.py alone: the basic set by jets, a Laplacian without groups, the rest by nested autograd or refused."""
    for name in ("kernels", "kernels.jets"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("alone", common.__file__)
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "alone", alone)
    spec.loader.exec_module(alone)
    x = uniform(DOMAIN, 5)
    for kind in [None, *KINDS]:
        net, twin = network(PirateNet, kind), network(alone.PirateNet, kind, sfli=alone.sfli)
        twin.load_state_dict(net.state_dict())
        mine, want = (m.jet(f, x, "t x y", "t xx+yy txx") for m, f in ((alone, twin), (common, net)))
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(mine, want))
    assert capsys.readouterr().out == ""
    f = nn.Sequential(nn.Linear(3, 4), nn.GELU())
    for a, b in zip(*(m.jet(f, x, "t x y", "t xx+yy") for m in (alone, common))):
        assert torch.allclose(a, b, rtol=1e-10)
    line = "jet: no rule for gelu without kernels/ beside common.py; nested autograd takes over, slower\n"
    assert capsys.readouterr().out == line
    with pytest.raises(alone.Refused, match="no rule for layer_norm without kernels/"):
        alone.jet(nn.LayerNorm(3), x, "t x y", "t xx+yy")


def test_laplacian_in_50_dimensions_is_one_channel():
    d = 50
    net = sfli(MLP(d + 1, 16, 3), [(0, 0.2)] + [(-1, 1)] * d, gamma=0.3)
    names = ["t"] + [f"x{k}" for k in range(d)]
    laplacian = "+".join(f"x{k}x{k}" for k in range(d))
    check(net, uniform([(0, 0.2)] + [(-1, 1)] * d, 3), " ".join(names), f"t {laplacian}")
    plan = Plan(" ".join(names), f"t {laplacian}")  # value, t, x1..xd as one group, Laplacian: d + 3 rows in a product
    assert [len(group or [0]) for group in plan.groups] == [1, 1, d, 1] and len(plan.leibniz) == 4


def test_groups_hold_what_is_used_alike():
    """Of x, y, z, w only equally weighted squares may share a channel; another use takes a variable out."""
    groups = lambda derivatives: [g for g in Plan("x y z w", derivatives).groups if g]
    assert groups("xx+yy+zz+ww") == [[0, 1, 2, 3]]
    assert groups("xx+yy+2*zz+2*ww") == [[0, 1], [2, 3]]
    assert groups("x xx+yy+zz") == groups("xx+yy+zz x+ww") == groups("xx+yy+zz xw") == [[1, 2]]
    assert groups("xx+yy zz+yy") == groups("xx yy") == groups("x y z w") == []
    x = uniform([(-1, 1)] * 4, 5)
    for derivatives in ("xx+yy+2*zz+2*ww", "xx+yy+zz x+ww", "xx+yy+zz xw", "x-xx-yy-zz+ww xx+ww", "zz www-xx-yy"):
        for kind in (None, "gauss"):
            net = MLP(4, 9, 2)
            check(net if kind is None else sfli(net, [(-1, 1)] * 4, kind, 1.0), x, "x y z w", derivatives)


def test_a_linear_combination_is_one_channel():
    """u_t - 1e-4 u_xx needs the value, u_x and itself; asked for together with its parts it costs nothing."""
    assert len(Plan("t x", "t-1e-4*xx").leibniz) == 3 and len(Plan("t x", "t xx t-1e-4*xx").leibniz) == 4
    net, x = network(MLP, "gauss"), uniform(DOMAIN, 4)
    combination = jet(net, x, "t x y", "t-1e-4*xx")[1]
    _, u_t, u_xx, again = jet(net, x, "t x y", "t xx t-1e-4*xx")
    assert torch.allclose(combination, u_t - 1e-4 * u_xx, atol=1e-13) and torch.allclose(combination, again, atol=1e-13)


def test_plan_of_its_docstring():
    """The worked example, "t-xx-yy": channels, group and rule as the docstring of Plan has them."""
    plan = Plan("t x y", "t-xx-yy")
    assert plan.groups == [None, [1, 2], None] and plan.order == 2 and plan.outputs == [[(2, 1)]]
    assert plan.seeds == [[(1, 1)], [(0, 1.0)]]
    assert plan.wanted == [(((0,), 1), ((1, 1), -1), ((2, 2), -1))]
    assert plan.leibniz == [(), (), (((1, 1), -2.0),)]


def test_polynomial_in_closed_form():
    x = torch.randn(7, 2)
    f = lambda x: x[:, :1] ** 2 * x[:, 1:2] + 3 * x[:, 1:2]
    u, u_x, u_xy, lap, u_xxy = jet(f, x, "x y", "x xy xx+yy xxy")
    a, b = x[:, :1], x[:, 1:2]
    for mine, want in [(u, a**2 * b + 3 * b), (u_x, 2 * a * b), (u_xy, 2 * a), (lap, 2 * b), (u_xxy, 2 + 0 * a)]:
        assert torch.allclose(mine, want, atol=1e-14)


def test_gradients_of_a_residual_reach_the_parameters():
    net, x = network(PirateNet, "gauss"), uniform(DOMAIN, 6)
    u, u_t, lap = jet(net, x, "t x y", "t xx+yy")
    mine = torch.autograd.grad(((u_t - lap + u**3) ** 2).mean(), list(net.parameters()))
    z = x.clone().requires_grad_()
    v, total = net(z), 0
    for column in v.unbind(1):
        g = torch.autograd.grad(column.sum(), z, create_graph=True)[0]
        second = sum(torch.autograd.grad(g[:, k].sum(), z, create_graph=True)[0][:, k] for k in (1, 2))
        total = total + ((g[:, 0] - second + column**3) ** 2).mean() / 2
    for a, b in zip(mine, torch.autograd.grad(total, list(net.parameters()))):
        assert (a - b).abs().max() <= 1e-10 * max(b.abs().max(), 1e-3)


@pytest.mark.parametrize("derivatives", ["t xx+yy txx", "t-xx-yy"])
def test_vmap_over_stacked_networks(derivatives):
    nets, x = [network(ModifiedMLP, "gauss") for _ in range(3)], torch.stack([uniform(DOMAIN, 4) for _ in range(3)])
    params, _ = torch.func.stack_module_state(nets)
    call = lambda p, x: jet(lambda z: torch.func.functional_call(nets[0], p, (z,)), x, "t x y", derivatives)
    stacked = torch.func.vmap(call)(params, x)
    for k, net in enumerate(nets):
        for a, b in zip(stacked, jet(net, x[k], "t x y", derivatives)):
            assert torch.allclose(a[k], b, atol=1e-12)


@pytest.mark.parametrize("ours", [True, False])
def test_compiles_without_graph_breaks(ours):
    """fullgraph=True raises at the first graph break; value and gradient agree with eager."""
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(), nn.Softmax(-1)]
    net, x = network(PirateNet, "gauss") if ours else nn.Sequential(*layers).eval(), uniform(DOMAIN, 6)
    loss = lambda x: sum((c**2).sum() for c in jet(net, x, "t x y", "t xx+yy"))
    want = torch.autograd.grad(loss(x), list(net.parameters()))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), list(net.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(got, want))


def test_refusals():
    x = torch.rand(4, 2)
    for variables, derivatives, message in [
        ("x y", "z", "'z' is no sum of products of x, y"),
        ("x y", "x+", "'x\\+' is no sum"),
        ("x y", "2xx", "no sum"),
        ("x y", "x*y", "no sum"),
        ("x y", "x++y", "no sum"),
        ("x y", "1/*x", "no sum"),
        ("x1 y", "x11", "no sum"),
        ("x", "x", "names 1 columns"),
    ]:
        with pytest.raises(Refused, match=message):
            jet(lambda x: x, x, variables, derivatives)


@pytest.mark.parametrize("d", [2, 5])
@pytest.mark.parametrize("gamma, bound", [(1.2, 5e-7), (50.0, 1e-5)])
def test_gaussian_layer_in_float32(gamma, bound, d):
    """The exponent is float64, so values keep float32's digits for any gamma; derivatives lose a few. Grouped (the
    Laplacian alone) and not. Half of the points are close to centres: elsewhere narrow bumps are zero."""
    layer = sfli(nn.Linear(d, 100), [(-1, 1)] * d, gamma=gamma, generator=torch.Generator().manual_seed(0))
    single = nn.Linear(d, 100, dtype=torch.float32)
    single = sfli(single, [(-1, 1)] * d, gamma=gamma, generator=torch.Generator().manual_seed(0))
    layer.load_state_dict(single.state_dict())
    centres = (-single.bias / single.weight).detach()
    g = torch.Generator().manual_seed(1)
    near = centres + torch.randn(100, d, generator=g, dtype=torch.float32) / gamma
    x = torch.cat([2 * torch.rand(100, d, generator=g, dtype=torch.float32) - 1, near])
    names = [f"x{k}" for k in range(d)]
    laplacian = "+".join(v + v for v in names)
    for derivatives in (laplacian, f"x0 x1 {laplacian} x0x0x1"):
        got, want = (jet(f, z, " ".join(names), derivatives) for f, z in ((single, x), (layer, x.double())))
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, want)]
        assert got[0].dtype == torch.float32 and errors[0] < 2e-7 and max(errors) < bound, errors
