"""The process of a script: how it ends, its folder's lock, its share of torchrun, its memory. cli.py asks for all this;
a program of your own may take Together for train(processes=Together()) under torchrun.
"""
import atexit
import contextlib
import gc
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch

from common import Refused, Stopped
from kernels.checkpoint import atomically

# How it ends --------------------------------------------------------------------------------------

FLAGS = set()  # of the script that runs: "--gamma", ...


def fail(message, status=2):
    """One line on stderr, naming the flag and the remedy; exit status 2 for bad input."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(status)


def in_flags(message):
    """"gamma, C: .." of common.py -> "--gamma, --C: .."; what is no flag stays."""
    names, colon, rest = message.partition(": ")
    flag = lambda name: "--" + {"folder": "out", "kind": "sfli"}.get(name, name)
    return ", ".join(flag(name) if flag(name) in FLAGS else name for name in names.split(", ")) + colon + rest


class Signals:
    """Handler of SIGINT, SIGTERM and SIGHUP: at once, or in training after the step under way."""

    number, training = None, False

    def install(self):
        """-> the handlers before. What is ignored stays ignored (nohup), Windows has no SIGHUP."""
        self.number = None
        all = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        return {n: signal.signal(n, self) for n in all if signal.getsignal(n) != signal.SIG_IGN}

    def __call__(self, number, frame):
        signal.signal(number, signal.SIG_DFL)  # a second one is not waited for
        self.number = number
        if not self.training:
            raise KeyboardInterrupt


signals = Signals()


class Patient(io.TextIOBase):
    """A stream whose reader may leave (| head), whose disk may be full, whose console may lack letters: training goes
    on all the same."""

    def __init__(self, stream):
        self.stream, self.encoded = stream, getattr(stream, "encoding", None) or "utf-8"

    def write(self, text):
        try:
            self.stream.write(text.encode(self.encoded, "replace").decode(self.encoded))
            self.stream.flush()
        except (AttributeError, OSError, ValueError):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # also what its buffer still holds
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.stream = None
        return len(text)


@contextlib.contextmanager
def answered():
    """Around main(): what a person can mend ends in one line. Bad input, a full disk, a missing package: status 2;
    divergence: 1; a signal: 128 + its number. Bugs keep their traceback."""
    old = signals.install() if threading.current_thread() is threading.main_thread() else {}
    try:
        with contextlib.redirect_stdout(Patient(sys.stdout)):
            yield
    except Refused as e:
        fail(in_flags(str(e)))
    except FloatingPointError as e:
        fail(e, status=1)
    except Stopped as e:
        again = sys.argv if "--resume" in sys.argv else [*sys.argv, "--resume"]
        fail(f"{e}; continue with: python {shlex.join(again)}", status=128 + signals.number)
    except KeyboardInterrupt:
        fail("interrupted", status=128 + (signals.number or signal.SIGINT))
    except ModuleNotFoundError as e:
        fail(f"the package {e.name} is missing; pip install -r requirements.txt")
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(e):
            raise
        fail("--batch, --width: out of memory; use smaller ones")
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held(folder):
    """Hold `folder`, which need not exist yet, against other runs while training; the system lets go when the process
    ends. Yields stop() for train()."""
    new = [p for p in (Path(folder), *Path(folder).parents) if not p.exists()]
    handle = lock(folder) if world()[0] == 0 else None
    signals.training = True
    try:
        yield lambda: signals.number is not None
    finally:
        signals.training = False
        if handle is not None:
            os.close(handle)
        with contextlib.suppress(OSError):
            for p in new:
                p.rmdir()  # if nothing was written


def lock(folder):
    """The open folder, locked; None on Windows."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except ImportError:
        return None
    except BlockingIOError:
        raise Refused(f"folder: another run is writing to {folder}; wait for it, or use another") from None
    except OSError as e:
        raise Refused(f"folder: cannot write to {folder} ({e.strerror}); choose another or make room") from None


# torchrun -----------------------------------------------------------------------------------------


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


def join(gpu):
    """Under torchrun: join the other processes; all but the first are silent."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
        atexit.register(leave)
    if world()[0] > 0:
        sys.stdout = open(os.devnull, "w")


def leave():
    """Before the interpreter ends, or gloo's threads outlive it; what holds the group in a cycle goes first."""
    gc.collect()
    torch.distributed.destroy_process_group()


def write_json(path, data):
    text = json.dumps(data, indent=1, allow_nan=False)
    atomically(path, lambda tmp: tmp.write_text(text))


def cached(folder, name, shapes, compute):
    """The arrays {name: array} of `shapes` that compute() returns, kept as folder/name.npz, if there is a folder. Of
    several processes the first computes and the others read."""
    import numpy as np

    (process, processes), path, data = world(), None if folder is None else Path(folder) / f"{name}.npz", {}
    if process > 0:
        torch.distributed.barrier()
    if path is not None and path.exists():
        with contextlib.suppress(Exception), np.load(path) as kept:  # what cannot be read is computed anew
            data = dict(kept)
    if {k: v.shape for k, v in data.items()} != shapes or not all(np.isfinite(v).all() for v in data.values()):
        data = compute()
        if path is not None:
            buffer = io.BytesIO()
            np.savez(buffer, **data)
            atomically(path, lambda tmp: tmp.write_bytes(buffer.getvalue()))
    if process == 0 and processes > 1:
        torch.distributed.barrier()
    return data


# Its machine --------------------------------------------------------------------------------------


def choose_device(device):
    """"auto" decided; under torchrun a GPU for each process, which NCCL wants to be the current one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = int(os.environ.get("WORLD_SIZE", 1)) if torch.distributed.is_available() else 1
    if processes > 1 and device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        fail(f"--device: {device!r} is unknown; use auto, cpu, cuda or cuda:N")
    if device != "cpu" and int((device + ":0").split(":")[1]) >= torch.cuda.device_count():
        fail(f"--device {device}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    if processes > 1:
        join(device != "cpu")
    return device


def check_memory(args, d):
    """Refuse what cannot fit: parameters, gradients and moments, a batch with some derivatives, test points."""
    layers, width, batch = args.layers, args.width, args.batch
    values = args.seeds * (4 * width * (d + layers * width) + batch * (d + 4 * layers * width)) + 30_000 * d
    with contextlib.suppress(AttributeError, ValueError):  # Windows does not tell
        has = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if args.device == "cpu" else
               torch.cuda.get_device_properties(args.device).total_memory)
        if (need := values * getattr(torch, args.dtype).itemsize) > has:
            fail(f"--width, --batch: {d} inputs, {layers} layers of {width} and batch {batch} take {need / 1e9:.0f} GB "
                 f"at least, this machine has {has / 1e9:.0f}; use smaller ones")


def commit():
    """The commit of this file's repository, or None where it has none."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], check=True, capture_output=True,
                              text=True).stdout.strip() or None
