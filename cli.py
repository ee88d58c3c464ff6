"""What the seven scripts share beyond common.py: flags and presets, run folders, torchrun, tables, plots.

    python cli.py        what this machine has, what works on it, and how fast it is
"""
import argparse
import atexit
import contextlib
import csv
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from common import (KINDS, MLP, Alone, ModifiedMLP, Periodic, PirateNet, Problem, Save, Schedule, Stopped, _first_layer,
                    atomically, eps_rank, make_optimizer, sfli, shape_parameter, train, write_rows)
from kernels import cpu

# How a run may end ----------------------------------------------------------------------------------------------------

def fail(message, status=2):
    """One line on stderr, naming the flag and the remedy; exit status 2 for bad input."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(status)

@contextlib.contextmanager
def reported(folder, plot=True):
    """What a run into `folder` may end with, in one line: bad input, a full disk (status 2), divergence (status 1), and
    Ctrl-C or SIGTERM (130, 143) after the step under way. Yields stop() for train(). Refuses a folder in use; after
    a divergence draws the history up to there."""
    signals, old = [], {}

    def note(number, frame):
        signals.append(number)
        signal.signal(number, old[number])  # a second one is not waited for

    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with locked(folder):
            yield lambda: bool(signals)
    except ValueError as e:
        fail(e)
    except OSError as e:
        fail(f"--out: cannot write to {folder} ({e.strerror}); choose another folder or make room")
    except FloatingPointError as e:
        if plot:
            plot_history(folder)
        fail(f"{Path(folder).name}: {e}", status=1)
    except Stopped as e:
        again = sys.argv if "--resume" in sys.argv else [*sys.argv, "--resume"]
        fail(f"{Path(folder).name}: {e}; continue with: python {shlex.join(again)}", status=128 + signals[0])
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

@contextlib.contextmanager
def locked(folder):
    """Hold `folder`, which need not exist yet, against other runs; the system lets go when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        fcntl = None
    if fcntl is None or world()[0] > 0:
        yield
        return
    new = [p for p in (Path(folder), *Path(folder).parents) if not p.exists()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out: another run is writing to {folder}; wait for it, or use another --out") from None
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            for p in new:
                p.rmdir()  # if nothing was written

# Flags and presets ----------------------------------------------------------------------------------------------------

def number(kind, fits, wanted):
    def parse(text):
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")

    return parse

def positive(kind):
    return number(kind, lambda v: 0 < v < math.inf, f"a positive {'integer' if kind is int else 'number'}")

natural = number(int, lambda v: 0 <= v <= 10**12, "an integer from 0 to 10^12")
fraction = number(float, lambda v: 0 <= v < 1, "a number in [0, 1)")

def parser(description, presets):
    """The flags that mean the same in every script."""
    cli = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.error = fail
    flag = cli.add_argument
    flag("--sfli", nargs="?", const="gauss", choices=KINDS, help="structured first layer; without a value: gauss")
    flag("--all", action="store_true", help="every configuration of the figure or table, and the figure")
    flag("--preset", default="auto", choices=["auto", *presets], help="auto: paper on CUDA, laptop on a CPU")
    flag("--steps", type=positive(int), help="training steps; the schedule is stretched with them")
    flag("--batch", type=positive(int), help="points per step")
    flag("--width", type=positive(int), help="neurons per hidden layer")
    flag("--lr", type=positive(float), help="initial learning rate; with ng: the longest step")
    flag("--optimizer", choices=["adam", "soap", "ng"],
         help="soap needs the package pytorch-optimizer; ng is natural gradient (one seed, float64)")
    flag("--damping", type=positive(float), help="first damping lambda of ng (default 1e-3); it adapts")
    flag("--momentum", type=fraction, help="SPRING momentum of ng, in [0, 1) (default 0)")
    flag("--seed", type=natural, default=0, help="first seed (default 0)")
    flag("--seeds", type=positive(int), help="number of seeds, trained at once (default 1; 5 in the tables)")
    flag("--gamma", type=lambda text: text if text == "auto" else positive(float)(text),
         help="shape parameter of SFLI (default: the paper's table); auto: chosen by the rank of the Gaussian layer")
    flag("--C", type=positive(float), help="take gamma = C (n^(1/d) - 1) / |Omega|^(1/d) instead")
    flag("--eps", type=positive(float), default=1e-6, help="threshold of the eps-rank (default 1e-6)")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    flag("--dtype", choices=["float32", "float64"], help="precision (default float32; with ng always float64)")
    flag("--compile", default="auto", choices=["auto", "on", "off"],
         help="torch.compile; auto: from 2000 steps on, on a CPU where a C++ compiler and Python.h are found")
    flag("--out", default="runs", help="results go to OUT/experiment/config/ (default runs)")
    flag("--resume", action="store_true", help="continue from the checkpoints in OUT")
    flag("--save-seconds", type=positive(float), default=120.0, help="a checkpoint every so many seconds (default 120)")
    flag("--save-steps", type=positive(int), help="and every so many steps (default: by time alone)")
    flag("--no-plot", action="store_true", help="no figures")
    return cli

def parse_args(experiment, description, presets, argv=None, extra=None):
    """The flags of a script, filled up from its `presets` = {"paper": {...}, "laptop": {...}, "smoke": {...}}, whose
    entries "all" and "ng" are what is otherwise with --all and --optimizer ng; extra(parser) adds the script's own."""
    cli = parser(description, presets)
    if extra:
        extra(cli)
    args = cli.parse_args(argv)
    args.experiment, args.argv = experiment, sys.argv[1:] if argv is None else list(argv)
    if args.all and args.sfli:
        fail("--all runs every configuration; drop --sfli")
    if args.gamma and args.C:
        fail("--gamma and --C exclude each other; drop one")
    choose_device(args)
    resolve_preset(args, presets)
    check_optimizer(args)
    if args.compile == "auto":
        args.compile = "on" if args.steps >= 2000 and (args.device != "cpu" or cpu.can_compile()) else "off"
    prepare_process(args)
    return args

def choose_device(args):
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    join_world(args)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        fail(f"--device: {args.device!r} is unknown; use auto, cpu, cuda or cuda:N")
    if args.device != "cpu" and int((args.device + ":0").split(":")[1]) >= torch.cuda.device_count():
        fail(f"--device {args.device}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")

def resolve_preset(args, presets):
    """Fill what the command line leaves open."""
    if args.preset == "auto":
        args.preset = "laptop" if args.device == "cpu" else "paper"
        print(f"preset {args.preset} (device {args.device}; choose with --preset {'|'.join(presets)})")
    usual = dict(warmup=0, decay=1.0, decay_every=1000, dtype="float32", seeds=1, arch="mlp", fourier=None)
    preset = usual | presets[args.preset]
    of_ng, of_all = preset.pop("ng", {}), preset.pop("all", {})
    preset |= of_all if args.all else {}
    if (args.optimizer or preset["optimizer"]) == "ng":
        preset |= dict(lr=1.0, warmup=0, decay=1.0, dtype="float64", damping=1e-3, momentum=0.0) | of_ng
    elif args.damping or args.momentum is not None:
        fail("--damping and --momentum belong to natural gradient; add --optimizer ng")
    for key in ("warmup", "decay_every"):
        preset[key] *= (args.steps or preset["steps"]) / preset["steps"]
    for key, value in preset.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)

