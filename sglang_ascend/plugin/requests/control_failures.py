"""A request whose handler raises gets an answer, and so does a profile that cannot be taken; in
SGLang each ends the server."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_origin

from fastapi import HTTPException
from msgspec.structs import fields
from sglang.srt.managers import io_struct

from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import unwritable

logger = logging.getLogger(__name__)

# Marks a failure in ``rid``, the one field that every answer has and none of these uses.
FAILED = "failed: "
ABSENT_ON_CPU = frozenset({"MEM", "CUDA_PROFILER", "RPD"})
TOKENIZED = io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput


def answer_failures(result: None, self: Any) -> None:
    """After ``Scheduler.init_request_dispatcher``: what a handler raises becomes an answer."""
    dispatch = self._request_dispatcher

    def answered(request: Any) -> Any:
        try:
            return dispatch(request)
        except Exception as error:
            logger.exception("%s failed", type(request).__name__)
            return failed_answer(request, error)

    def dispatch_or_answer(request: Any) -> Any:
        # Those of a batch one by one, as SGLang's handler of batches takes them.
        requests_for_tokens = self._tokenized_requests(request)
        for one in requests_for_tokens:
            if (refusal := answered(one)) is not None:
                self.send_abort_output(refusal, one)
        return None if requests_for_tokens else answered(request)

    self._request_dispatcher = dispatch_or_answer


def failed_answer(request: Any, error: Exception) -> Any:
    """What the HTTP process waits for after ``request``, marked as failed; None if nothing."""
    name = type(request).__name__
    sentence = f"{name} failed with {error!r}: its traceback is in the server's log."
    if isinstance(request, TOKENIZED):
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": sentence}
        return io_struct.AbortReq(rid=request.rid, finished_reason=reason)
    answer_type = getattr(io_struct, f"{name.removesuffix('Input')}Output", None)
    if answer_type is None:
        return None
    blank = {bool: False, str: sentence, dict: {}, list: []}
    values = {
        # A field that both have tells whose answer this is: the session of an OpenSessionReqInput.
        field.name: getattr(request, field.name, blank.get(get_origin(field.type) or field.type))
        for field in fields(answer_type)
        if field.required
    }
    return answer_type(**values | {"rid": FAILED + sentence})


async def refuse_failed(
    call: Callable[..., Awaitable[list[Any]]], self: Any, obj: Any
) -> list[Any]:
    """Around ``FanOutCommunicator.__call__``. A failure of any rank becomes a 400."""
    if isinstance(obj, io_struct.ProfileReq):
        _refuse_failing_profile(obj)
    if isinstance(obj, io_struct.SetInternalStateReq):
        _refuse_lossy_thresholds(obj)
    answers = await call(self, obj)
    for answer in answers:
        if (answer.rid or "").startswith(FAILED):
            raise HTTPException(400, answer.rid.removeprefix(FAILED))
        # The one kind whose refusal SGLang turns into a 500.
        if isinstance(answer, io_struct.ProfileReqOutput) and not answer.success:
            raise HTTPException(400, answer.message)
    return answers


def _refuse_failing_profile(request: io_struct.ProfileReq) -> None:
    """Some profiles begin or end between two batches, where no handler waits."""
    if request.req_type != io_struct.ProfileReqType.START_PROFILE:
        return
    if request.profile_by_stage and not request.num_steps:
        raise HTTPException(400, "profile_by_stage needs num_steps: send the steps of a stage.")
    absent = ABSENT_ON_CPU.intersection(request.activities or ())
    if absent and device_profile().emulates:
        raise HTTPException(400, f"activities contains {min(absent)}, which no CPU has: send CPU.")
    folder = request.output_dir or os.getenv("SGLANG_TORCH_PROFILER_DIR", "/tmp")
    if reason := unwritable(Path(folder).expanduser()):
        raise HTTPException(
            400, f"output_dir {folder} cannot hold a profile ({reason}): name a folder that can."
        )


def _refuse_lossy_thresholds(request: io_struct.SetInternalStateReq) -> None:
    """SGLang's step would keep other drafts by them. A start refuses them too."""
    for name, value in request.server_args.items():
        if name.startswith("speculative_accept_threshold_") and value != 1:
            raise HTTPException(
                400, f"{name} would change replies and is not served: see docs/sampling.md."
            )
