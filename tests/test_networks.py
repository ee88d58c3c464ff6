"""Architectures against their formulas written out; eps-rank against closed forms."""

import math

import pytest
import torch
from torch import nn

from cli import FourierFeatures
from common import (MLP, Dense, ModifiedMLP, Periodic, PirateNet, Refused, ResNet, eps_rank, gram_spectrum, grid,
                    layer_features, sfli, uniform)  # fmt: skip

NETS = [MLP, ResNet, ModifiedMLP, PirateNet]


def dense(module, x):
    w = module.weight if module.g is None else module.g * module.weight
    return x @ w.T + module.bias


@pytest.mark.parametrize("rwf", [None, (1.0, 0.1)])
@pytest.mark.parametrize("Net", NETS)
def test_formulas(Net, rwf, float64):
    net, x, tanh = Net(3, 8, 3, out=2, rwf=rwf), torch.rand(5, 3), torch.tanh
    if Net in (MLP, ResNet):
        y = [tanh(dense(net.first[0], x))]
        for block in net.blocks:
            z = tanh(dense(block[0], y[-1]))
            y.append(z if Net is MLP else y[-1] + z)
    else:
        U, V = tanh(dense(net.U[0], x)), tanh(dense(net.V[0], x))
        gate = lambda z: z * U + (1 - z) * V
        y = [gate(tanh(dense(net.gate.dense, x)))]
        for block in net.blocks:
            if Net is ModifiedMLP:
                y.append(gate(tanh(dense(block.dense, y[-1]))))
            else:
                nn.init.constant_(block.alpha, 0.3)
                z = gate(tanh(dense(block.f.dense, y[-1])))
                h = tanh(dense(block.h[0], gate(tanh(dense(block.g.dense, z)))))
                y.append(0.3 * h + 0.7 * y[-1])
    assert len(y) == (4 if Net is PirateNet else 3)
    for mine, want in zip(layer_features(net, x), y, strict=True):
        assert torch.allclose(mine, want, atol=1e-13)
    assert torch.allclose(net(x), dense(net.out, y[-1]), atol=1e-13)


def test_pirate_net_starts_as_one_gated_layer():
    net = PirateNet(2, 16, 3)
    h = layer_features(net, torch.rand(4, 2))
    assert torch.equal(h[0], h[-1])


def test_random_weight_factorization():
    """g = exp(1 + 0.1 N), and g V has the Xavier variance 2 / (n + d); 256 x 256 draws: 3 sigma is 1.7%."""
    layer = Dense(256, 256, rwf=(1.0, 0.1))
    log_g = layer.g.log()
    assert log_g.mean().item() == pytest.approx(1.0, abs=0.02) and log_g.std().item() == pytest.approx(0.1, abs=0.014)
    w = (layer.g * layer.weight).detach()
    assert w.var().item() == pytest.approx(2 / 512, rel=0.017)
    assert {k for k, _ in layer.named_parameters()} == {"g", "weight", "bias"}


def test_periodic_embedding(float64):
    net = MLP(5, 8, 2, embed=Periodic(3, {0: 2.0, 2: 2 * math.pi}))
    x = torch.rand(6, 3)
    shift = torch.tensor([2.0, 0.0, -4 * math.pi])
    assert torch.allclose(net(x), net(x + shift), atol=1e-13)
    assert not torch.allclose(net(x), net(x + torch.tensor([0.0, 1.0, 0.0])))
    e = Periodic(3, {0: 2.0, 2: 2 * math.pi})(x)
    want = torch.stack(
        [torch.cos(math.pi * x[:, 0]), torch.sin(math.pi * x[:, 0]), x[:, 1], torch.cos(x[:, 2]), torch.sin(x[:, 2])], 1
    )
    assert torch.allclose(e, want)
    with pytest.raises(ValueError, match="periods"):
        Periodic(2, {2: 1.0})


def test_fourier_features():
    encoder = FourierFeatures(2, 4000, scale=3.0)
    y = encoder(torch.rand(5, 2))
    assert y.shape == (5, 4000)
    assert torch.allclose(y[:, :2000] ** 2 + y[:, 2000:] ** 2, torch.ones(5, 2000), atol=1e-5)
    assert encoder.B.std().item() == pytest.approx(3.0, rel=0.05)  # 4000 draws: 5% is 4.5 sigma