def check_optimizer(args):
    processes = world()[1]
    if 1 < args.seeds < processes:
        fail(f"--seeds: {args.seeds} seeds do not occupy {processes} processes; use as many at least, or one")
    if args.optimizer == "soap":
        if args.seeds > 1:
            fail("--optimizer soap preconditions one network; use --seeds 1 or --optimizer adam")
        try:
            make_optimizer("soap", Problem([nn.Linear(1, 1)], None), 1e-3, {})
        except ValueError as e:
            fail(e)
    if args.optimizer == "ng":
        if processes > 1:
            fail("--optimizer ng runs in one process; start it without torchrun")
        if args.seeds > 1:
            fail("--optimizer ng trains one network at a time; use --seeds 1 and one --seed after the other")
        if args.dtype != "float64":
            fail("--optimizer ng computes in float64; drop --dtype float32")
        if args.compile == "on":
            fail("--optimizer ng is not compiled; drop --compile on")
        args.compile = "off"

def prepare_process(args):
    """What a script may change in its own process, and common.py never does."""
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.set_flush_denormal(True)  # before the first parallel operation: other threads inherit it
    cpu.keep_memory()
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # consoles that cannot print the arrow in the last line

# torchrun ------------------------------------------------------------------------------------------------------------

def world():
    """Number of this process and of all: (0, 1) but under torchrun."""
    d = torch.distributed
    return (d.get_rank(), d.get_world_size()) if d.is_available() and d.is_initialized() else (0, 1)

