"""python -m npu_emulation.mutated_transfers ARGUMENTS...: as npu_emulation.serve, and the prefill
server makes a mistake with each request's cache, but with none of the first: MISTAKES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Timer
from typing import Any
from unittest import mock

from npu_emulation import serve
from npu_emulation.stand_ins import transfers
from npu_emulation.stand_ins.transfers import TransferEngine

Send = Callable[[], int]
LATE = 10  # seconds: the decode server is told much sooner that all has arrived


def not_waited_for(send: Send) -> int:
    """The engine's call returns when the transfer has begun, and its pieces follow."""
    finish = TransferEngine._finish

    def return_at_once(*transfer: Any) -> int:
        Timer(LATE, finish, transfer).start()
        return 0

    with mock.patch.object(TransferEngine, "_finish", return_at_once):
        return send()


def left_out(send: Send) -> int:
    """Every other piece, the first among them."""
    with mock.patch.object(transfers, "in_no_order", lambda num_pieces: range(1, num_pieces, 2)):
        return send()


def unmistaken(send: Send) -> int:
    return send()


# Pieces that come late may come into slots of a later request: that mistake is the last.
MISTAKES = (unmistaken, left_out, not_waited_for)


def main() -> None:
    from sglang.srt.disaggregation.ascend.conn import AscendKVManager

    send, mistakes = AscendKVManager.send_kvcache, iter(MISTAKES)

    def mistaken(*args: Any, **kwargs: Any) -> int:
        return next(mistakes)(partial(send, *args, **kwargs))

    AscendKVManager.send_kvcache = mistaken
    serve.main()


if __name__ == "__main__":
    main()