# eps-rank -----------------------------------------------------------------------------------------


def test_orthogonal_features_have_known_eigenvalues(float64):
    """phi_k = 10^-k cos(k pi x) on [-1, 1]: M = diag(10^-2k), exactly orthogonal on the midpoint grid too."""
    k = torch.arange(1, 9)
    phi = 10.0**-k * torch.cos(k * math.pi * grid([(-1, 1)], 200))
    lam = gram_spectrum(phi, 2.0)
    assert torch.allclose(lam, 10.0 ** (-2 * k), rtol=1e-6, atol=1e-17)
    assert [eps_rank(phi, eps=eps, measure=2.0) for eps in (1e-3, 1e-7, 1e-11)] == [1, 3, 5]


class Powers(nn.Module):
    """Hidden layers of rank 1 and 2: x six times, then x, x^2 twice and 0; `same` and `powers` return them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 6, bias=False), nn.Linear(4, 1)
        self.same, self.middle, self.powers = nn.Identity(), nn.Linear(6, 6), nn.Identity()
        nn.init.ones_(self.first.weight)

    def forward(self, x):
        y = self.same(self.first(x))
        y = self.middle(y) * 0 + x
        x = y[:, :1]
        return self.last(self.powers(torch.cat([x, x**2, 2 * x**2, 0 * x], 1)))


def test_layers_and_repeated_features():
    """By number, name or module, one or several in one pass."""
    net, x = Powers(), grid([(0, 1)], 100)
    assert eps_rank(net, x, layer="all") == [1, 2] and eps_rank(net, x, layer=0) == 1 and eps_rank(net, x) == 2
    assert eps_rank(net, x, layer=-2) == 1 and eps_rank(net, x, layer="same") == 1
    assert eps_rank(net, x, layer=net.powers) == 2
    assert eps_rank(net, x, layer=["powers", 0, net.same, -1]) == [2, 1, 1, 2]
    calls = []
    net.first.register_forward_hook(lambda *_: calls.append(1))
    eps_rank(net, x, layer=["powers", 0, -1])
    assert len(calls) == 1 and len(net.first._forward_hooks) == 1 and not net.powers._forward_hooks


def test_what_has_no_rank_is_refused():
    net, x = Powers(), grid([(0, 1)], 100)
    for layer in (2, -3, "pow", nn.Identity(), [0, "pow"]):
        with pytest.raises(Refused, match="layer: .* there are 2 hidden layers, and the modules first, last, same"):
            eps_rank(net, x, layer=layer)
    with pytest.raises(Refused, match="there are 0 hidden layers"):
        eps_rank(nn.Linear(1, 2), x)
    for bad in (math.nan, math.inf):
        with pytest.raises(Refused, match=r"features: \[100, 2\], 1 not finite"):
            eps_rank(torch.cat([torch.ones(99, 2), torch.tensor([[1, bad]])]))
    with pytest.raises(Refused, match=r"features: \[100\]"):
        eps_rank(torch.ones(100))
    nn.init.constant_(net.middle.bias, math.nan)
    with pytest.raises(Refused, match="400 not finite"):
        eps_rank(net, x)
    assert all(not m._forward_hooks for m in net.modules())


def test_the_network_is_asked_in_eval_mode_and_left_as_it_was():
    """Dropout and batch statistics would add noise to the rank, and the latter would move."""
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    net[2].eval()
    x, before = grid([(0, 1)], 50), {k: v.clone() for k, v in net.state_dict().items()}
    phi = layer_features(net, x)[-1]
    assert [m.training for m in net] == [True, True, False, True, True] and net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(phi, net.eval()[:4](x))


def test_positions_and_tokens_are_samples(float64):
    """Channels behind a convolution, also through activation and pooling; the last dimension elsewhere."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act, self.pool = nn.Conv1d(2, 5, 3), nn.Tanh(), nn.MaxPool1d(2)
            self.mix, self.late, self.flat = nn.Linear(5, 7), nn.GELU(), nn.Flatten()
            self.head = nn.Linear(28, 1)

        def forward(self, x):  # [B, 2, 10]
            y = self.pool(self.act(self.conv(x)))  # [B, 5, 4]
            return self.head(self.flat(self.late(self.mix(y.transpose(1, 2)))))  # [B, 4, 7] -> [B, 28]

    net, x = Both(), torch.randn(6, 2, 10)
    names = ["conv", "act", "pool", "mix", "late", "flat", 0, -1]
    phi = dict(zip(names, layer_features(net, x, names)))
    shapes = [(48, 5), (48, 5), (24, 5), (24, 7), (24, 7), (6, 28), (24, 5), (6, 28)]
    assert [tuple(phi[k].shape) for k in names] == shapes
    want = torch.tanh(net.conv(x))
    assert torch.equal(phi["act"], want.transpose(1, 2).reshape(-1, 5)) and torch.equal(phi["pool"], phi[0])
    assert torch.equal(phi["late"], net.late(net.mix(net.pool(want).transpose(1, 2))).reshape(-1, 7))
    image = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 2))
    conv, last = layer_features(image, torch.randn(5, 1, 8, 8), ["1", -1])
    assert conv.shape == (5 * 36, 3) and last.shape == (5, 108)