class Together:
    """The processes of torchrun, each with points of its own, for common.train()."""

    def __init__(self):
        self.number, self.count = world()

    def average(self, x):
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x / self.count

    def average_gradients(self, params):
        grads = [p.grad for p in params if p.grad is not None]
        mean = self.average(torch.cat([g.flatten() for g in grads]))
        for g, m in zip(grads, mean.split([g.numel() for g in grads])):
            g.copy_(m.view_as(g))

    def gather(self, x):
        parts = [None] * self.count
        torch.distributed.all_gather_object(parts, x)
        return parts

def join_world(args):
    """Under torchrun: join the other processes, each on its own GPU; all but the first are silent."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not torch.distributed.is_available():
        return
    if args.device.startswith("cuda"):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        atexit.register(torch.distributed.destroy_process_group)  # or gloo's threads outlive the interpreter
    if world()[0] > 0:
        args.no_plot, sys.stdout = True, open(os.devnull, "w")

# Networks and gamma ---------------------------------------------------------------------------------------------------

ARCHITECTURES = {"mlp": MLP, "modified": ModifiedMLP, "pirate": PirateNet}

class FourierFeatures(nn.Module):
    """The competitor's encoder: x -> [cos(B x), sin(B x)], B ~ scale N(0, 1), trained like jaxpi's."""

    def __init__(self, d, n, scale=1.0):
        super().__init__()
        self.B = nn.Parameter(scale * torch.randn(n // 2, d))

    def forward(self, x):
        z = F.linear(x, self.B)
        return torch.cat([torch.cos(z), torch.sin(z)], -1)

def network(args, omega, gamma=None, out=1, periods=None, rwf=None):
    """build(generator) for run(): --arch, --layers and --width on the box omega, with --sfli or --fourier."""

    def build(generator):
        d, embed = len(omega) + len(periods or {}), Periodic(len(omega), periods) if periods else nn.Identity()
        if args.fourier:
            d, embed = args.width, nn.Sequential(embed, FourierFeatures(d, args.width, args.fourier))
        net = ARCHITECTURES[args.arch](d, args.width, args.layers, out=out, rwf=rwf, embed=embed)
        return sfli(net, omega, args.sfli, gamma, args.C or 1.0, generator) if args.sfli else net

    return build

def sfli_generator(seed):
    return torch.Generator().manual_seed(1000003 * seed + 2)

def gamma_of(args, table, omega, points, measure, embed=None):
    """gamma for sfli(): --gamma, or None (Eq. (3.3)) where --C is given, or the paper's table. --gamma auto scans
    the Gaussian layer of the first seed at `points` and leaves the other kinds of --all to the table."""
    if args.sfli and args.C and args.width < 2:
        fail("--C: Eq. (3.3) makes gamma zero for one neuron; widen with --width or give --gamma")
    if args.sfli is None or args.C:
        return None
    if args.gamma != "auto":
        return args.gamma or table[args.sfli]
    if args.sfli != "gauss" and "--all" not in args.argv:
        fail(f"--gamma auto looks at Gaussians; give a number for --sfli {args.sfli}")
    if args.width < 2:
        fail("--gamma auto needs at least two neurons; widen with --width")
    if args.sfli != "gauss":
        return table[args.sfli]
    return scan_gamma(args.width, omega, points, args.eps, measure, embed, sfli_generator(args.seed))

@torch.no_grad()
def scan_gamma(n, domain, x, eps=1e-6, measure=1.0, embed=None, generator=None, enough=0.9):
    """Shape parameter for n Gaussians by looking at the rank: gamma of Eq. (3.3) for C = 0.5, 0.6, .. 2.0, all with
    the centres that `generator` draws, their Gram matrices at the points x in one batched call.

    Rank grows with gamma, but narrow bumps share no information: taken is the smallest C whose rank is at least
    `enough` n (the gamma of Examples 4.1 and 4.2 are at 0.83 and 0.90), or the highest rank where none is."""
    from kernels.gaussian_gram import gaussian_gram

    embed = nn.Identity() if embed is None else embed
    generator = torch.Generator() if generator is None else generator
    z, state, layers = embed(x), generator.get_state(), []
    candidates = [k / 10 for k in range(5, 21)]
    for C in candidates:
        generator.set_state(state)
        like = nn.Linear(z.shape[1], n, device=z.device)
        layers.append(_first_layer(like, embed, domain, "gauss", None, C, generator))
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

# Runs -----------------------------------------------------------------------------------------------------------------

def configurations(args, choices, name, over=({},)):
    """The runs of a script, each with its folder's name in .config: args alone, or with --all one for each of
    `choices`; each of these for each of `over`. Refuses what no run of them can mean."""
    if (args.gamma or args.C) and not (args.sfli or args.all):
        fail("--gamma and --C shape the first layer of SFLI; add --sfli or --all")
    if args.fourier and (args.sfli or args.all):
        fail("--fourier replaces SFLI; drop --sfli or --all")
    if args.fourier and args.width % 2:
        fail("--fourier needs an even --width: half cosines, half sines")
    chosen = [{**b, **a} for b in over for a in (choices if args.all else [{}])]
    runs = [argparse.Namespace(**vars(args) | choice) for choice in chosen]
    for run in runs:
        run.config = name(run)
    folders = [folder_of(run, run.config) for run in runs]
    if args.resume and not any(map(has_checkpoint, folders)):
        fail(f"--resume: there is no checkpoint {folders[0] / 'checkpoint.pt'}; run without --resume first")
    return runs

def check_chunks(args, chunks):
    if args.batch % chunks:
        fail(f"--batch: {args.batch} points do not split into {chunks} causal chunks; use a multiple of {chunks}")

def folder_of(args, *below):
    return Path(args.out, args.experiment, *below)

def figure_folder(args, runs):
    """Of a figure that shows all runs: theirs, or with --all the one above."""
    return folder_of(args, *([] if args.all else [runs[0].config]))

def has_checkpoint(folder):
    return any(Path(folder).rglob("checkpoint*.pt"))

def settings_of(args, *skip):
    """What a checkpoint must agree with: all flags but those that choose among runs or leave them alone, and `skip`."""
    skip = ("out", "resume", "no_plot", "all", "argv", "dims", "save_seconds", "save_steps", *skip)
    return {k: v for k, v in vars(args).items() if k not in skip}

def training(args, folder, settings, steps=None):
    """What the flags say to train(); `steps` other than args.steps stretch the schedule."""
    stretch = (steps or args.steps) / args.steps
    if args.compile == "on":
        torch.compiler.reset()  # the runs of --all would fill the compiler's list of variants and end up uncompiled
    save = Save(folder, settings, args.resume and has_checkpoint(folder), args.save_seconds, args.save_steps)
    return dict(lr=Schedule(args.lr, args.warmup * stretch, args.decay, args.decay_every * stretch), save=save,
                optimizer=args.optimizer, optimizer_options=ng_options(args),
                compile=args.compile == "on" and cpu.compile_options(args.device))

def ng_options(args):
    return {k: getattr(args, k) for k in ("damping", "momentum")} if args.optimizer == "ng" else {}

def networks(build, seeds, device):
    """A network per seed, drawn from torch's own generator; `build` is given another one for SFLI, so that with and
    without SFLI all later layers are the same."""
    nets = []
    for seed in seeds:
        torch.manual_seed(seed)
        nets.append(build(sfli_generator(seed)).to(device))
    return nets

def with_ranks(evaluate, args, points, measure):
    """evaluate(net), and the eps-rank at `points` of every hidden layer and of the encoders."""

    def measured(net):
        ranks = eps_rank(net, points, args.eps, measure, layer="all")
        encoders = eps_rank(net, points, args.eps, measure, layer="first") if len(net.sfli_layers) > 1 else []
        return (evaluate(net) | {"eps_rank": ranks[-1]} | {f"eps_rank_{k}": r for k, r in enumerate(ranks, 1)}
                | {f"eps_rank_{name}": r for name, r in zip(net.sfli_layers, encoders)})

    return measured

def run(args, build, sample, residuals, evaluate, points, measure, gamma=None, paper=None, **options):
    """Train `build(generator)` for args.seeds seeds in the folder of args.config, write config.json, history.csv,
    result.json and checkpoint.pt there, print the RESULT line; return the trained nets and the history. evaluate(net)
    gives rel_l2 at least. `options` go to train()."""
    folder, (process, processes) = folder_of(args, args.config), world()
    seeds = list(range(args.seed, args.seed + args.seeds))
    settings = settings_of(args, "C_grid", "search_steps", "search_seeds") | {"seeds": seeds, "gamma": gamma,
                                                                              "processes": processes}
    split = processes > 1 and args.seeds > 1  # under torchrun: each process its own seeds, in a folder of its own
    mine, place = (seeds[process::processes], folder / f"process{process}") if split else (seeds, folder)
    together = Together() if processes > 1 and not split else Alone
    with reported(folder, not args.no_plot) as stop:
        nets = networks(build, mine, args.device)
        flags = training(args, place, settings)
        if args.optimizer == "ng":
            check_size(args, nets[0], sample, residuals, options.get("constants"))
        if not flags["save"].resume and (process == 0 or split):
            atomically(place / "config.json", lambda tmp: tmp.write_text(json.dumps(settings, indent=1)))
            for old in ("checkpoint.pt", "checkpoint_previous.pt", "result.json", "history.csv"):
                (place / old).unlink(missing_ok=True)
        history = train(nets, sample, residuals, args.steps, evaluate=with_ranks(evaluate, args, points, measure),
                        seeds=mine, stop=stop, processes=together, **flags, **options)
        if split:
            history = sorted(sum(Together().gather(history), []), key=lambda row: (row["step"], row["seed"]))
            if process == 0:
                write_rows(folder / "history.csv", history)
    result = result_of(args, history, seeds, gamma, paper)
    if process == 0:
        atomically(folder / "result.json", lambda tmp: tmp.write_text(json.dumps(result, indent=1)))
    print(f"eps-rank: last hidden layer, eps = {args.eps:g}, M = {measure:g} x mean over {len(points)} points")
    low, high = (sum(result[k]) / len(seeds) for k in ("eps_rank_initial", "eps_rank_final"))
    print(f"RESULT {args.experiment} {args.config} rel_l2={result['rel_l2_mean']:.3e} "
          f"eps_rank={low:.4g}→{high:.4g}/{args.width} seconds={result['seconds']:.1f}", flush=True)
    return nets, history

def check_size(args, net, sample, residuals, constants):
    """Refuse a Jacobian that does not fit before anything is written."""
    numbers = {k: torch.tensor(v, device=args.device) for k, v in (constants(0) if constants else {}).items()}
    opt = make_optimizer("ng", Problem([net], residuals), args.lr, ng_options(args))
    opt.size(sample(torch.Generator(args.device)) | numbers)

def result_of(args, history, seeds, gamma, paper):
    first, last = history[: len(seeds)], history[-len(seeds) :]
    errors, seconds = [row["rel_l2"] for row in last], last[0]["seconds"]
    return {
        "experiment": args.experiment, "config": args.config, "preset": args.preset, "seeds": seeds,
        "steps": args.steps, "rel_l2": errors, "rel_l2_mean": sum(errors) / len(seeds), "eps": args.eps,
        "eps_rank_initial": [row["eps_rank"] for row in first], "eps_rank_final": [row["eps_rank"] for row in last],
        "width": args.width, "seconds": seconds, "steps_per_second": args.steps / seconds, "device": args.device,
        "dtype": args.dtype, "torch": torch.__version__, "commit": commit(), "argv": args.argv, "gamma": gamma,
        "paper": paper, "processes": world()[1]}

def commit():
    """The commit of this file's repository, or None where it has none."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], check=True, capture_output=True,
                              text=True).stdout.strip() or None

