"""Patches of what a request gets back that failed: each does what our hook does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, get_origin

import msgspec
import pytest
from fastapi import HTTPException

pytestmark = pytest.mark.sglang


def fail(request: Any) -> Any:
    raise KeyError("kv_cache")


def process(patched: Any, request: Any) -> list[Any]:
    """What the scheduler sends after ``request``, whose handler raises."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers import scheduler as module

    failed = patched("0026", "failed_control_output", **vars(io_struct), get_origin=get_origin)
    stand_ins = {
        "failed_control_output": failed,
        "get_mm": lambda: SimpleNamespace(mm_feature_transport="default"),
        "get_disagg": lambda: SimpleNamespace(enable_pd_role_switch=False),
    }
    function = patched("0026", "process_input_requests", **vars(module) | stand_ins)
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        session_controller=SimpleNamespace(maybe_reap=lambda now: None),
        flush_wrapper=SimpleNamespace(check_pending=lambda: None),
        _tokenized_requests=lambda request: getattr(request, "batch", ()),
        _request_dispatcher=fail,
        send_control_output=lambda output, request: sent.append(output),
        external_corpus_manager=None,
        rust_server=None,
    )
    function(scheduler, [request])
    return sent


def test_0026_sends_what_our_hook_sends(patched):
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    from sglang_ascend.plugin.requests.control_failures import failed_answer

    request = ResumeMemoryOccupationReqInput()
    (theirs,) = process(patched, request)
    ours = failed_answer(request, KeyError("kv_cache"))
    assert type(theirs) is type(ours)
    assert ours.rid.startswith(theirs.rid)


def test_0026_sends_nothing_to_nobody(patched):
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    assert process(patched, ContinueGenerationReqInput()) == []


def test_0026_answers_each_client_that_waits_for_tokens(patched):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput as Request

    from sglang_ascend.plugin.requests.control_failures import failed_answer

    missing = {field.name: None for field in msgspec.structs.fields(Request) if field.required}
    batch = [Request(**missing | {"rid": rid}) for rid in ("a", "b")]
    theirs = process(patched, SimpleNamespace(batch=batch))
    assert [type(answer).__name__ for answer in theirs] == ["AbortReq", "AbortReq"]
    for answer, request in zip(theirs, batch, strict=True):
        ours = failed_answer(request, KeyError("kv_cache"))
        assert answer.rid == ours.rid == request.rid
        message, reason = answer.finished_reason["message"], ours.finished_reason
        assert reason["message"].startswith(message)
        assert answer.finished_reason == reason | {"message": message}


def ask(patched: Any, answer: Any) -> list[Any]:
    from sglang.srt.managers import communicator as module

    cls = patched("0027", "FanOutCommunicator", **vars(module), HTTPException=HTTPException)

    async def wait() -> list[Any]:
        communicator = cls(lambda request: None, 1)
        waiting = asyncio.ensure_future(communicator(None))
        await asyncio.sleep(0)
        communicator.handle_recv(answer)
        return await waiting

    return asyncio.run(wait())


def test_0027_refuses_what_our_hook_refuses(patched):
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    with pytest.raises(HTTPException) as refused:
        ask(patched, ResumeMemoryOccupationReqOutput(rid="failed: no release before"))
    assert (refused.value.status_code, refused.value.detail) == (400, "no release before")
    answer = ResumeMemoryOccupationReqOutput()
    assert ask(patched, answer) == [answer]
