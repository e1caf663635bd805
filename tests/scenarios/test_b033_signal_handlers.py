"""``OnSignal`` lives with the user's handlers and with threads.

The handler that was there before is still called, and is put back at ``close()``. ``OnSignal.received``
is seen at once from any loop; ``should_stop`` is set by the next ``step()``, which saves and waits.
Off the main thread nothing is raised: a warning names ``request_stop()``.
"""

from __future__ import annotations

from pathlib import Path

from children import run_well

_MAIN = """
    import os, signal, sys
    import numpy as np
    import midstride as ms

    calls = []
    def own(signum, frame):
        calls.append(signum)
    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGUSR1, own)

    term, usr = ms.OnSignal(), ms.OnSignal(signal.SIGUSR1)
    state = {"w": np.arange(10)}
    ckpt = ms.Checkpointer(sys.argv[1], every=ms.EverySteps(100) | term | usr)
    assert ckpt.step(1, state) is None and not ckpt.should_stop
    for trigger, signum, step in ((usr, signal.SIGUSR1, 2), (term, signal.SIGTERM, 4)):
        assert not trigger.received
        sent = seen = None
        for poll in range(100):  # a long evaluation that only polls
            if seen is None and trigger.received:
                seen = poll
            if poll == 40:
                os.kill(os.getpid(), signum)
                sent = poll
        assert seen == sent + 1, (sent, seen)
        assert calls[-1] == signum, "the user's own handler is called"
        pending = ckpt.step(step, state)
        assert pending is not None and pending.done() and ckpt.should_stop
        assert ckpt.latest().step == step
        again = ckpt.step(step + 1, state)
        assert again is None, "one signal, one save"
    assert calls == [signal.SIGUSR1, signal.SIGTERM]
    ckpt.close()
    assert signal.getsignal(signal.SIGTERM) is own and signal.getsignal(signal.SIGUSR1) is own
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(calls) == 3
"""


def test_main_thread(tmp_path: Path) -> None:
    run_well(_MAIN, tmp_path / "run")


_THREAD = """
    import os, signal, sys, threading, warnings
    import numpy as np
    import midstride as ms

    calls = []
    def own(signum, frame):
        calls.append(signum)
        ckpt.request_stop()
    signal.signal(signal.SIGTERM, own)

    made = threading.Event()
    told = threading.Event()
    failures = []

    def train():
        global ckpt
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ckpt = ms.Checkpointer(sys.argv[1], every=ms.EverySteps(100) | ms.OnSignal())
            assert [w.category for w in caught] == [RuntimeWarning] and "request_stop()" in str(caught[0].message)
            assert ckpt.step(1, {"w": np.arange(10)}) is None and not ckpt.should_stop
            made.set()
            assert told.wait(60)
            assert ckpt.should_stop
            ckpt.save(2, {"w": np.arange(10)})
            ckpt.close()
        except BaseException as error:
            failures.append(error)
            made.set()
            raise

    thread = threading.Thread(target=train)
    thread.start()
    assert made.wait(60)
    assert signal.getsignal(signal.SIGTERM) is own
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [signal.SIGTERM]
    told.set()
    thread.join(60)
    assert not failures and ms.open(sys.argv[1]).latest().step == 2
    assert signal.getsignal(signal.SIGTERM) is own
"""


def test_worker_thread(tmp_path: Path) -> None:
    run_well(_THREAD, tmp_path / "run")


_LEFT_ALONE = """
    import signal, sys
    import numpy as np
    import midstride as ms

    before = {s: signal.getsignal(s) for s in signal.valid_signals()}
    with ms.Checkpointer(sys.argv[1], every=5) as ckpt:
        ckpt.save(1, {"w": np.arange(10)})
        assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before, "no OnSignal, no handler"
    with ms.Checkpointer(sys.argv[1], every=ms.OnSignal(), existing="continue") as ckpt:
        later = lambda signum, frame: None
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later, "a handler that was set after ours is not thrown away"
"""


def test_handlers_of_others_are_left_alone(tmp_path: Path) -> None:
    run_well(_LEFT_ALONE, tmp_path / "run")