def cached(folder, name, compute):
    """The arrays {name: array} that compute() returns, kept as folder/name.npz, if there is a folder. Under torchrun
    the first process goes first."""
    import numpy as np

    process, processes = world()
    path = None if folder is None else Path(folder) / f"{name}.npz"
    if process > 0:
        torch.distributed.barrier()
    data = None
    if path is not None and path.exists():
        with contextlib.suppress(Exception), np.load(path) as kept:  # what cannot be read is computed anew
            data = dict(kept)
    if data is None:
        data = compute()
        if path is not None:
            buffer = io.BytesIO()
            np.savez(buffer, **data)
            with writing(path):
                atomically(path, lambda tmp: tmp.write_bytes(buffer.getvalue()))
    if process == 0 and processes > 1:
        torch.distributed.barrier()
    return data

@contextlib.contextmanager
def writing(path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        fail(f"--out: cannot write {path} ({e.strerror}); choose another folder or make room")

def relative_l2(y, f):
    return (torch.linalg.norm(y - f) / torch.linalg.norm(f)).item()

# Tables and plots -----------------------------------------------------------------------------------------------------

def write_table(folder, rows):
    """Write and print rows [{column: cell}] as folder/table.csv and table.md. A cell is a number, or a pair (values
    over the seeds, the paper's number or None), shown as mean +- std, paper, ratio."""
    long, short = [], []
    for row in rows:
        wide, line = {}, {}
        for key, cell in row.items():
            if not isinstance(cell, tuple):
                wide[key] = line[key] = cell
                continue
            values, paper = torch.tensor(cell[0], dtype=torch.float64), cell[1]
            mean, std = values.mean().item(), values.std(correction=0).item()
            wide |= {f"{key}_mean": mean, f"{key}_std": std, f"{key}_paper": paper, f"{key}_seeds": len(values)}
            beside = f" (paper {paper:.2e}, ratio {mean / paper:.2f})" if paper else ""
            line[key] = f"{mean:.2e} ± {std:.1e}{beside}"
        long.append(wide)
        short.append(line)
    text = "".join("| " + " | ".join(map(str, cells)) + " |\n"
                   for cells in [list(short[0]), ["---"] * len(short[0]), *(line.values() for line in short)])
    with reported(folder):
        atomically(Path(folder) / "table.md", lambda tmp: tmp.write_text(text))
        write_rows(Path(folder) / "table.csv", long)
    print(text, end="")

COLORS = {"baseline": "black", "gauss": "tab:blue", "tanh": "tab:orange", "cos": "tab:green", "hat": "tab:red"}

def figure(rows, columns, size=(4.0, 3.2)):
    """Figure and array of axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, layout="constrained")

def save_figure(fig, path):
    with writing(path):
        fig.savefig(path, dpi=120)
    print(f"figure {path}")

def curve(ax, history, key, label=None, log=True, **style):
    """Plot history[key] against the step: the mean over the seeds and the band from lowest to highest."""
    steps = sorted({row["step"] for row in history})
    values = [[row[key] for row in history if row["step"] == step] for step in steps]
    mean = [sum(v) / len(v) for v in values]
    (line,) = ax.plot(steps, mean, label=label, **style)
    if len(values[0]) > 1:
        ax.fill_between(steps, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2, lw=0)
    ax.set_xlabel("step")
    ax.locator_params(axis="x", nbins=5)
    if log:
        ax.set_yscale("log")

def plot_history(folder):
    """history.csv of a run that ended early: loss, error and eps-rank against the step."""
    with contextlib.suppress(OSError, ImportError):
        with open(Path(folder) / "history.csv", newline="") as f:
            history = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
        keys = [k for k in ("loss", "rel_l2", "eps_rank") if history and k in history[0]]
        if keys:
            fig, axes = figure(1, len(keys))
            for ax, key in zip(axes[0], keys):
                curve(ax, history, key, log=key != "eps_rank")
                ax.set_ylabel(key)
            save_figure(fig, Path(folder) / "fig_history.png")

def plot_dimensions(rows, path):
    """Error against d from the rows of write_table(): mean and range over the seeds, crosses for the paper's."""
    fig, axes = figure(1, 1, size=(5.2, 3.6))
    ax, dims = axes[0, 0], [row["d"] for row in rows]
    keys = [key for key, cell in rows[0].items() if isinstance(cell, tuple)]
    for key, color in zip(keys, ("black", "tab:blue", "tab:red")):
        values = [row[key][0] for row in rows]
        mean = [sum(v) / len(v) for v in values]
        spread = [[m - min(v) for m, v in zip(mean, values)], [max(v) - m for m, v in zip(mean, values)]]
        ax.errorbar(dims, mean, spread, marker="o", capsize=3, color=color, label=key)
        known = [(row["d"], row[key][1]) for row in rows if row[key][1]]
        ax.plot(*zip(*known) if known else ([], []), ls="", marker="x", color=color)
    ax.plot([], [], ls="", marker="x", color="gray", label="paper")
    ax.set(xlabel="d", ylabel="relative test error", xscale="log", yscale="log", xticks=dims, xticklabels=dims)
    ax.minorticks_off()
    ax.legend(fontsize=8)
    save_figure(fig, path)

if __name__ == "__main__":
    cpu.self_report()
