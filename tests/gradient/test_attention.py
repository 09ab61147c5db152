import threading

import torch

from metaleader.gradient.attention import plain_attention


def fused() -> bool:
    return torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()


def test_the_last_thread_that_leaves_restores_the_setting() -> None:
    assert fused()
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with plain_attention():
            entered.set()
            may_leave.wait()

    thread = threading.Thread(target=other)
    with plain_attention():
        assert not fused()
        thread.start()
        entered.wait()
    assert not fused(), "another thread is still inside"
    may_leave.set()
    thread.join()
    assert fused()


def test_nested_and_after_an_error() -> None:
    try:
        with plain_attention(), plain_attention():
            raise KeyError
    except KeyError:
        assert fused()
