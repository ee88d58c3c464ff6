"""sfli, sfli_ and eps_rank on what people bring: they work, or they say what to do instead."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common import FirstLayer, Refused, eps_rank, grid, layer_features, sfli, sfli_, train, uniform

SQUARE = [(-1, 1), (-1, 1)]
X = grid(SQUARE, 30)
N = 64


def seeded():
    return torch.Generator().manual_seed(0)


def rank(net, **options):
    return eps_rank(net, X, measure=4.0, **options)


class Functional(nn.Module):
    """tanh applied in forward()."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, N), nn.Linear(N, N), nn.Linear(N, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_own_module_with_functional_tanh():
    net = Functional()
    low = rank(net)
    with pytest.raises(Refused, match=r"'first' is not followed by an activation .* call sfli_\(\) on this Linear"):
        sfli(net, SQUARE, layer="first")
    with pytest.raises(Refused, match="name the first Linear of this Functional, one of: first, second, out"):
        sfli(net, SQUARE)
    sfli_(net.first, SQUARE, "tanh", generator=seeded())
    assert rank(net) > 2 * low and rank(net, layer="all")[0] > N / 2
    history = train(net, lambda g: {"x": uniform(SQUARE, 200, g)},
                    lambda net, b: {"fit": net(b["x"]) - torch.cos(5 * b["x"][:, :1])}, 300)  # fmt: skip
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]


class Residual(nn.Module):
    """A stem, then blocks with skips, the activation a module shared by all."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()
        self.stem = nn.Sequential(nn.Linear(2, N), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.out = nn.Linear(N, 1)

    def forward(self, x):
        y = self.stem(x)
        for block in self.blocks:
            y = y + self.act(block(y))
        return self.out(y)


@pytest.mark.parametrize("kind", ["gauss", "tanh", "cos", "hat"])
def test_resnet_like(kind):
    net = Residual()
    low, names = rank(net), [name for name, _ in net.named_modules()]
    assert sfli(net, SQUARE, kind, generator=seeded(), layer="stem.0") is net
    assert isinstance(net.stem[0], FirstLayer) and type(net.stem[1]) is nn.Identity
    assert rank(net) > 2 * low and [name for name, _ in net.named_modules()] == names
    assert rank(net, layer=["stem", 0]) == [rank(net, layer="stem")] * 2
    with pytest.raises(Refused, match=r"'0' is not followed by an activation .* sfli_\(\)"):
        sfli(net, SQUARE, layer="blocks.0")


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.second = nn.Conv1d(2, 16, 5), nn.Tanh(), nn.Conv1d(16, 8, 3)
        self.head = nn.Linear(8, 1)

    def forward(self, x):  # [B, 2, L]
        return self.head(F.gelu(self.second(self.act(self.conv(x)))).mean(2))


def test_convolutional_network():
    """Positions are samples; a convolution is no Linear, which sfli says."""
    net, x = Convolutional(), torch.randn(20, 2, 30)
    features = torch.tanh(net.conv(x)).transpose(1, 2).reshape(-1, 16)  # [20 * 26, 16]
    assert eps_rank(net, x, layer="act") == eps_rank(features) == 16
    assert eps_rank(net, x) == eps_rank(layer_features(net, x, [-1])[0]) == 8  # what enters the head
    for layer in (None, "conv"):
        with pytest.raises(Refused, match="no Linear followed by an activation.* one of: head"):
            sfli(net, SQUARE, layer=layer)


class Attention(nn.Module):
    """Points as tokens: embedding, one encoder layer, a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, N), nn.Tanh())
        self.block = nn.TransformerEncoderLayer(N, 4, 2 * N, batch_first=True)
        self.head = nn.Linear(N, 1)

    def forward(self, x):  # [B, T, 2]
        return self.head(self.block(self.embed(x)))


