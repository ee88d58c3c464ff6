"""Architectures against their formulas written out; eps-rank against closed forms."""

import math

import pytest
import torch
from torch import nn

from cli import FourierFeatures
from common import (MLP, Dense, ModifiedMLP, Periodic, PirateNet, ResNet, eps_rank, gram_spectrum, grid,
                    hidden_features, sfli, uniform)  # fmt: skip

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
    for mine, want in zip(net.hidden(x), y):
        assert torch.allclose(mine, want, atol=1e-13)
    assert torch.allclose(net(x), dense(net.out, y[-1]), atol=1e-13)


def test_pirate_net_starts_as_one_gated_layer():
    net = PirateNet(2, 16, 3)
    h = net.hidden(torch.rand(4, 2))
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


class Given(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = layers

    def hidden(self, x):
        return [layer(x) for layer in self.layers]


def test_orthogonal_features_have_known_eigenvalues(float64):
    """phi_k = 10^-k cos(k pi x) on [-1, 1]: M = diag(10^-2k), exactly orthogonal on the midpoint grid too."""
    k = torch.arange(1, 9)
    net = Given(lambda x: 10.0**-k * torch.cos(k * math.pi * x))
    x = grid([(-1, 1)], 200)
    lam = gram_spectrum(net.hidden(x)[0], 2.0)
    assert torch.allclose(lam, 10.0 ** (-2 * k), rtol=1e-6, atol=1e-17)
    assert [eps_rank(net, x, eps, 2.0) for eps in (1e-3, 1e-7, 1e-11)] == [1, 3, 5]


def test_layers_and_repeated_features():
    net = Given(lambda x: x.expand(-1, 6), lambda x: torch.cat([x, x**2, 2 * x**2, 0 * x], 1))
    x = grid([(0, 1)], 100)
    assert eps_rank(net, x, layer="all") == [1, 2] and eps_rank(net, x, layer=0) == 1 and eps_rank(net, x) == 2


def test_float32_features_do_not_invent_rank():
    """Smooth Gaussians: with float64 accumulation the float32 features have the rank of the float64 ones down to
    1e-12 of the largest eigenvalue; accumulated in float32 they have not."""
    net = sfli(MLP(1, 50, 1), [(-1, 1)], gamma=1.0, generator=torch.Generator().manual_seed(0))
    x = grid([(-1, 1)], 20000)
    phi = net.hidden(x)[0].detach()
    exact = gram_spectrum(net.double().hidden(x.double())[0])
    count = lambda lam: int((lam > 1e-12 * lam.max()).sum())
    assert abs(count(gram_spectrum(phi)) - count(exact)) <= 1
    assert count(torch.linalg.eigvalsh((phi.T @ phi / len(phi)).double())) > count(exact) + 10


def test_sequential_features():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
    x = torch.rand(10, 2)
    assert [tuple(h.shape) for h in hidden_features(net, x)] == [(10, 5), (10, 7)]
    assert torch.equal(hidden_features(net, x)[1], net[:4](x))
    with_sfli = sfli(net, [(0, 1)] * 2)
    assert torch.equal(hidden_features(with_sfli, x)[0], with_sfli[0](x)) and len(hidden_features(with_sfli, x)) == 2
    with pytest.raises(ValueError, match="hidden"):
        hidden_features(nn.Linear(2, 2), x)


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