def test_compiled_and_several_arguments():
    net, x = sfli(MLP(1, 20, 2), [(-1, 1)]), grid([(-1, 1)], 100)
    want = eps_rank(net, x, layer="all"), eps_rank(net, x, layer="first")
    compiled = torch.compile(net, backend="eager")
    assert (eps_rank(compiled, x, layer="all"), eps_rank(compiled, x, layer="first")) == want and want[1][0] > 5

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.trunk = nn.Linear(3, 4), nn.Sequential(nn.Linear(1, 4), nn.Tanh())

        def forward(self, f, x):
            return self.branch(f) @ self.trunk(x).T

    net = Product()
    assert torch.equal(layer_features(net, (torch.rand(5, 3), x), ["trunk"])[0], net.trunk(x))


def test_encoders_are_the_first_layers():
    net = sfli(PirateNet(1, 20, 1), [(-1, 1)], generator=torch.Generator().manual_seed(0))
    x = grid([(-1, 1)], 100)
    U, V = (eps_rank(phi) for phi in (net.U(x), net.V(x)))
    assert eps_rank(net, x, layer="first") == [U, V] and eps_rank(net, x, layer=["V", "U"]) == [V, U]
    own = nn.Sequential()
    own.add_module("first", nn.Linear(1, 3)), own.add_module("last", nn.Linear(3, 1))
    assert eps_rank(own, x, layer="first") == 2  # in other networks a name like any other


def test_float32_features_do_not_invent_rank():
    """Smooth Gaussians: with float64 accumulation the float32 features have the rank of the float64 ones down to
    1e-12 of the largest eigenvalue; accumulated in float32 they have not."""
    net = sfli(MLP(1, 50, 1), [(-1, 1)], gamma=1.0, generator=torch.Generator().manual_seed(0))
    x = grid([(-1, 1)], 20000)
    phi = layer_features(net, x)[0]
    exact = gram_spectrum(layer_features(net.double(), x.double())[0])
    count = lambda lam: int((lam > 1e-12 * lam.max()).sum())
    assert abs(count(gram_spectrum(phi)) - count(exact)) <= 1
    assert count(torch.linalg.eigvalsh((phi.T @ phi / len(phi)).double())) > count(exact) + 10


def test_sequential_features():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
    x = torch.rand(10, 2)
    assert [tuple(h.shape) for h in layer_features(net, x)] == [(10, 5), (10, 7)]
    assert torch.equal(layer_features(net, x)[1], net[:4](x))
    with_sfli = sfli(net, [(0, 1)] * 2)
    assert torch.equal(layer_features(with_sfli, x)[0], with_sfli[0](x)) and len(layer_features(with_sfli, x)) == 2


def test_initial_rank_of_example_1():
    """The paper's first figure at step 0: below 15 for the baseline, above 85 of 100 with SFLI (eps = 1e-6)."""
    from exp_function_fit import GAMMA

    omega = [(-1, 1)] * 2
    x = grid(omega, 50)
    for seed in range(3):
        torch.manual_seed(seed)
        net = MLP(2, 100, 3)
        assert eps_rank(net, x, measure=4.0) < 15
        for kind, gamma in GAMMA.items():
            torch.manual_seed(seed)
            net = sfli(MLP(2, 100, 3), omega, kind, gamma, generator=torch.Generator().manual_seed(seed))
            assert eps_rank(net, x, measure=4.0) > 85, kind
    assert uniform(omega, 3).shape == (3, 2)
