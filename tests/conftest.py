import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # the networks here are small: a second thread would only wait, and twice as long

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(autouse=True)
def defaults():
    """Scripts set the default dtype from --dtype; every test starts from torch's own."""
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="module")
def side_by_side(request, tmp_path_factory):
    """For tests that wait for processes of their own: those of a file that use this fixture run two at a time, each in
    a thread, from the first of them on. {test: its future}"""

    def start(test):
        known = getattr(getattr(test, "callspec", None), "params", {}) | {"tmp_path": tmp_path_factory.mktemp("test")}
        return pool.submit(test.function, **{k: known[k] if k in known else request.getfixturevalue(k)
                                             for k in inspect.signature(test.function).parameters})  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        yield {test.nodeid: start(test) for test in request.session.items
               if test.path == request.path and "side_by_side" in test.fixturenames}  # fmt: skip


def pytest_pyfunc_call(pyfuncitem):
    """Such a test has been started already: wait for it."""
    if "side_by_side" in pyfuncitem.fixturenames:
        pyfuncitem.funcargs["side_by_side"][pyfuncitem.nodeid].result()
        return True