def test_transformer_block():
    """Tokens are samples, in train and in eval mode, where torch takes a fast path around the modules without hooks."""
    net, tokens = Attention(), X.reshape(30, 30, 2)
    for mode in (True, False):
        net.train(mode)
        phis = layer_features(net, tokens, ["embed", "block.self_attn", "block.linear1", "block", -1])
        assert [tuple(phi.shape) for phi in phis] == [(900, N), (900, N), (900, 2 * N), (900, N), (900, N)]
        assert torch.equal(phis[3], phis[4])
    low = eps_rank(net, tokens, layer="embed")
    sfli(net, SQUARE, "cos", generator=seeded(), layer="embed.0")
    assert eps_rank(net, tokens, layer="embed") > 2 * low
    with pytest.raises(Refused, match=r"'linear1' is not followed by an activation .* sfli_\(\)"):
        sfli(net, SQUARE, layer="block.linear1")


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, N), nn.Linear(N, N), nn.Linear(N, 1)

    def forward(self, x):
        return self.out(torch.sin(30 * self.second(torch.sin(30 * self.first(x)))))


def test_siren():
    """sin(30 z): initialised for sin, both divided by 30, the layer is that of kind cos."""
    net = Siren()
    sfli_(net.first, SQUARE, "sin", gamma=4.0, generator=seeded())
    with torch.no_grad():
        net.first.weight /= 30
        net.first.bias /= 30
    first = sfli(nn.Linear(2, N), SQUARE, "cos", gamma=4.0, generator=seeded())
    assert torch.allclose(torch.sin(30 * net.first(X)), first(X), atol=1e-5)
    assert rank(net, layer=0) == eps_rank(first(X), measure=4.0) > N / 2


class DeepONet(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, N), nn.ReLU(), nn.Linear(N, N))
        self.trunk = nn.Sequential(nn.Linear(2, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh())

    def forward(self, f, x):
        return self.branch(f) @ self.trunk(x).T


def test_trunk_of_a_deeponet():
    net, f = DeepONet(), torch.randn(5, 10)
    look = lambda: eps_rank(net, (f, X), measure=4.0, layer=["trunk.1", "trunk"])
    low, branch = look(), net.branch[0].weight.clone()
    sfli(net, SQUARE, generator=seeded(), layer="trunk.0")
    assert all(b > 2 * a for a, b in zip(low, look())) and net(f, X).shape == (5, 900)
    assert torch.equal(net.branch[0].weight, branch) and not isinstance(net.branch[0], FirstLayer)
    sfli(net, [(-3, 3)] * 10, "tanh", layer="branch.0")  # the other one has a domain of its own
    assert isinstance(net.branch[0], FirstLayer) and net(f, X).isfinite().all()


def test_compiled_network():
    net = sfli(nn.Sequential(nn.Linear(2, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 1)), SQUARE)
    compiled = torch.compile(net, backend="eager")
    assert rank(compiled, layer="all") == rank(net, layer="all") and rank(compiled, layer="3") == rank(net)
    with pytest.raises(Refused, match="before torch.compile"):
        sfli(compiled, SQUARE, layer="_orig_mod.2")


def test_deepxde(monkeypatch):
    monkeypatch.setenv("DDE_BACKEND", "pytorch")
    dde = pytest.importorskip("deepxde", reason="DeepXDE is not installed")
    net = dde.nn.FNN([2, N, N, 1], "tanh", "Glorot normal")
    x = X.to(net.linears[0].weight)
    low = eps_rank(net, x, measure=4.0)
    with pytest.raises(Refused, match=r"sfli_\(\) on this Linear"):
        sfli(net, SQUARE, layer="linears.0")
    sfli_(net.linears[0], SQUARE, "tanh", generator=seeded())
    assert eps_rank(net, x, measure=4.0) > 2 * low and len(eps_rank(net, x, layer="all")) == 2


def test_lightning():
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, N), nn.Tanh(), nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 1))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return (self(batch) - math.pi).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3)

    lit = Lit()
    low = rank(lit)
    sfli(lit, SQUARE, generator=seeded(), layer="net.0")
    assert rank(lit) > 2 * low and "net.0.weight" in lit.state_dict()
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    before = lit.net[0].weight.detach().clone()
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", **options)
    trainer.fit(lit, torch.utils.data.DataLoader(X, batch_size=100))
    assert not torch.equal(lit.net[0].weight, before) and rank(lit) > 2 * low
